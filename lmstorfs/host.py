"""What this host has: memory (as its cgroup allows), the FUSE device, privileges.

Facts only, read from the kernel each time they are asked for; what follows from them is decided
by the default settings, the checks before a mount, and `lmstorfs doctor`.
"""

import errno
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec

FUSE_DEVICE = Path("/dev/fuse")
FUSE_DEVICE_NUMBER = (10, 229)  # linux/miscdevice.h: MISC_MAJOR, FUSE_MINOR
FUSE_CONF = Path("/etc/fuse.conf")
CAP_SYS_ADMIN = 21  # linux/capability.h


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of memory that a mount can count on."""

    total: int
    """What the machine has, or its cgroup's limit where that is less."""
    available: int
    """What of it can be used without swapping."""
    limited_by: str
    """`machine` or `cgroup`: whose limit `total` is."""


def memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Memory:
    """Return this process's memory: the machine's, bounded by each memory cgroup above it."""
    machine = _meminfo(proc / "meminfo")
    total, available, limited_by = machine["MemTotal"], machine["MemAvailable"], "machine"
    for limit, used in _cgroup_limits(proc, cgroups):
        if limit < total:
            total, limited_by = limit, "cgroup"
        available = min(available, max(0, limit - used))
    return Memory(total=total, available=available, limited_by=limited_by)


def _meminfo(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines}


def _cgroup_limits(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, used) of this process's memory cgroup and of those above it.

    In a container the path that the kernel names may be the host's and not be there; its root is
    then the container's own group. Page cache that can be dropped is not counted as used (the
    kubelet counts the same way).
    """
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, files = cgroups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = cgroups / "memory"
            files = (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        else:
            continue
        group = base / path.lstrip("/")
        for directory in (group, *group.parents):
            yield from _cgroup_limit(directory, *files)
            if directory == base:
                break


def _cgroup_limit(
    directory: Path, limit_name: str, used_name: str, droppable_name: str
) -> Iterator[tuple[int, int]]:
    try:
        limit_text = (directory / limit_name).read_text().strip()
        used = int((directory / used_name).read_text())
        statistics = (directory / "memory.stat").read_text()
    except OSError:
        return  # a group outside of this namespace, or a root, which has no limit
    if limit_text == "max":
        return
    words = dict(line.split() for line in statistics.splitlines())
    yield int(limit_text), used - int(words.get(droppable_name, 0))


def fuse_device_problem() -> str | None:
    """Return what is wrong with /dev/fuse and what to do, None where it can be opened."""
    try:
        status = FUSE_DEVICE.stat()
    except FileNotFoundError:
        status = None
    number = (os.major(status.st_rdev), os.minor(status.st_rdev)) if status else None
    if status is None or not stat.S_ISCHR(status.st_mode) or number != FUSE_DEVICE_NUMBER:
        return (
            "there is no /dev/fuse; load the module: modprobe fuse; in a container give it "
            "--device /dev/fuse"
        )
    try:
        os.close(os.open(FUSE_DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        if error.errno == errno.EACCES:
            return "/dev/fuse may not be opened by this user; as root run: chmod 666 /dev/fuse"
        return (
            f"/dev/fuse cannot be opened ({error.strerror}); load the module: modprobe fuse; "
            "in a container give it --device /dev/fuse"
        )
    return None


def may_mount() -> bool:
    """Whether this process may call mount(2) itself (CAP_SYS_ADMIN)."""
    status = Path("/proc/self/status").read_text()
    effective = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective.split()[1], 16) >> CAP_SYS_ADMIN & 1)


def fusermount() -> str | None:
    """Return the path of fusermount3, None where it is not installed."""
    return shutil.which("fusermount3")


def mount_privilege_problem() -> str | None:
    """Return why this user cannot mount and what to do, None where it can."""
    if may_mount():
        return None
    if os.geteuid() == 0:
        return (
            "root has no CAP_SYS_ADMIN here, so it cannot mount; "
            "give the container --cap-add SYS_ADMIN"
        )
    if fusermount() is None:
        return "only root can mount without fusermount3; install it (package fuse3), or run as root"
    return None


def user_allow_other(path: Path = FUSE_CONF) -> bool:
    """Whether users other than root may mount with `allow_other`."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return False
    return any(line.split("#")[0].strip() == "user_allow_other" for line in lines)


def kernel_version(release: str | None = None) -> tuple[int, int]:
    """Return the running kernel's version, (6, 9) for `6.9.3-arch1`."""
    major, minor = (release or os.uname().release).split("-")[0].split(".")[:2]
    return int(major), int("".join(filter(str.isdigit, minor)) or 0)


NICENESS = 5  # of what works in the background: training comes first


def yield_to_training() -> None:
    """Let this thread come after what the machine is for, for good."""
    thread = threading.get_native_id()
    if os.getpriority(os.PRIO_PROCESS, thread) < NICENESS:
        os.setpriority(os.PRIO_PROCESS, thread, NICENESS)
