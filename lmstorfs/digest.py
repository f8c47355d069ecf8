"""The digest of a version: xxh3-128 of its whole content.

Mapped instead of read: a tier's file is already in memory, so nothing is copied, and xxhash
lets go of the GIL. It is a checksum against torn and rotten copies, not a defence against
somebody who forges them.
"""

import mmap
import os
from pathlib import Path

import xxhash

_WINDOW_BYTES = 64 << 20  # what one update sees: large enough for speed, small enough to cancel


def digest_bytes(data: bytes) -> str:
    """Return the hex digest of `data`."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_fd(fd: int, size: int | None = None) -> str:
    """Return the hex digest of the first `size` bytes (default: all) of the file open as `fd`.

    Raises `EOFError` where the file is shorter than `size`.
    """
    have = os.fstat(fd).st_size
    want = have if size is None else size
    if have < want:
        raise EOFError(f"file has {have} bytes, not {want}")
    state = xxhash.xxh3_128()
    if want:
        with mmap.mmap(fd, want, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as view:
            for start in range(0, want, _WINDOW_BYTES):
                with view[start : start + _WINDOW_BYTES] as window:
                    state.update(window)
    return state.hexdigest()


def digest_file(path: Path | str, size: int | None = None) -> str:
    """Return the hex digest of the file at `path`; see `digest_fd`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return digest_fd(fd, size)
    finally:
        os.close(fd)
