"""The number that names an open to the kernel: a daemon that comes later can read it."""

import os

_WRITABLE = 1
_MAPPABLE = 2
_BITS = 3


def make_handle(ino: int, flags: int) -> int:
    """Return the handle for an open with these flags: a daemon that comes later can read it."""
    access = flags & os.O_ACCMODE
    bits = _WRITABLE * (access != os.O_RDONLY) | _MAPPABLE * (access == os.O_RDWR)
    return ino << _BITS | bits


def handle_ino(handle: int) -> int:
    """Return the inode that a handle names."""
    return handle >> _BITS


def handle_writable(handle: int) -> bool:
    """Whether the handle may write."""
    return bool(handle & _WRITABLE)


def handle_mappable(handle: int) -> bool:
    """Whether its holder may have mapped the file shared and writable (opened O_RDWR)."""
    return bool(handle & _MAPPABLE)
