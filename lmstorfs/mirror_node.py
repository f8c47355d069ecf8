"""A node that keeps replicas and mounts nothing: `lmstorfs mirror`.

The replicas lie in a private tmpfs that outlives the process: one that is killed and started again
still has them.
"""

import contextlib
import fcntl
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import trio

from lmstorfs import host
from lmstorfs.checkpoint.mirror.handshake import read_secret
from lmstorfs.checkpoint.mirror.service import Replicas
from lmstorfs.checkpoint.mirror.transport import is_loopback, parse_address
from lmstorfs.config import MIN_RAM_BYTES, PARTS, default_state_dir
from lmstorfs.errors import SetupError, UsageError
from lmstorfs.fuse.mounting import MountError
from lmstorfs.logs import configure as configure_logs
from lmstorfs.ramfs import mount_ram, unmount_ram
from lmstorfs.units import format_size, parse_size


class MirrorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What such a node is told."""

    listen: str
    ram_bytes: int
    secret_file: str | None
    state: Path


def configure(listen: str, ram: str, secret_file: str | None, state: str | None) -> MirrorConfig:
    """Check what the command line says. Raises `SetupError` with one line that says what to do."""
    where, _ = parse_address(listen)
    size = parse_size(ram)
    if size < MIN_RAM_BYTES:
        raise UsageError(f"--ram {ram}: replicas need {format_size(MIN_RAM_BYTES)} at least")
    total = host.memory().total
    if size > total:
        raise SetupError(f"--ram {ram} is more than the {format_size(total)} of this machine")
    if secret_file is not None:
        read_secret(Path(secret_file))
    elif not is_loopback(where):
        raise SetupError(
            f"--listen {listen} needs --secret-file FILE, the same on both nodes; make one: "
            "(umask 077; head -c 32 /dev/urandom | base64 > FILE)"
        )
    folder = Path(state) if state else Path(default_state_dir("/mirror")).with_name("~mirror")
    return MirrorConfig(
        listen=listen, ram_bytes=size, secret_file=secret_file, state=folder.absolute()
    )


def run(config: MirrorConfig, ready: Callable[[str], None]) -> None:
    """Keep replicas until SIGTERM or SIGINT; `ready` is told the address."""
    config.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    configure_logs("info")
    ram = config.state / PARTS["ram"]
    with _locked(config.state / PARTS["lock"]):
        try:
            mount_ram(ram, config.ram_bytes)
        except MountError as error:
            raise SetupError(str(error)) from error
        held = 0
        try:
            held = trio.run(_serve, config, ram / PARTS["replicas"], ready)
        finally:
            if not held and not _holds_any(ram):
                unmount_ram(ram)
        if held:
            sys.stderr.write(
                f"{held} replicas stay in {ram}; the next lmstorfs mirror takes them over, "
                f"umount {ram} gives them up\n"
            )


def _holds_any(ram: Path) -> bool:
    replicas = ram / PARTS["replicas"]
    return replicas.is_dir() and any(replicas.glob("*/[0-9]*"))


async def _serve(config: MirrorConfig, directory: Path, ready: Callable[[str], None]) -> int:
    replicas = Replicas(config.listen, config.secret_file, directory, config.ram_bytes)
    async with trio.open_nursery() as nursery:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            nursery.start_soon(replicas.run)
            ready(replicas.address)
            async for _ in signals:
                break
            nursery.cancel_scope.cancel()
    return replicas.held


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode())
        yield
    except BlockingIOError:
        raise SetupError(
            f"the state directory {path.parent} is in use; give another --state"
        ) from None
    finally:
        os.close(fd)
