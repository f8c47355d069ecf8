"""Between the catalog's inodes and the records that pyfuse3 gives to the kernel."""

import os
import stat

import pyfuse3

from lmstorfs.catalog import Inode

_BLOCK_BYTES = 512  # the unit of st_blocks
_BEST_IO_BYTES = 1 << 20  # what st_blksize recommends: cp and friends write in such pieces


def entry_of(
    inode: Inode, found: os.stat_result | None, timeout_s: float
) -> pyfuse3.EntryAttributes:
    """Return the attributes of `inode`; `found` is what the tier shows while it is written.

    `timeout_s` is how long the kernel may believe them.
    """
    entry = pyfuse3.EntryAttributes()
    entry.st_ino = pyfuse3.InodeT(inode.ino)
    entry.st_mode = pyfuse3.ModeT(inode.mode)
    entry.st_nlink = inode.nlink
    entry.st_uid = inode.uid
    entry.st_gid = inode.gid
    entry.st_rdev = inode.rdev
    size = inode.size if found is None else found.st_size
    mtime_ns = inode.mtime_ns if found is None else found.st_mtime_ns
    entry.st_size = size
    entry.st_blksize = _BEST_IO_BYTES
    entry.st_blocks = -(-size // _BLOCK_BYTES)
    entry.st_atime_ns = inode.atime_ns
    entry.st_mtime_ns = mtime_ns
    entry.st_ctime_ns = max(inode.ctime_ns, mtime_ns if found is not None else 0)
    entry.attr_timeout = timeout_s
    entry.entry_timeout = timeout_s
    return entry


def changed_mode(inode: Inode, mode: int) -> int:
    """Return the mode after a chmod to `mode`: the type stays."""
    return stat.S_IFMT(inode.mode) | stat.S_IMODE(mode)


def mode_after_chown(inode: Inode) -> int:
    """Return the mode after a change of owner: an executable loses its set-id bits."""
    mode = inode.mode
    if inode.is_file:
        mode &= ~stat.S_ISUID
        if mode & stat.S_IXGRP:
            mode &= ~stat.S_ISGID
    return mode
