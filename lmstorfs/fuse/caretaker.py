"""Answers the kernel when no daemon is left: who writes past the daemon still comes to an end.

Passthrough needs no daemon to move bytes, but close(2) waits for an answer to FLUSH. That it gets
here, and what the file then is gets written down, so that the next `lmstorfs mount` makes a
version of it. Everything else fails with EIO, since a program that fails helps more than one that
hangs. Standard library only: the keeper imports this module.
"""

import errno
import os
import select
from pathlib import Path

from lmstorfs.fuse import protocol as fuse
from lmstorfs.fuse.handle import handle_ino, handle_writable

_REQUEST_MAX_BYTES = (1 << 20) + (128 << 10)
_NO_ANSWER = frozenset({fuse.FUSE_FORGET, fuse.FUSE_BATCH_FORGET, fuse.FUSE_INTERRUPT})


def take_care(device: int, ram: Path, closed: Path) -> None:
    """Answer until the mount is gone; `closed` is appended to.

    Each of its lines is an inode and what its file in the RAM tier `ram` was when somebody closed
    it: size (bytes) and mtime (ns).
    """
    _write(device, fuse.OUT_HEADER.pack(fuse.OUT_HEADER_BYTES, fuse.FUSE_NOTIFY_RESEND, 0))
    request = bytearray(_REQUEST_MAX_BYTES)
    while True:
        select.select([device], [], [])
        try:
            os.readv(device, [request])
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.ENOENT, errno.EINTR):
                continue
            if error.errno in (errno.ENODEV, errno.ECONNABORTED):  # unmounted
                return
            raise
        opcode, unique, _ = fuse.OPCODE_UNIQUE_NODE.unpack_from(request)
        if opcode in _NO_ANSWER:
            continue
        code = errno.EIO
        if opcode in (fuse.FUSE_FLUSH, fuse.FUSE_RELEASE):
            (handle,) = fuse.HANDLE.unpack_from(request, fuse.IN_HEADER_BYTES)
            code = _note_closed(ram, handle, closed) if opcode == fuse.FUSE_FLUSH else 0
        _write(device, fuse.reply(unique, error=code))


def _note_closed(ram: Path, handle: int, closed: Path) -> int:
    if not handle_writable(handle):
        return 0
    try:
        found = (ram / str(handle_ino(handle))).stat()
        with closed.open("a") as file:
            file.write(f"{handle_ino(handle)} {found.st_size} {found.st_mtime_ns}\n")
    except OSError as error:  # not in the RAM tier, or the disk is full: nobody may believe in it
        return error.errno or errno.EIO
    return 0


def _write(device: int, message: bytes) -> None:
    try:
        os.write(device, message)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENODEV, errno.ENOTCONN, errno.ECONNABORTED):
            raise
