"""Files that are sent while they are being written: a close then finds most of them there."""

import os
from collections.abc import Callable, Iterator

import msgspec

from lmstorfs.catalog import SqliteCatalog
from lmstorfs.checkpoint.mirror.peer import SLICE_BYTES
from lmstorfs.digest import BLOCK_BYTES
from lmstorfs.tiers import Placement


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
    """One such file: how far it was sent."""

    def __init__(self, fd: int, sent: int) -> None:
        self.fd = fd
        self.sent = sent


class Streams:
    """All such files of one mount."""

    def __init__(
        self,
        catalog: SqliteCatalog,
        placement: Placement,
        growing: Callable[[], list[Growing]],
        still_waits: Callable[[int], bool],
    ) -> None:
        """Take `still_waits`: whether a closed file's version is still to be sent."""
        self._catalog = catalog
        self._placement = placement
        self._growing = growing
        self._still_waits = still_waits
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
            if stream is None:
                continue
            end = size // BLOCK_BYTES * BLOCK_BYTES
            start = min(stream.sent, end)  # it may have been truncated
            stream.sent = min(end, start + SLICE_BYTES)
            if stream.sent > start:
                yield Slice(ino, stream.fd, start, stream.sent - start)

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
        stream = self._streams[file.ino] = _Stream(fd, sent)
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
