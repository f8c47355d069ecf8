"""What a tier asks of the kernel about one of its files: room, holes, and who still writes.

Standard library and libc only. Constants keep the kernel's spelling (`linux/falloc.h`,
`fcntl.h`).
"""

import ctypes
import errno
import fcntl
import os
from pathlib import Path

FALLOC_FL_KEEP_SIZE = 0x01
FALLOC_FL_PUNCH_HOLE = 0x02

_PAGE_BYTES = 4096
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """Do fallocate(2), which the standard library has only without its `mode`."""
    while _libc.fallocate(fd, mode, offset, length) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def reserve(fd: int, start: int, end: int) -> bool:
    """Give the file memory up to `end`, size and times unchanged; False where there is none.

    The pages are charged to the caller: this is how a writer's memory cgroup stays out of it.
    Where somebody may write meanwhile, the mtime does not tell of that afterwards.
    """
    before = os.fstat(fd)
    try:
        fallocate(fd, FALLOC_FL_KEEP_SIZE, start, end - start)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            return False
        if error.errno == errno.EOPNOTSUPP:  # a filesystem without it: room comes as it is written
            return True
        raise
    after = os.fstat(fd)  # fallocate(2) counts as a write
    if after.st_size == before.st_size and after.st_mtime_ns != before.st_mtime_ns:
        os.utime(fd, ns=(before.st_atime_ns, before.st_mtime_ns))
    return True


def cut_reservation(fd: int, end: int) -> None:
    """Free what was reserved beyond the file's size, up to `end`; size and times stay."""
    before = os.fstat(fd)
    start = -(-before.st_size // _PAGE_BYTES) * _PAGE_BYTES
    if end <= start:
        return
    try:
        fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, start, end - start)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
    # ext4 punches nothing beyond the size; a truncation to the same size frees it. Not tried
    # first: tmpfs would split the huge page that the size lies in.
    blocks = os.fstat(fd).st_blocks
    if blocks and blocks == before.st_blocks and blocks * 512 > start:
        os.ftruncate(fd, before.st_size)
    if os.fstat(fd).st_mtime_ns != before.st_mtime_ns:
        os.utime(fd, ns=(before.st_atime_ns, before.st_mtime_ns))


def has_writers(path: Path) -> bool:
    """Whether any process has the file open for writing, or mapped shared and writable.

    The kernel answers by the rules of read leases (fcntl(2), F_SETLEASE): one is granted only
    where nobody can write. It sees what the mount cannot: a mapping that outlived its descriptor.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        # EAGAIN: there are writers. Anything else (a filesystem without leases): be careful.
        return error.errno == errno.EAGAIN
    finally:
        os.close(fd)
    return False
