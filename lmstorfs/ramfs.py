"""The RAM tier's memory: a private tmpfs, or what stands in for it. Standard library only."""

import contextlib
import errno
import hashlib
import os
import shutil
from pathlib import Path

from lmstorfs.fuse.mounting import (
    MS_NODEV,
    MS_NOSUID,
    MS_REMOUNT,
    MountError,
    is_mountpoint,
    mount,
    unmount_dir,
)

# Beside the files that the budget counts: the log of opens, and copies of other nodes' catalogs.
_OWN_BYTES = 16 << 20
_OWN_SHARE = 32


def mount_ram(ram: Path, budget_bytes: int) -> None:
    """Mount a private tmpfs at `ram`, or take over the one that an earlier keeper left.

    Without the privilege to mount, a directory in /dev/shm stands in for it. Raises `MountError`.
    """
    size_bytes = budget_bytes + _OWN_BYTES + budget_bytes // _OWN_SHARE
    if is_mountpoint(ram):
        flags = MS_REMOUNT | MS_NOSUID | MS_NODEV
        with contextlib.suppress(OSError):  # smaller than what it holds: the books hold it
            mount("lmstorfs", str(ram), "tmpfs", flags, f"size={size_bytes}")
        return
    if ram.is_symlink():
        _use_shared_memory(ram)
        return
    ram.mkdir(mode=0o700, exist_ok=True)
    size = f"mode=0700,nr_inodes=0,size={size_bytes}"
    for data in (f"huge=within_size,{size}", size):  # a kernel without huge pages refuses
        try:
            mount("lmstorfs", str(ram), "tmpfs", MS_NOSUID | MS_NODEV, data)
        except OSError as error:
            if error.errno == errno.EPERM:
                break
            if error.errno != errno.EINVAL:
                raise MountError(f"cannot mount a tmpfs at {ram}: {error}") from error
        else:
            return
    _use_shared_memory(ram)


def _use_shared_memory(ram: Path) -> None:
    """Make `ram` a link to a directory of our own in /dev/shm, where that is to be had."""
    if not os.access("/dev/shm", os.W_OK):
        return
    name = hashlib.sha256(os.fsencode(ram.parent)).hexdigest()[:16]  # one a state directory
    shared = Path("/dev/shm") / f"lmstorfs-{os.getuid()}-{name}"
    if ram.is_symlink():
        shared = ram.readlink()  # gone after a reboot
    shared.mkdir(mode=0o700, exist_ok=True)
    if shared.lstat().st_uid != os.getuid() or shared.is_symlink():
        raise MountError(f"{shared} belongs to somebody else; remove it")
    if not ram.is_symlink():
        ram.rmdir()
        ram.symlink_to(shared)


def unmount_ram(ram: Path) -> None:
    """Give the memory back."""
    if is_mountpoint(ram):
        unmount_dir(ram)
    elif ram.is_symlink():
        shutil.rmtree(ram.resolve(), ignore_errors=True)
        ram.unlink()
