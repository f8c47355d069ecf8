"""The digest of a version: xxh3-128 of its whole content.

Read and not mapped: a mapping would be a few percent faster, and SIGBUS would end the process the
moment a program truncates the file. The buffer stays in the processor's cache, and both the read
and xxhash let go of the GIL. It is a checksum against torn and rotten copies, not a defence
against somebody who forges them.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

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
    _digest_range(state, fd, 0, want, cancelled)
    return state.hexdigest()


def _digest_range(
    state: xxhash.xxh3_128, fd: int, start: int, end: int, cancelled: Callable[[], bool]
) -> None:
    with memoryview(bytearray(min(_BUFFER_BYTES, max(end - start, 1)))) as buffer:
        while start < end:
            if cancelled():
                raise DigestCancelledError(f"given up after {start} bytes")
            with buffer[: end - start] as window:
                got = os.preadv(fd, [window], start)
                if got == 0:
                    raise EOFError(f"file has {start} bytes, not {end}")
                with window[:got] as read:
                    state.update(read)
            start += got


class FollowingDigest:
    """The digest of a file that is still being filled: a thread reads what has come.

    So the digest is there almost with the last byte, and what it reads is still in the cache.
    Ranges may come in any order and from any thread; each byte comes once.
    """

    def __init__(self, fd: int, cancelled: Callable[[], bool] = lambda: False) -> None:
        self._fd = fd
        self._cancelled = cancelled
        self._state = xxhash.xxh3_128()
        self._lock = threading.Lock()
        self._came: dict[int, int] = {}  # start → end of what waits for bytes before it
        self._reached = 0
        self._last: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="digest")

    def __enter__(self) -> "FollowingDigest":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._thread.shutdown(cancel_futures=True)

    def came(self, start: int, count: int) -> None:
        """These bytes are in the file now."""
        with self._lock:
            self._came[start] = start + count
            first = self._reached
            while (end := self._came.pop(self._reached, None)) is not None:
                self._reached = end
            if self._reached > first:
                self._digest(first, self._reached)

    def result(self, size: int) -> str:
        """Return the hex digest of the first `size` bytes, all of which are there.

        Raises `EOFError` and `DigestCancelledError` as `digest_fd` does.
        """
        with self._lock:
            if size > self._reached:
                self._digest(self._reached, size)
        if self._last is not None:
            self._last.result()
        return self._state.hexdigest()

    def _digest(self, start: int, end: int) -> None:
        before, range_of = self._last, (self._state, self._fd, start, end, self._cancelled)

        def work() -> None:
            if before is not None:
                before.result()  # done, as there is one thread; it raises what that one raised
            _digest_range(*range_of)

        self._last = self._thread.submit(work)


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
