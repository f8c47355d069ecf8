"""Waiting for copies on behalf of people: `lmstorfs wait`."""

from typing import Any

import trio

from lmstorfs.catalog import Inode, SqliteCatalog
from lmstorfs.checkpoint import Flusher
from lmstorfs.checkpoint.mirror.client import Mirror
from lmstorfs.control import Progress
from lmstorfs.errors import SetupError, UsageError

COPIES = ("2", "mirror", "store")
_LOOK_S = 0.1


class Waiter:
    """Knows which copies the files of one mount have."""

    def __init__(self, catalog: SqliteCatalog, flusher: Flusher, mirror: Mirror | None) -> None:
        self._catalog = catalog
        self._flusher = flusher
        self._mirror = mirror

    async def wait(self, path: str, copies: str, progress: Progress) -> dict[str, Any]:
        """Return when all that is at and below `path` has `copies`.

        `path` is relative to the mount point. A file that is still being written is waited for.
        Raises `SetupError` for a path that is not there and copies that cannot come.
        """
        if copies not in COPIES:
            raise UsageError(f"--copies {copies}: it is one of {', '.join(COPIES)}")
        if copies == "mirror" and self._mirror is None:
            raise SetupError("this mount has no mirror; mount it with --mirror HOST:PORT")
        while True:
            files = self._files(path)
            waiting = [inode for inode in files if not self._has(inode, copies)]
            total = sum(inode.size for inode in files)
            await progress(
                {
                    "done_files": len(files) - len(waiting),
                    "total_files": len(files),
                    "done_bytes": total - sum(inode.size for inode in waiting),
                    "total_bytes": total,
                    "reason": self._flusher.health.degraded_reason,
                }
            )
            if not waiting:
                return {"files": len(files), "bytes": total}
            for inode in waiting:
                if copies == "store" or self._mirror is None or not self._mirror.connected:
                    self._flusher.urgent(inode.ino)
            with trio.move_on_after(_LOOK_S):
                await self._flusher.changed()

    def _files(self, path: str) -> list[Inode]:
        inode = self._catalog.resolve(path)
        if inode is None:
            raise SetupError(f"there is no {path} in this mount")
        below = self._catalog.below(inode.ino) if inode.is_dir else [inode]
        return [row for row in below if row.is_file]

    def _has(self, inode: Inode, copies: str) -> bool:
        stored = inode.version > 0 and not inode.dirty
        if inode.writing and self._flusher.is_overtaken(inode):
            return False
        if stored and copies != "2":
            return True  # the mirror lets go of what the store has
        if copies == "store":
            return False
        mirrored = self._mirror is not None and self._mirror.holds(inode.ino, inode.version)
        if copies == "mirror":
            return mirrored
        return (inode.tier is not None) + mirrored + stored >= 2
