"""Bringing what is dirty to the store, with somebody waiting: `sync` and `unmount`."""

from collections.abc import Awaitable, Callable, Collection
from typing import Any

import msgspec
import trio

from lmstorfs.catalog import Inode, SqliteCatalog
from lmstorfs.checkpoint import Flusher
from lmstorfs.errors import SetupError

Progress = Callable[[dict[str, Any]], Awaitable[None]]
_TELL_S = 0.1


async def nobody(state: dict[str, Any]) -> None:
    """Take progress that nobody watches."""


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """What was brought."""

    files: int
    bytes: int


class Drainer:
    """Waits for the flusher on behalf of people."""

    def __init__(
        self, catalog: SqliteCatalog, flusher: Flusher, coming: Callable[[], Collection[int]]
    ) -> None:
        """Take `coming`, which tells of inodes whose content is still to come from a mirror."""
        self._catalog = catalog
        self._flusher = flusher
        self._coming = coming
        self.let_go: Callable[[], int] = lambda: 0
        """Lets go of what was deleted and is not needed once the store has the rest."""
        self.seal: Callable[[], list[Inode]] = list
        """Marks checkpoints that the store has whole; returns the files that carry the marks."""

    def targets(self, paths: list[str]) -> dict[int, Inode]:
        """Return what is dirty now at and below `paths` (relative to the mount point).

        No paths means everything. Raises `SetupError` for a path that is not there.
        """
        dirty = {inode.ino: inode for inode in self._catalog.contents.dirty(-1) if inode.ino != 1}
        for ino in self._coming():
            inode = self._catalog.find(ino)
            if inode is not None and inode.dirty and inode.nlink > 0:
                dirty[ino] = inode
        if not paths or "" in paths:
            return dirty
        chosen: dict[int, Inode] = {}
        for path in paths:
            inode = self._catalog.resolve(path)
            if inode is None:
                raise SetupError(f"there is no {path} in this mount")
            wanted = [inode, *self._catalog.below(inode.ino)] if inode.is_dir else [inode]
            chosen |= {row.ino: dirty[row.ino] for row in wanted if row.ino in dirty}
        return chosen

    async def drain(self, paths: list[str], progress: Progress) -> Drained:
        """Return when the store has all that is dirty now; later writes are not waited for."""
        targets = self.targets(paths)
        names = not paths or "" in paths
        await self._bring(targets, progress, names=names)
        await self._bring({inode.ino: inode for inode in self.seal()}, nobody, names=False)
        if names and self.let_go():
            await self._bring({}, nobody, names=True)
        # What came into a directory of the store may have moved its times on.
        await self._bring(self._directories_behind(targets), nobody, names=False)
        return Drained(files=len(targets), bytes=_total(targets))

    async def _bring(self, targets: dict[int, Inode], progress: Progress, *, names: bool) -> None:
        """Return when the store has all of `targets`, and with `names` the journal's renames."""
        for ino in targets:
            self._flusher.urgent(ino)
        while True:
            if self._flusher.fence.reason is not None:
                raise SetupError(
                    f"nothing can be brought to the store: {self._flusher.fence.reason}; what is "
                    "here stays in the state directory (lmstorfs unmount --no-drain leaves it)"
                )
            waiting = {ino for ino, inode in targets.items() if not self._done(inode)}
            names_left = len(self._catalog.journal) if names else 0
            await progress(self._told(targets, waiting, names_left))
            if not waiting and not names_left:
                return
            with trio.move_on_after(_TELL_S):
                await self._flusher.changed()

    def _directories_behind(self, targets: dict[int, Inode]) -> dict[int, Inode]:
        """Return the directories of `targets`, and those above, whose attributes are behind."""
        above = {self._catalog.parent(ino) for ino in targets} | set(targets)
        found = (self._catalog.find(ino) for ino in above)
        return {row.ino: row for row in found if row and row.is_dir and row.attrs_dirty}

    def _done(self, target: Inode) -> bool:
        """Whether the store has this version or a newer one, or nobody wants it any more."""
        now = self._catalog.find(target.ino)
        if now is None or now.nlink == 0 or now.torn:
            return True
        if now.version == target.version and now.dirty and self._flusher.is_overtaken(now):
            return True  # what its writer is at comes with the next close, as any later write
        if now.attrs_dirty and not target.dirty:
            known = (target.ctime_ns, target.attrs_dirty)
            if (now.ctime_ns, now.attrs_dirty) != known:
                return True
            # What is still to come into a directory moves its times on again.
            return now.is_dir and bool(self._catalog.contents.awaits_children(now.ino))
        lost = now.tier is None and now.is_file and now.ino not in self._coming()
        return now.stored_version >= target.version or not now.dirty or lost

    def _told(
        self, targets: dict[int, Inode], waiting: set[int], names_left: int
    ) -> dict[str, Any]:
        total = _total(targets)
        left = sum(_bytes(targets[ino]) for ino in waiting)
        moved = sum(
            min(flight.moved, flight.size)
            for ino, flight in self._flusher.in_flight.items()
            if ino in waiting
        )
        flights = [f.key for ino, f in self._flusher.in_flight.items() if ino in waiting]
        return {
            "done_bytes": min(total, max(0, total - left + moved)),
            "total_bytes": total,
            "done_files": len(targets) - len(waiting),
            "total_files": len(targets),
            "current": flights[0] if flights else None,
            "reason": self._flusher.health.degraded_reason,
            "names_left": names_left,
        }


def _total(targets: dict[int, Inode]) -> int:
    return sum(_bytes(inode) for inode in targets.values())


def _bytes(inode: Inode) -> int:
    return inode.version_size if inode.dirty else 0
