"""Which mounts there are: the kernel's table, the run directory, and who holds a state directory.

The kernel's mount table knows mount points but not state directories, so each daemon leaves a
small JSON file in a run directory: that is how every command finds a mount by its mount point
alone. The file may outlive its daemon (`kill -9`): it is a hint, and whether a mount is alive is
asked of the kernel (its table, the lock on `STATE/lock`) and never of the file.
"""

import errno
import fcntl
import os
import re
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec

from lmstorfs.config import PARTS, MountConfig, default_state_dir, mount_name, read_config
from lmstorfs.errors import SetupError
from lmstorfs.fuse.mounting import FUSE_TYPE, unmount

RUN_DIR_VARIABLE = "LMSTORFS_RUN_DIR"
ROOT_RUN_DIR = Path("/run/lmstorfs")
ANSWER_TIMEOUT_S = 5.0  # a mount that says nothing for so long is slow, not dead


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    """One mount as its daemon registered it."""

    mountpoint: str
    state_dir: str
    pid: int

    @property
    def state(self) -> Path:
        """The state directory."""
        return Path(self.state_dir)


# --- the kernel's table ---------------------------------------------------------------------


class MountedFilesystem(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `/proc/self/mountinfo`."""

    mountpoint: str
    filesystem: str
    source: str


def mounted_filesystems() -> list[MountedFilesystem]:
    """Return what is mounted in this namespace, in mount order (the last at a path is on top)."""
    found = []
    for line in os.fsdecode(Path("/proc/self/mountinfo").read_bytes()).splitlines():
        before, _, after = line.partition(" - ")
        kind, source = after.split(" ")[:2]
        found.append(
            MountedFilesystem(
                mountpoint=_unescape(before.split(" ")[4]),
                filesystem=kind,
                source=_unescape(source),
            )
        )
    return found


def mounted_at(mountpoint: str) -> MountedFilesystem | None:
    """Return the topmost file system mounted exactly at `mountpoint`."""
    here = [entry for entry in mounted_filesystems() if entry.mountpoint == mountpoint]
    return here[-1] if here else None


def is_mounted(mountpoint: str) -> bool:
    """Whether an lmstorfs (dead or alive) is mounted at `mountpoint`."""
    entry = mounted_at(mountpoint)
    return entry is not None and entry.filesystem == FUSE_TYPE


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


# --- the lock of a state directory ----------------------------------------------------------


def lock_held(state: Path) -> bool:
    """Whether a keeper holds `state`.

    Asks with a shared lock that is let go at once: two commands that ask at the same time do not
    see each other, and a keeper that meets one has to try again only once.
    """
    try:
        descriptor = os.open(state / PARTS["lock"], os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def lock_pid(state: Path) -> int | None:
    """Return the process id that the lock file names, None where it names none."""
    try:
        text = (state / PARTS["lock"]).read_text(errors="replace")
    except OSError:
        return None
    match = re.search(r"\d+", text)
    return int(match[0]) if match else None


def mountpoint_of(state: Path) -> str | None:
    """Return the mount point that `state` was last used for, None where it tells of none."""
    try:
        return read_config(state).mountpoint
    except (OSError, msgspec.DecodeError):
        return None


# --- the run directory ----------------------------------------------------------------------


def run_dir() -> Path:
    """Return the directory in which this user's daemons register their mounts."""
    if override := os.environ.get(RUN_DIR_VARIABLE):
        return Path(override)
    if os.geteuid() == 0:
        return ROOT_RUN_DIR
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "lmstorfs"
    return Path(f"/tmp/lmstorfs-{os.geteuid()}")


def register(config: MountConfig, pid: int) -> None:
    """Tell every command that `pid` serves `config`'s mount point."""
    directory = run_dir()
    directory.mkdir(parents=True, exist_ok=True, mode=0o755 if os.geteuid() == 0 else 0o700)
    _require_own(directory)
    entry = Mount(mountpoint=config.mountpoint, state_dir=config.state_dir, pid=pid)
    target = _entry_path(directory, config.mountpoint)
    fresh = target.with_suffix(f".{os.getpid()}")  # renamed into place: readers see all or nothing
    fresh.write_bytes(msgspec.json.encode(entry) + b"\n")
    fresh.replace(target)


def unregister(config: MountConfig) -> None:
    """Take back what `register` told, unless another state directory has the mount point now."""
    target = _entry_path(run_dir(), config.mountpoint)
    entry = _read_entry(target)
    if entry is not None and entry.state_dir == config.state_dir:
        target.unlink(missing_ok=True)


def all_mounts() -> list[Mount]:
    """Return the registered mounts whose state directory still exists, by mount point."""
    found: dict[str, Mount] = {}
    for directory in _searched_dirs():
        for entry in _entries(directory):
            if _exists(entry.state):
                found.setdefault(entry.mountpoint, entry)
    return sorted(found.values(), key=lambda mount: mount.mountpoint)


def find(path: str | os.PathLike[str]) -> Path:
    """Return the state directory of the mount at or above `path`."""
    return locate(path)[0].state


def locate(path: str | os.PathLike[str]) -> tuple[Mount, str]:
    """Return the mount at or above `path`, and `path` as it is called below the mount point.

    Raises `SetupError` where there is none.

    The path is compared as text first: following symbolic links means to ask the file system,
    and a mount whose daemon is stuck would hold this command too.
    """
    absolute = os.path.abspath(path)  # noqa: PTH100 - text only, see above
    known = all_mounts()
    found = _longest_prefix(absolute, known)
    if found is not None:
        return found, absolute
    resolved = os.path.realpath(absolute)
    found = _longest_prefix(resolved, known) or _by_state_dir(resolved)
    if found is None:
        raise SetupError(f"{absolute} is in no lmstorfs mount{_list_known(known)}")
    return found, resolved


def only_mount() -> Mount:
    """Return the one mount that there is; raises `SetupError` where there is none or several."""
    known = all_mounts()
    alive = [mount for mount in known if lock_held_or_mounted(mount)]
    choice = alive or known
    if not choice:
        raise SetupError("there is no mount; make one: lmstorfs mount /ckpt")
    if len(choice) > 1:
        names = ", ".join(mount.mountpoint for mount in choice)
        raise SetupError(f"there are several mounts, name one of them: {names}")
    return choice[0]


def lock_held_or_mounted(mount: Mount) -> bool:
    """Whether anything of `mount` is alive: its keeper, or its entry in the kernel's table."""
    try:
        return is_mounted(mount.mountpoint) or lock_held(mount.state)
    except PermissionError:
        return True  # another user's; whoever asks is told so by the control socket


def _searched_dirs() -> list[Path]:
    own = run_dir()
    if RUN_DIR_VARIABLE in os.environ or own == ROOT_RUN_DIR:
        return [own]
    return [own, ROOT_RUN_DIR]


def _entry_path(directory: Path, mountpoint: str) -> Path:
    return directory / f"{mount_name(mountpoint)}.json"


def _entries(directory: Path) -> Iterator[Mount]:
    if not directory.is_dir():
        return
    _require_own(directory)
    for path in sorted(directory.glob("*.json")):
        entry = _read_entry(path)
        if entry is not None:
            yield entry


def _read_entry(path: Path) -> Mount | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Mount)
    except (OSError, msgspec.DecodeError):
        return None  # gone meanwhile, or no entry of ours: it is only a hint


def _require_own(directory: Path) -> None:
    """Refuse a run directory that someone else made: `/tmp` is open to everyone."""
    status = directory.lstat()
    trusted = {0, os.geteuid()}
    if not stat.S_ISDIR(status.st_mode) or status.st_uid not in trusted:
        raise SetupError(f"{directory} belongs to another user; remove it, or set XDG_RUNTIME_DIR")
    if status.st_mode & stat.S_IWOTH:
        raise SetupError(f"{directory} is writable by everyone; run: chmod o-w {directory}")


def _exists(state: Path) -> bool:
    try:
        return state.is_dir()
    except PermissionError:
        return True


def _longest_prefix(path: str, known: list[Mount]) -> Mount | None:
    above = [m for m in known if path == m.mountpoint or path.startswith(f"{m.mountpoint}/")]
    return max(above, key=lambda mount: len(mount.mountpoint), default=None)


def _by_state_dir(path: str) -> Mount | None:
    """Find a mount that nobody registered (the run directory was cleared) by its default state."""
    for candidate in (path, *map(str, Path(path).parents)):
        state = Path(default_state_dir(candidate))
        if mountpoint_of(state) == candidate:
            return Mount(mountpoint=candidate, state_dir=str(state), pid=lock_pid(state) or 0)
    return None


def _list_known(known: list[Mount]) -> str:
    if not known:
        return "; there is none: lmstorfs mount /ckpt makes one"
    return "; there are: " + ", ".join(mount.mountpoint for mount in known)


# --- dead mounts ----------------------------------------------------------------------------


def answers(mountpoint: str) -> bool:
    """Whether the file system at `mountpoint` is served by anyone (perhaps slowly).

    False for a mount whose keeper is gone: the kernel says ENOTCONN. The question is asked in a
    thread, since a daemon that is busy or just being replaced keeps who asks waiting.
    """
    dead: list[bool] = []

    def ask() -> None:
        try:
            os.statvfs(mountpoint)  # `stat` may be answered from the kernel's own memory
        except OSError as error:
            dead.append(error.errno in (errno.ENOTCONN, errno.ECONNABORTED))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER_TIMEOUT_S)
    return not any(dead)


def detach(mountpoint: str) -> None:
    """Take the topmost mount at `mountpoint` out of the tree, though it may be in use."""
    try:
        unmount(mountpoint, lazy=True)
    except OSError as error:
        raise SetupError(
            f"the dead mount {mountpoint} cannot be detached ({error.strerror}); as root run: "
            f"umount -l {mountpoint}"
        ) from error
