"""The commands about checkpoints and their copies: which there are, and waiting for them."""

import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

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
    answer = client.call("latest", timeout=LATEST_TIMEOUT_S, path=below)
    if answer["path"] is not None:
        console.say_path(_absolute(found, answer["path"]))
        return
    advice = "see lmstorfs checkpoints"
    if answer["deleted"] is not None:
        advice = (
            "the newest was deleted and is kept: lmstorfs undelete "
            f"{shlex.quote(_absolute(found, answer['deleted']))} brings it back"
        )
    raise SetupError(f"there is no complete checkpoint in {below}; {advice}")


@copies.command(
    epilog="Examples:\n\n  lmstorfs undelete\n\n  lmstorfs undelete /ckpt/step-3000\n\n"
    "  lmstorfs undelete /ckpt/last.pt --to /ckpt/before.pt"
)
def undelete(
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="[PATH]",
            help="The checkpoint's path as it was. The mount point, or nothing: list them.",
        ),
    ] = None,
    to: Annotated[
        str | None, typer.Option("--to", metavar="NEWPATH", help="Bring it back as this.")
    ] = None,
    discard: Annotated[
        bool, typer.Option("--discard", help="Let it (or all) go for good: its room is free.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Bring back a checkpoint that was deleted before a newer one was safe."""
    found, below = locate(path) if path is not None else (only_mount(), "")
    client = ControlClient(found.state)
    if discard:
        below = below or found.mountpoint
        client.call("undelete", timeout=STATUS_TIMEOUT_S, path=below, discard=True)
        console.say(f"what was kept of {below} is gone for good")
        return
    kept = client.call("undelete", timeout=STATUS_TIMEOUT_S, path=found.mountpoint)
    if below in ("", found.mountpoint):
        if json:
            console.show_json(kept)
        else:
            console.output().print(console.kept_table(kept["kept"], found.mountpoint))
        return
    target = None if to is None else locate(to)[1]
    if target is not None:
        _copy_what_is_left(found, below, target, kept["kept"])
    answer = client.call("undelete", timeout=LATEST_TIMEOUT_S, path=below, to=target)
    if json:
        console.show_json(answer)
        return
    for problem in answer["problems"]:
        console.note(problem)
    size = f"{console.files(answer['files'])}, {format_size(answer['bytes'])}"
    console.say(f"{_absolute(found, answer['path'])} is back ({size})")


def _copy_what_is_left(found: Mount, path: str, to: str, kept: list[dict[str, Any]]) -> None:
    """Copy what still lies under the checkpoint's old name: it belongs to both."""
    mine = [each for each in kept if _absolute(found, each["path"]) == path]
    for name in mine[0]["still_there"] if mine else []:
        source = Path(_absolute(found, name))
        target = Path(to) / source.relative_to(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy2(source, target)


def _absolute(found: Mount, path: str) -> str:
    return os.path.join(found.mountpoint, path)  # noqa: PTH118 - bytes stay


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
