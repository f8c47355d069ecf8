"""What the mirror lacks, and what it holds: the order in which versions are sent."""

import os
import time
from collections.abc import Iterable

import msgspec

from lmstorfs.catalog import Inode, SqliteCatalog
from lmstorfs.checkpoint import checkpoints
from lmstorfs.checkpoint.mirror.messages import Held
from lmstorfs.checkpoint.mirror.peer import Offered

_RECENT_FILES = 5000  # among which the newest checkpoints are looked for


class Transfer(msgspec.Struct):
    """A large version on its way: what is left of it."""

    version: Offered
    blocks: list[int]


class Waiting(msgspec.Struct):
    """A version that the mirror lacks."""

    ino: int
    version: int
    size: int
    closed_at: float
    blocks: bytes | None = None


class Backlog:
    """The versions of one mount, as its mirror has them or not."""

    def __init__(self, catalog: SqliteCatalog) -> None:
        self._catalog = catalog
        self.held: dict[int, int] = {}
        """Inode → the version that the mirror holds."""
        self.urgent: set[int] = set()
        """Inodes that an fsync waits for."""
        self.transfer: Transfer | None = None
        """The large version that is sent in slices now."""
        self._interrupted: Transfer | None = None  # the one that goes on after it
        self._waiting: dict[int, Waiting] = {}  # the longest closed first
        self._flying: dict[int, Waiting] = {}
        self._not_before = 0.0

    # --- the connection ----------------------------------------------------------------------

    def connected(self, held: Iterable[Held], keep: int) -> None:
        """A connection begins: `held` is there; all dirty versions and the newest `keep`
        checkpoints are to be.
        """
        self.held = {replica.ino: replica.version for replica in held}
        for inode in self._catalog.contents.dirty(-1):
            if inode.is_file and inode.dirty and inode.digest is not None:
                self.add(inode.ino, inode.version, None)
        for inode in self._newest(keep):
            self.add(inode.ino, inode.version, None)

    def _newest(self, keep: int) -> list[Inode]:
        recent = self._catalog.contents.recent(_RECENT_FILES)
        found = checkpoints.group(recent, self._catalog.path, lambda ino: False, len(recent))
        names = {checkpoint.path for checkpoint in found[:keep]}
        wanted = []
        for inode in reversed(recent):
            path = self._catalog.path(inode.ino)
            whole = inode.digest is not None and inode.tier is not None
            if whole and path is not None and checkpoints.checkpoint_of(path) in names:
                wanted.append(inode)
        return wanted

    def disconnected(self) -> None:
        """What was on its way did not arrive."""
        while self.transfer is not None:
            os.close(self.transfer.version.fd)
            self.finished()
        self._waiting = {**self._flying, **self._waiting}
        self._flying.clear()
        self._not_before = 0.0

    # --- versions ----------------------------------------------------------------------------

    def add(self, ino: int, version: int, blocks: bytes | None) -> None:
        """The mirror is to have this version."""
        known = self._waiting.get(ino) or self._flying.get(ino)
        if self.held.get(ino) == version or (known is not None and known.version >= version):
            return
        inode = self._catalog.find(ino)
        if inode is None or inode.version != version:
            return
        self._waiting.pop(ino, None)
        closed_at = inode.closed_at or time.time()
        self._waiting[ino] = Waiting(ino, version, inode.version_size, closed_at, blocks)

    def next(self, most_files: int, most_bytes: int) -> list[Waiting]:
        """Take what is to be sent next: one of more than `most_bytes`, or some that are not.

        While one is sent in slices, only what is urgent: it may interrupt one that is not.
        """
        if time.monotonic() < self._not_before:
            return []
        first = [self._waiting[ino] for ino in self.urgent if ino in self._waiting]
        if self.transfer is not None:
            if self._interrupted is not None or self.transfer.version.ino in self.urgent:
                first = [waiting for waiting in first if waiting.size <= most_bytes]
            if not first:
                return []
        taken: list[Waiting] = []
        total = 0
        for waiting in first or self._waiting.values():
            total += waiting.size
            if taken and (total > most_bytes or len(taken) >= most_files):
                break
            taken.append(waiting)
        for waiting in taken:
            self._flying[waiting.ino] = self._waiting.pop(waiting.ino)
        return taken

    def begin(self, transfer: Transfer) -> None:
        """This one is sent in slices now; the one that was goes on after it."""
        if self.transfer is not None and self.transfer.version.ino == transfer.version.ino:
            os.close(self.transfer.version.fd)  # an older version of the same
            self.finished()
        self._interrupted, self.transfer = self.transfer, transfer

    def finished(self) -> None:
        """The one that was sent in slices is through."""
        self.transfer, self._interrupted = self._interrupted, None

    def waits(self, ino: int) -> bool:
        """Whether a version of the inode is still to be sent, or may be soon."""
        if ino in self._waiting or ino in self._flying:
            return True
        inode = self._catalog.find(ino)
        return inode is not None and inode.nlink > 0 and inode.digest is None

    def give_up(self, ino: int, version: int) -> None:
        """It is gone, or a newer one is about to come."""
        flying = self._flying.get(ino)
        if flying is not None and flying.version == version:
            del self._flying[ino]
        self.urgent.discard(ino)

    def again(self, ino: int, version: int) -> None:
        """It did not arrive as it was: look at it again."""
        flying = self._flying.pop(ino, None)
        if flying is not None and flying.version == version:
            self.add(ino, version, None)

    def mirrored(self, ino: int, version: int) -> None:
        """The mirror holds it."""
        self._flying.pop(ino, None)
        self.urgent.discard(ino)
        self.held[ino] = version

    def dropped(self, replicas: Iterable[Held]) -> None:
        """The mirror let these go: the store has them, or nobody needs them."""
        for replica in replicas:
            if self.held.get(replica.ino) == replica.version:
                del self.held[replica.ino]

    def refused(self, ino: int, pause_s: float) -> None:
        """The mirror has no room just now: it waits, and so do all others."""
        flying = self._flying.pop(ino, None)
        if flying is not None and ino not in self._waiting:
            self._waiting = {ino: flying, **self._waiting}
        self._not_before = time.monotonic() + pause_s

    def lag(self) -> tuple[int, float | None]:
        """Return bytes of the versions that the mirror lacks, and when the oldest was closed."""
        behind = [*self._waiting.values(), *self._flying.values()]
        if not behind:
            return 0, None
        return sum(each.size for each in behind), min(each.closed_at for each in behind)
