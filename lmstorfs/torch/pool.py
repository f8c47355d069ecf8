"""Host memory in which tensors wait to be written: a few large buffers, taken once and bounded.

They are pinned where there is a GPU, since only into pinned memory does a copy run beside the
kernels. Taking pinned memory is slow (about 1 s for 4 GiB), and so is the first touch of any: both
are done once. What a checkpoint has more than the pool passes through it, buffer by buffer.
"""

import os
import threading
import time
from collections.abc import Callable

import msgspec
import torch

from lmstorfs.errors import PoolFullError
from lmstorfs.torch.pieces import view_of

CHUNK_BYTES = 32 << 20


class Chunk(msgspec.Struct):
    """One buffer of the pool."""

    memory: torch.Tensor
    """uint8, one dimension."""
    view: memoryview
    """The same bytes."""


class Pool:
    """At most `limit_bytes` of host memory in chunks of `chunk_bytes` (both rounded up to one)."""

    def __init__(self, limit_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.chunk_bytes = min(chunk_bytes, max(1, limit_bytes))
        self._limit = max(1, limit_bytes // self.chunk_bytes)
        self._free: list[Chunk] = []
        self._made = 0
        self._changed = threading.Condition()

    @property
    def held_bytes(self) -> int:
        """Memory that the pool has taken so far."""
        return self._made * self.chunk_bytes

    def prepare(self, wanted_bytes: int) -> None:
        """Take memory for a checkpoint of this size now, and touch it."""
        while self.held_bytes < min(wanted_bytes, self._limit * self.chunk_bytes):
            with self._changed:
                if self._made >= self._limit:
                    return
                self._made += 1
            self.give_back(self._make())

    def take(self, timeout_s: float, starved: Callable[[], None] = lambda: None) -> Chunk:
        """Return a chunk, waiting for one; raises `PoolFullError` where none comes in time.

        `starved` is called where there is none free and none to be made.
        """
        give_up = time.monotonic() + timeout_s
        with self._changed:
            if not self._free and self._made >= self._limit:
                starved()
            while not self._free and self._made >= self._limit:
                left = give_up - time.monotonic()
                if left <= 0:
                    held = f"{self.held_bytes >> 20} MiB"
                    raise PoolFullError(
                        f"no staging memory came free within {timeout_s:.0f} s ({held} are taken):"
                        " the writes hang, or max_host_memory is too small"
                    )
                self._changed.wait(left)
            if self._free:
                return self._free.pop()
            self._made += 1
        return self._make()

    def give_back(self, chunk: Chunk) -> None:
        """Let others have the chunk."""
        with self._changed:
            self._free.append(chunk)
            self._changed.notify()

    def _make(self) -> Chunk:
        try:
            memory = host_buffer(self.chunk_bytes)
        except BaseException:
            with self._changed:
                self._made -= 1
            raise
        memory.fill_(0)  # the first touch, here and not while the training waits
        return Chunk(memory, view_of(memory.untyped_storage(), 0, self.chunk_bytes))


def host_buffer(nbytes: int) -> torch.Tensor:
    """Return new host memory (uint8, one dimension), pinned where there is a GPU."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


def host_memory() -> int:
    """Return the bytes of memory that this host has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
