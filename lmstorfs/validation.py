"""What has to be right before a mount: everything is asked before anything is made.

Each check either returns or raises with one line that says what is wrong and what to do. They go
from cheap to slow; the store, which may be far away, comes last.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from lmstorfs import host
from lmstorfs.config import PARTS, MountConfig
from lmstorfs.control_client import ControlClient
from lmstorfs.errors import SetupError, StoreUnreachableError, UsageError
from lmstorfs.fuse.mounting import FUSE_TYPE
from lmstorfs.mounts import (
    answers,
    detach,
    is_mounted,
    lock_held,
    lock_pid,
    mounted_at,
    mountpoint_of,
)
from lmstorfs.units import format_size

DRAIN_NOTICE_S = 5.0  # a keeper whose mount was just taken away needs a moment to notice
DRAIN_POLL_S = 0.5

Say = Callable[[str], None]
"""Tells the person at the terminal what happens meanwhile."""


def resolve_mountpoint(text: str) -> str:
    """Return the mount point as the kernel's mount table names it."""
    if not text:
        raise UsageError("the mount point is empty")
    absolute = os.path.abspath(text)  # noqa: PTH100 - a dead mount must not be asked
    if is_mounted(absolute):
        return absolute
    return os.path.realpath(absolute)


def validate(config: MountConfig, say: Say) -> None:
    """Raise where `config` cannot be mounted; leave nothing behind.

    The one thing that it may change: a dead mount at the mount point is taken away, when all
    else is right.
    """
    dead = _check_mountpoint(config.mountpoint)
    _check_host(config)
    _check_ram(config)
    _check_ssd(config)
    _check_overlaps(config)
    _check_peers(config)
    _check_state(config, say)
    _check_store(config, say)
    if dead:
        say(f"the daemon that served {config.mountpoint} is dead; its mount is taken away")
        while is_mounted(config.mountpoint):
            detach(config.mountpoint)
        _check_directory(config.mountpoint)


# --- the mount point -------------------------------------------------------------------------


def _check_mountpoint(mountpoint: str) -> bool:
    """Return whether a dead lmstorfs is mounted there."""
    entry = mounted_at(mountpoint)
    ours = entry is not None and entry.filesystem == FUSE_TYPE
    if entry is not None and entry.filesystem.startswith("fuse") and not answers(mountpoint):
        if ours:
            return True
        raise SetupError(
            f"{mountpoint} is a dead mount of {entry.filesystem}; run: umount -l {mountpoint}"
        )
    if entry is not None and ours:
        raise SetupError(
            f"{mountpoint} is already mounted (store {entry.source}); "
            f"to end it run: lmstorfs unmount {mountpoint}"
        )
    _check_directory(mountpoint)
    return False


def _check_directory(mountpoint: str) -> None:
    try:
        with os.scandir(mountpoint) as entries:
            empty = next(entries, None) is None
    except FileNotFoundError:
        raise SetupError(f"{mountpoint} does not exist; run: mkdir -p {mountpoint}") from None
    except NotADirectoryError:
        raise SetupError(f"{mountpoint} is not a directory; name an empty one") from None
    except OSError as error:
        raise SetupError(f"{mountpoint} cannot be read: {error.strerror}") from error
    if not empty:
        raise SetupError(f"{mountpoint} is not empty; a mount would hide its files, name another")


# --- this host -------------------------------------------------------------------------------


def _check_host(config: MountConfig) -> None:
    problem = host.fuse_device_problem() or host.mount_privilege_problem()
    if problem:
        raise SetupError(problem)
    if config.allow_other and os.geteuid() != 0 and not host.user_allow_other():
        raise SetupError(
            "allow_other needs the line user_allow_other in /etc/fuse.conf; "
            "add it as root, or leave allow_other out"
        )


def _check_ram(config: MountConfig) -> None:
    memory = host.memory()
    if config.ram_bytes > memory.total:
        whose = "this machine has" if memory.limited_by == "machine" else "the cgroup allows"
        raise SetupError(
            f"--ram: {format_size(config.ram_bytes)} is more than the {format_size(memory.total)} "
            f"that {whose}; {format_size(memory.available)} are free now"
        )


def _check_ssd(config: MountConfig) -> None:
    for tier in config.ssd:
        path = Path(tier.path)
        if not path.is_dir():
            raise SetupError(f"--ssd: the directory {path} does not exist; run: mkdir -p {path}")
        if not os.access(path, os.W_OK | os.X_OK):
            raise SetupError(f"--ssd: {path} cannot be written; run: chown {os.geteuid()} {path}")
        room = os.statvfs(path)
        total = room.f_blocks * room.f_frsize
        if tier.budget_bytes > total:
            raise SetupError(
                f"--ssd: {format_size(tier.budget_bytes)} is more than the {format_size(total)} "
                f"of the disk that holds {path}"
            )


# --- the mirror ------------------------------------------------------------------------------


def _check_peers(config: MountConfig) -> None:
    # The mirror is that of --recover-from where nobody says another.
    peers = {"recover-from": config.recover_from, "mirror": config.mirror, "listen": config.listen}
    named = {option: address for option, address in peers.items() if address is not None}
    if not named:
        return
    from lmstorfs.checkpoint.mirror.handshake import read_secret
    from lmstorfs.checkpoint.mirror.transport import is_loopback, parse_address

    if config.secret_file is not None:
        read_secret(Path(config.secret_file))
        return
    for option, address in named.items():
        if not is_loopback(parse_address(address)[0]):
            raise SetupError(
                f"--{option} {address} needs --secret-file FILE, the same on both nodes; make one: "
                "(umask 077; head -c 32 /dev/urandom | base64 > FILE)"
            )


# --- places that must not lie in each other --------------------------------------------------


def store_directory(config: MountConfig) -> Path | None:
    """Return the directory of a directory store, None for another kind."""
    url = config.store.url
    if url.startswith("file://"):
        url = unquote(urlsplit(url).path)
    return Path(os.path.realpath(url)) if url.startswith("/") else None


def _check_overlaps(config: MountConfig) -> None:
    mountpoint = Path(config.mountpoint)
    store = store_directory(config)
    places = [("state directory", config.state)]
    places += [("SSD tier", Path(tier.path)) for tier in config.ssd]
    for name, path in [*places, *([("store", store)] if store else [])]:
        if mountpoint.is_relative_to(path):
            raise SetupError(f"the mount point {mountpoint} lies inside the {name} {path}")
        if path.is_relative_to(mountpoint):
            raise SetupError(f"the {name} {path} lies inside the mount point {mountpoint}")
    for name, path in places:
        if store and path.is_relative_to(store):
            raise SetupError(f"the {name} {path} lies inside the store {store}")


# --- the state directory ---------------------------------------------------------------------


def _check_state(config: MountConfig, say: Say) -> None:
    state = config.state
    try:
        names = {entry.name for entry in state.iterdir()}
    except FileNotFoundError:
        _check_parent(state)
        return
    except NotADirectoryError:
        raise SetupError(f"the state directory {state} is not a directory; name another") from None
    except OSError as error:
        raise SetupError(f"the state directory {state} cannot be read: {error.strerror}") from error
    if state.stat().st_uid != os.geteuid():
        raise SetupError(f"the state directory {state} belongs to another user; name another")
    if names and not names & {PARTS["config"], PARTS["lock"], PARTS["log"]}:
        raise SetupError(
            f"{state} holds other files and is no state directory; name a new or empty one"
        )
    wait_until_free(state, say)


def _check_parent(state: Path) -> None:
    above = next(parent for parent in state.parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise SetupError(
            f"the state directory {state} cannot be made, {above} is not writable; give --state DIR"
        )


def wait_until_free(state: Path, say: Say) -> None:
    """Return when no keeper holds `state`; raises at once where its mount is in use.

    After a plain `umount` the daemon still drains into the store: that is waited for.
    """
    told = False
    give_up = time.monotonic() + DRAIN_NOTICE_S
    while lock_held(state):
        mountpoint = mountpoint_of(state) or "another mount"
        if is_mounted(mountpoint) or time.monotonic() > give_up:
            raise _in_use(state, mountpoint)
        if _is_draining(state):
            give_up = time.monotonic() + DRAIN_NOTICE_S
            if not told:
                say(f"waiting until the earlier mount of {mountpoint} has drained into its store")
            told = True
        time.sleep(DRAIN_POLL_S)


def _in_use(state: Path, mountpoint: str) -> SetupError:
    pid = lock_pid(state)
    who = f"{mountpoint} (pid {pid})" if pid else mountpoint
    return SetupError(
        f"the state directory {state} is in use by {who}; "
        f"run: lmstorfs unmount {mountpoint}, or give another --state"
    )


def _is_draining(state: Path) -> bool:
    try:
        status = ControlClient(state, restart_grace=0).call("status", timeout=DRAIN_NOTICE_S)
    except SetupError:
        return False
    return bool(status.get("state") == "draining")


# --- the store -------------------------------------------------------------------------------


def _check_store(config: MountConfig, say: Say) -> None:
    if store_directory(config) == config.state / PARTS["store"]:
        return  # ours to make, with the state directory
    from lmstorfs.store import open_store  # brings boto3, which takes a while

    store = open_store(config.store)
    try:
        store.probe(write=not config.read_only)
    except SetupError as error:
        # What is here already, or at the mirror, is not held back for it.
        known = config.recover_from or (config.state / PARTS["catalog"]).exists()
        if not known or not isinstance(error.__cause__, StoreUnreachableError):
            raise
        say(f"the store does not answer, going on without it: {error}")
    finally:
        store.close()
