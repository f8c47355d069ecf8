"""Finding the newest complete checkpoint where only the store can tell: `lmstorfs latest`."""

from collections import deque
from collections.abc import Collection

from lmstorfs.catalog import Inode, SqliteCatalog
from lmstorfs.checkpoint.checkpoints import checkpoint_of, holds_weights, is_temporary
from lmstorfs.checkpoint.seals import is_sealed
from lmstorfs.checkpoint.survey import Sighting, judge
from lmstorfs.fuse.refresh import Refresher

_DIRECTORIES_MAX = 2000  # a store may hold a dataset beside the checkpoints
_CANDIDATES_MAX = 50


class StoreSearch:
    """Looks through the part of a store that this mount has not written itself."""

    def __init__(self, catalog: SqliteCatalog, refresher: Refresher) -> None:
        self._catalog = catalog
        self._refresher = refresher

    async def newest(self, below: str, but: Collection[str] = ()) -> str | None:
        """Return the path of the newest complete checkpoint at or below `below`; None: none.

        `but` are known not to be complete.
        Raises `DeadlineError` where the store does not answer.
        """
        start = self._catalog.resolve(below)
        if start is None:
            return None
        found: dict[str, list[Inode]] = {}
        for path, inode in await self._files(below, start):
            found.setdefault(checkpoint_of(path), []).append(inode)
        newest = sorted(found.items(), key=lambda item: -max(i.mtime_ns for i in item[1]))
        newest = newest[:_CANDIDATES_MAX]
        lacking = self._lacking(newest)
        for name, files in newest:
            if name not in but and name not in lacking and await self._is_complete(name, files):
                return name
        return None

    def _lacking(self, candidates: list[tuple[str, list[Inode]]]) -> set[str]:
        """Return those that are less than the one before them in their series.

        A seal counts the files that there were; a save that was left off between two files, and
        stood so for a moment, has one, too.
        """
        sightings = []
        for name, files in candidates:
            sighting = Sighting(path=name)
            for inode in files:
                path = self._catalog.path(inode.ino) or name
                sighting.add(path, inode, closed=True, second=True)
            sightings.append(sighting)
        judge(sightings)
        return {sighting.path for sighting in sightings if sighting.lacks}

    async def _files(self, below: str, start: Inode) -> list[tuple[str, Inode]]:
        if start.is_file:
            return [(below, start)]
        found: list[tuple[str, Inode]] = []
        waiting = deque([(below, start)])
        seen = 0
        while waiting and seen < _DIRECTORIES_MAX:
            path, directory = waiting.popleft()
            seen += 1
            await self._refresher.look(directory)
            for entry in self._catalog.children(directory.ino):
                name = entry.name.decode(errors="surrogateescape")
                inner = f"{path}/{name}" if path else name
                if entry.inode.is_dir:
                    waiting.append((inner, entry.inode))
                elif entry.inode.is_file:
                    found.append((inner, entry.inode))
        return found

    async def _is_complete(self, name: str, files: list[Inode]) -> bool:
        if is_temporary(name):
            return False
        if not any(holds_weights(self._catalog.path(inode.ino) or "") for inode in files):
            return False
        if any(inode.dirty or inode.writing for inode in files):
            return False  # what this mount writes itself, it knows better
        if len(files) == 1 and self._catalog.path(files[0].ino) == name:
            return True
        await self._refresher.complete(files)
        return is_sealed(self._catalog, files)
