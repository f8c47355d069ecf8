"""Seals: how a store tells, on its own, that it holds a checkpoint whole.

Every object in a store is whole, but a checkpoint of many files may be there in part, and a node
that has lost both RAM and mirror has nothing else to ask. So once the store has all files of a
complete checkpoint, the smallest of them gets an attribute that says how many they are; a
directory that holds exactly so many is complete. A file alone needs none.
"""

import structlog
import trio

from lmstorfs.catalog import Inode, SqliteCatalog
from lmstorfs.checkpoint import checkpoints
from lmstorfs.checkpoint.flusher import Flusher

log = structlog.get_logger()

SEAL_XATTR = b"user.lmstorfs.files"
_LOOK_EVERY_S = 0.5
_RECENT_FILES = 5000
_NEWEST = 3


class Seals:
    """Seals the checkpoints of one mount."""

    def __init__(self, catalog: SqliteCatalog, flusher: Flusher) -> None:
        self._catalog = catalog
        self._flusher = flusher

    async def run(self) -> None:
        """Seal what becomes complete in the store, until cancelled."""
        stored = -1
        while True:
            await self._flusher.changed()
            await trio.sleep(_LOOK_EVERY_S)
            now = self._flusher.statistics().stored_files
            if now != stored:
                stored = now
                self.look()

    def look(self) -> list[Inode]:
        """Seal the newest checkpoints that the store holds and that have no right seal yet.

        Return the files whose attributes the store now is to have.
        """
        recent = self._catalog.contents.recent(_RECENT_FILES)
        sealed: list[Inode] = []
        found = checkpoints.group(recent, self._catalog.path, lambda ino: False, _NEWEST)
        for checkpoint in found:
            if checkpoint.complete and checkpoint.weights and checkpoint.copies.store:
                sealed += self._seal(checkpoint.path)
        return sealed

    def _seal(self, path: str) -> list[Inode]:
        directory = self._catalog.resolve(path)
        if directory is None or not directory.is_dir:
            return []
        inside = [inode for inode in self._catalog.below(directory.ino) if inode.is_file]
        if not inside or any(inode.dirty for inode in inside):
            return []
        smallest = min(inside, key=lambda inode: (inode.size, inode.ino))
        wanted = b"%d" % len(inside)
        if self._catalog.xattrs(smallest.ino).get(SEAL_XATTR) == wanted:
            return []
        self._catalog.set_xattr(smallest.ino, SEAL_XATTR, wanted)
        self._flusher.wake()
        log.info("sealed", checkpoint=path, files=len(inside))
        return [self._catalog.get(smallest.ino)]


def is_sealed(catalog: SqliteCatalog, files: list[Inode]) -> bool:
    """Whether these are all files of a checkpoint that was complete in the store."""
    wanted = b"%d" % len(files)
    return any(catalog.xattrs(inode.ino).get(SEAL_XATTR) == wanted for inode in files)
