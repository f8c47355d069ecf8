"""lmstorfs on hosts of their own (network namespaces), as the benches of several nodes need it."""

import os
import re
import shutil
import time
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.contenders import COMMAND_TIMEOUT_S, CannotStartError, used_bytes, wait_for
from lmstorfs import mounts
from lmstorfs.control_client import ControlClient
from lmstorfs.units import MIB
from tests.mounting import Mount
from tests.namespaces import Host
from tests.nodes import MirrorNode

EMPTY_BYTES = 16 * MIB  # catalogs and their journals may stay
CONNECT_POLL_S = 0.005
NO_GUARD = ("--no-guard",)  # what is deleted after a turn gives its memory back
STORE_LATER = ("-o", "flush_delay=600")  # nothing is brought to the store while we look
CONNECTED = re.compile(r"^timestamp=(\S+) .*event=connected .*purpose=replicate", re.MULTILINE)


def start_mirror(folder: Path, host: Host, ram_bytes: int, stack: ExitStack) -> MirrorNode:
    """Run `lmstorfs mirror` on a host; `folder` gets its state and the secret."""
    mirror = MirrorNode(host, folder, make_secret(folder), f"{ram_bytes // MIB}M")
    stack.callback(mirror.clean_up)
    mirror.start()
    return mirror


def make_secret(folder: Path) -> Path:
    secret = folder / "secret"
    secret.write_bytes(os.urandom(32).hex().encode())
    secret.chmod(0o600)
    return secret


def peer_options(mirror: MirrorNode, how: str = "--mirror") -> tuple[object, ...]:
    """Return what a mount is told of its mirror, or by `--recover-from` of its predecessor's."""
    return (how, mirror.address, "--secret-file", mirror.state.parent / "secret")


def node(
    folder: Path,
    stack: ExitStack,
    *options: object,
    host: Host | None = None,
    environment: dict[str, str] | None = None,
) -> Mount:
    """Return a node that is not mounted yet, and is cleaned up at the end."""
    folder.mkdir(exist_ok=True)
    made = Mount(folder, *NO_GUARD, *options, environment=environment)
    if host is not None:
        made.prefix = host.prefix
    stack.callback(made.clean_up)
    return made


def mount(made: Mount, *options: object) -> None:
    """Run `lmstorfs mount`."""
    try:
        made.start(*options)
    except AssertionError as error:
        raise CannotStartError(str(error)) from error


def start_node(made: Mount, *options: object) -> None:
    """Mount it, on the data path that is to be measured."""
    mount(made, *options)
    found = status(made)
    if found["data_path"] != "passthrough":
        raise CannotStartError(
            f"lmstorfs runs on {found['data_path']} here: {found['data_path_reason']}"
        )


def status(made: Mount) -> dict[str, Any]:
    """Return what `lmstorfs status` says, without a process that has to start first."""
    return dict(ControlClient(made.state).call("status"))


def lose(made: Mount) -> None:
    """The node is gone, with its processes, its RAM, its mount and its disk."""
    made.kill()
    for target in (str(made.path), str(made.state / "ram")):
        while mounts.mounted_at(target):
            mounts.detach(target)
    shutil.rmtree(made.state)


def wait_for_copies(made: Mount, path: Path, copies: str) -> None:
    """Do what `lmstorfs wait` does, without a process that has to start first."""
    client = ControlClient(made.state)
    client.call("wait", path=str(path), copies=copies, give_up_s=COMMAND_TIMEOUT_S)


def wait_until_mirrored(made: Mount) -> None:
    """Return when the mirror is connected and has everything.

    In this order: `wait` would have the store hurry where no mirror answers.
    """
    wait_for(lambda: status(made)["mirror"]["state"] != "down", "connecting to the mirror")
    wait_for_copies(made, made.path, "mirror")


def wait_until_freed(*states: Path) -> None:
    """Wait until deleted files have given their memory back on all these nodes."""
    for state in states:
        wait_for(lambda ram=state / "ram": used_bytes(ram) < EMPTY_BYTES, f"emptying {state}")


def wait_until_connected(made: Mount, mirror: MirrorNode, known: int) -> float:
    """Return when the mount had connected to its mirror, by the wall clock.

    That is told by what the mirror has logged beyond `known` characters. Returns once the mount
    knows it as well: before that, `wait` would have the store hurry.
    """
    while status(made)["mirror"]["state"] == "down":
        time.sleep(CONNECT_POLL_S)
    wait_for(
        lambda: CONNECTED.search(mirror.log.read_text()[known:]) is not None,
        "the mirror's log of it",
    )
    found = CONNECTED.search(mirror.log.read_text()[known:])
    assert found is not None
    return datetime.fromisoformat(found[1]).timestamp()
