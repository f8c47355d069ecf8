"""The commands about checkpoints and their copies: which there are, and waiting for them."""

import os
from collections.abc import Sequence
from typing import Annotated

import typer

from lmstorfs import console
from lmstorfs.control_client import ControlClient
from lmstorfs.errors import SetupError
from lmstorfs.mounts import Mount, locate, only_mount
from lmstorfs.units import format_size

STATUS_TIMEOUT_S = 30.0
LATEST_TIMEOUT_S = 300.0  # it may have to look through the store

copies = typer.Typer()

MountArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[MOUNTPOINT]", help="A mount point or a path below it; may be left out."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON for programs, with stable keys.")]


def choose(mountpoint: str | None) -> Mount:
    """Return the mount at or above `mountpoint`, or the only one."""
    return locate(mountpoint)[0] if mountpoint else only_mount()


@copies.command(epilog="Examples:\n\n  lmstorfs checkpoints\n\n  lmstorfs checkpoints /ckpt --json")
def checkpoints(mountpoint: MountArgument = None, json: JsonOption = False) -> None:
    """Which checkpoints are safe, where each has copies, and what each place could give back."""
    answer = ControlClient(choose(mountpoint).state).call("checkpoints", timeout=STATUS_TIMEOUT_S)
    if json:
        console.show_json(answer)
    else:
        console.output().print(console.checkpoint_table(answer["checkpoints"]))
        if answer["checkpoints"]:
            console.output().print(console.restorable(answer["newest"]))


@copies.command(epilog="Example:\n\n  python train.py --resume $(lmstorfs latest /ckpt)")
def latest(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="The mount point, or a directory in the mount.")
    ],
) -> None:
    """Print the path of the newest complete checkpoint at or below PATH, for --resume."""
    found, below = locate(path)
    client = ControlClient(found.state)
    newest = client.call("latest", timeout=LATEST_TIMEOUT_S, path=below)["path"]
    if newest is not None:
        console.say_path(os.path.join(found.mountpoint, newest))  # noqa: PTH118 - bytes stay
        return
    raise SetupError(f"there is no complete checkpoint in {below}; see lmstorfs checkpoints")


@copies.command(epilog="Examples:\n\n  lmstorfs sync\n\n  lmstorfs sync /ckpt/run-7/step-3000")
def sync(
    paths: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PATH…]", help="Files or directories. Default: all of the mount."),
    ] = None,
) -> None:
    """Return when the store has all of it; without a PATH: all of the only mount."""
    for found, below in _by_mount(paths or []):
        with console.transfer_progress("storing") as update:
            done = ControlClient(found.state).call("sync", on_progress=update, paths=below)
        waited = f"{console.files(done['files'])}, {format_size(done['bytes'])}"
        console.say(f"stored: the store has all of {', '.join(below)} (waited for {waited})")


def _by_mount(paths: Sequence[str]) -> list[tuple[Mount, list[str]]]:
    if not paths:
        only = only_mount()
        return [(only, [only.mountpoint])]
    grouped: dict[str, tuple[Mount, list[str]]] = {}
    for path in paths:
        found, absolute = locate(path)
        grouped.setdefault(found.mountpoint, (found, []))[1].append(absolute)
    return list(grouped.values())


@copies.command(
    epilog="Examples:\n\n  lmstorfs wait /ckpt/step-3000 --copies 2\n\n"
    "  lmstorfs wait /ckpt/step-3000 --copies store --timeout 600"
)
def wait(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A file or a directory.")],
    wanted: Annotated[
        str,
        typer.Option(
            "--copies",
            metavar="2|mirror|store",
            help="How many copies, or which one: the mirror's (or the store's, which comes "
            "after it), the store's.",
        ),
    ] = "2",
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Give up after this; exit code 1.")
    ] = None,
) -> None:
    """Return when all that is at and below PATH has these copies."""
    found, below = locate(path)
    with console.transfer_progress("copying") as update:
        client = ControlClient(found.state)
        done = client.call("wait", on_progress=update, path=below, copies=wanted, give_up_s=timeout)
    what = {"2": "two copies", "mirror": "a copy at the mirror", "store": "a copy in the store"}
    size = format_size(done["bytes"])
    console.say(f"{below} has {what[wanted]} ({console.files(done['files'])}, {size})")
