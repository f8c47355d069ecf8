"""Files that are sent while they are being written: a close then finds most of them there.

But not a file that grows much faster than the link can follow. To send it at once would win little
time, as most of it has to be sent after its close anyway, and would cost its writer processor and
memory bandwidth just while it uses both.
"""

import os
import time
from collections.abc import Callable, Iterator

import msgspec

from lmstorfs.catalog import SqliteCatalog
from lmstorfs.checkpoint.mirror.peer import SLICE_BYTES
from lmstorfs.digest import BLOCK_BYTES
from lmstorfs.tiers import Placement

_OUTRUNS = 3  # this many times the link's speed: at most a quarter of the time could be won
_WAIT_MAX_S = 1.0  # for such a writer to pause
_RATE_MIN_S = 0.005  # growth is measured over at least this
_NEWEST_WEIGHT = 0.3  # of a measurement of the link


class Growing(msgspec.Struct, frozen=True):
    """A file that is open for writing."""

    ino: int
    size: int
    anew: bool
    """Whether its content began anew with this open: none of it is in an older version."""


class Slice(msgspec.Struct, frozen=True):
    """Whole blocks that a writer has added."""

    ino: int
    fd: int
    start: int
    count: int


class _Stream:
    """One such file: how far it was sent, and how fast it grows."""

    def __init__(self, fd: int, sent: int, size: int, now: float) -> None:
        self.fd = fd
        self.sent = sent
        self.bytes_per_s = 0.0
        self.outran_at: float | None = None
        """Since when it has outrun the link."""
        self._size, self._looked_at = size, now

    def look(self, size: int, now: float) -> None:
        """It has this size now."""
        elapsed_s = now - self._looked_at
        if elapsed_s >= _RATE_MIN_S:
            self.bytes_per_s = (size - self._size) / elapsed_s
            self._size, self._looked_at = size, now


class Streams:
    """All such files of one mount."""

    def __init__(
        self,
        catalog: SqliteCatalog,
        placement: Placement,
        growing: Callable[[], list[Growing]],
        still_waits: Callable[[int], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take `still_waits`: whether a closed file's version is still to be sent."""
        self._catalog = catalog
        self._placement = placement
        self._growing = growing
        self._still_waits = still_waits
        self._clock = clock
        self._link_bytes_per_s: float | None = None
        self._streams: dict[int, _Stream] = {}

    @property
    def any_growing(self) -> bool:
        """Whether anything is open for writing."""
        return bool(self._growing())

    def slices(self) -> Iterator[Slice]:
        """Yield what was added since the last look; the caller sends each before the next."""
        growing = {file.ino: file for file in self._growing()}
        sizes = {ino: file.size for ino, file in growing.items()}
        for ino in [ino for ino in self._streams if ino not in growing]:
            if self._still_waits(ino):  # closed, and being digested: the link need not idle
                sizes[ino] = os.fstat(self._streams[ino].fd).st_size
            else:
                self.forget(ino)
        for ino, size in sizes.items():
            stream = self._streams.get(ino) or self._begin(growing[ino])
            if stream is None or self._outruns_link(stream, size):
                continue
            end = size // BLOCK_BYTES * BLOCK_BYTES
            start = min(stream.sent, end)  # it may have been truncated
            stream.sent = min(end, start + SLICE_BYTES)
            if stream.sent > start:
                began = self._clock()
                yield Slice(ino, stream.fd, start, stream.sent - start)
                self._measure_link(stream.sent - start, self._clock() - began)

    def _outruns_link(self, stream: _Stream, size: int) -> bool:
        """Whether to wait with this file until its writer pauses."""
        now = self._clock()
        stream.look(size, now)
        link = self._link_bytes_per_s
        if link is None or stream.bytes_per_s < _OUTRUNS * link:
            stream.outran_at = None
            return False
        if stream.outran_at is None:
            stream.outran_at = now
        return now - stream.outran_at < _WAIT_MAX_S

    def _measure_link(self, count: int, took_s: float) -> None:
        if count < SLICE_BYTES:  # much of it is in the socket's buffer only
            return
        found = count / max(took_s, 1e-6)
        known = found if self._link_bytes_per_s is None else self._link_bytes_per_s
        self._link_bytes_per_s = known + _NEWEST_WEIGHT * (found - known)

    def _begin(self, file: Growing) -> _Stream | None:
        inode = self._catalog.find(file.ino)
        tier = self._placement.tier(inode.tier) if inode is not None else None
        if tier is None:
            return None
        try:
            fd = os.open(tier.path(file.ino), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        # What an older version may have too is compared by digest once the file is closed.
        sent = 0 if file.anew else file.size // BLOCK_BYTES * BLOCK_BYTES
        stream = self._streams[file.ino] = _Stream(fd, sent, file.size, self._clock())
        return stream

    def forget(self, ino: int) -> None:
        """The file's version has arrived, or it is gone."""
        stream = self._streams.pop(ino, None)
        if stream is not None:
            os.close(stream.fd)

    def clear(self) -> None:
        """The connection is gone: what was sent on it counts no more."""
        for ino in list(self._streams):
            self.forget(ino)
