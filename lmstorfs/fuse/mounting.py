"""mount(2) and umount(2): how a FUSE device, and the RAM tier's tmpfs, come and go.

Standard library and libc only: the keeper imports this module and must have no reason to die.
"""

import ctypes
import errno
import os
import socket
import subprocess
from pathlib import Path

# mount(2) flags, linux/mount.h
MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_REMOUNT = 32
MS_NOATIME = 1024
MNT_DETACH = 2

FUSE_TYPE = "fuse.lmstorfs"
_libc = ctypes.CDLL(None, use_errno=True)


class MountError(Exception):
    """The mount cannot be made; one line that says what to do."""


def mount(source: str, target: str, kind: str, flags: int, data: str) -> None:
    """Do mount(2). Raises `OSError`."""
    texts = (os.fsencode(text) for text in (source, target, kind))
    if _libc.mount(*texts, ctypes.c_ulong(flags), os.fsencode(data)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), target)


def unmount_dir(target: Path | str, flags: int = MNT_DETACH) -> None:
    """Do umount2(2). Raises `OSError`."""
    if _libc.umount2(os.fsencode(target), flags) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(target))


def is_mountpoint(path: Path) -> bool:
    """Whether something is mounted exactly at `path`."""
    try:
        return path.lstat().st_dev != path.parent.stat().st_dev  # a link leads elsewhere, no more
    except OSError:
        return False


def is_fuse_mounted(target: str) -> bool:
    """Whether the kernel's table has a mount of our type there; the mount itself is not asked."""
    escaped = target.replace("\\", "\\134").replace(" ", "\\040").replace("\t", "\\011")
    lines = Path("/proc/self/mounts").read_text(errors="surrogateescape").splitlines()
    return any(line.split(" ")[1:3] == [escaped, FUSE_TYPE] for line in lines)


def mount_fuse(target: str, *, source: str, allow_other: bool, read_only: bool) -> int:
    """Mount at `target`; return the device's descriptor. Raises `MountError`.

    `source` is what the mount table shows. Without the privilege to mount, fusermount3 does it.
    """
    options = "default_permissions" + (",allow_other" if allow_other else "")
    flags = MS_NOSUID | MS_NODEV | MS_NOATIME | (MS_RDONLY if read_only else 0)
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    data = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},{options}"
    try:
        mount(source, target, FUSE_TYPE, flags, data)
    except OSError as error:
        os.close(device)
        if error.errno != errno.EPERM:
            raise MountError(f"cannot mount at {target}: {error.strerror}") from error
        source = source.replace("\\", "\\\\").replace(",", "\\,")
        options += f",fsname={source},subtype=lmstorfs,nosuid,nodev,noatime"
        return _fusermount(target, options + (",ro" if read_only else ""))
    return device


def _fusermount(target: str, options: str) -> int:
    """Have the set-uid helper mount; it sends the descriptor over a socket."""
    ours, its = socket.socketpair()
    with ours, its:
        try:
            done = subprocess.run(
                ["fusermount3", "-o", options, "--", target],
                pass_fds=[its.fileno()],
                env={**os.environ, "_FUSE_COMMFD": str(its.fileno())},
                capture_output=True,
                text=True,
                check=False,
            )
        except FileNotFoundError as error:
            raise MountError("fusermount3 is missing; install Debian's package fuse3") from error
        if done.returncode != 0:
            raise MountError(f"cannot mount at {target}: {done.stderr.strip()}")
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    return descriptors[0]


def unmount(target: str, *, lazy: bool) -> None:
    """Take the topmost mount at `target` away, by fusermount3 where we lack the privilege.

    Raises `OSError` (EBUSY when not `lazy`) with the reason in its `strerror`.
    """
    try:
        unmount_dir(target, MNT_DETACH if lazy else 0)
    except PermissionError as error:
        try:
            done = subprocess.run(
                ["fusermount3", "-uz" if lazy else "-u", target],
                capture_output=True,
                text=True,
                check=False,
            )
        except FileNotFoundError:
            raise error from None
        if done.returncode != 0:
            busy = "busy" in done.stderr
            raise OSError(errno.EBUSY if busy else errno.EPERM, done.stderr.strip()) from error


def unmount_fuse(target: str, *, lazy: bool = True) -> None:
    """Take our mount at `target` away, if it is there; raises as `unmount` does."""
    if is_fuse_mounted(target):
        unmount(target, lazy=lazy)
