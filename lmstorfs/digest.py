"""The digest of a version: xxh3-128 of its whole content.

Read and not mapped: a mapping would be a few percent faster, and SIGBUS would end the process the
moment a program truncates the file. The buffer stays in the processor's cache, and both the read
and xxhash let go of the GIL. It is a checksum against torn and rotten copies, not a defence
against somebody who forges them.
"""

import os
from collections.abc import Callable
from pathlib import Path

import xxhash

from lmstorfs.errors import LmstorfsError

BLOCK_BYTES = 8 << 20
BLOCK_DIGEST_BYTES = 16
_BUFFER_BYTES = 1 << 20


class DigestCancelledError(LmstorfsError):
    """Nobody wants the digest any more."""


def digest_bytes(data: bytes) -> str:
    """Return the hex digest of `data`."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_fd(
    fd: int, size: int | None = None, cancelled: Callable[[], bool] = lambda: False
) -> str:
    """Return the hex digest of the first `size` bytes (default: all) of the file open as `fd`.

    Raises `EOFError` where the file is shorter than `size`, `DigestCancelledError` soon after
    `cancelled` has become true.
    """
    want = os.fstat(fd).st_size if size is None else size
    state = xxhash.xxh3_128()
    done = 0
    with memoryview(bytearray(min(_BUFFER_BYTES, max(want, 1)))) as buffer:
        while done < want:
            if cancelled():
                raise DigestCancelledError(f"given up after {done} of {want} bytes")
            with buffer[: want - done] as window:
                got = os.preadv(fd, [window], done)
                if got == 0:
                    raise EOFError(f"file has {done} bytes, not {want}")
                with window[:got] as read:
                    state.update(read)
            done += got
    return state.hexdigest()


def digest_blocks(
    fd: int, size: int, cancelled: Callable[[], bool] = lambda: False
) -> tuple[str, bytes]:
    """Return the hex digest of the first `size` bytes and the digests of their blocks.

    The latter are 16 bytes for each `BLOCK_BYTES`, one after the other; the last block may be
    shorter. Raises as `digest_fd` does.
    """
    whole = xxhash.xxh3_128()
    blocks = bytearray()
    with memoryview(bytearray(min(_BUFFER_BYTES, max(size, 1)))) as buffer:
        for start in range(0, size, BLOCK_BYTES):
            block = xxhash.xxh3_128()
            end = min(start + BLOCK_BYTES, size)
            while start < end:
                if cancelled():
                    raise DigestCancelledError(f"given up after {start} of {size} bytes")
                with buffer[: end - start] as window:
                    got = os.preadv(fd, [window], start)
                    if got == 0:
                        raise EOFError(f"file has {start} bytes, not {size}")
                    with window[:got] as read:
                        whole.update(read)
                        block.update(read)
                start += got
            blocks += block.digest()
    return whole.hexdigest(), bytes(blocks)


def digest_file(
    path: Path | str, size: int | None = None, cancelled: Callable[[], bool] = lambda: False
) -> str:
    """Return the hex digest of the file at `path`; see `digest_fd`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return digest_fd(fd, size, cancelled)
    finally:
        os.close(fd)
