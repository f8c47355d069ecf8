"""Computes the digests of closed versions, one at a time, in a thread that lets go of the GIL.

Not at once: a file that is renamed, rewritten or deleted within the flush delay costs nothing,
and neither do the writers next to it. Not only at the upload: a checkpoint is known to be
complete while the store is away.
"""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import structlog
import trio

from lmstorfs.catalog.catalog import Inode
from lmstorfs.catalog.sqlite import SqliteCatalog
from lmstorfs.checkpoint.flusher import Flusher
from lmstorfs.digest import DigestCancelledError, digest_blocks
from lmstorfs.tiers import Placement
from lmstorfs.units import MIB

log = structlog.get_logger()

_SMALL_BYTES = 1 * MIB  # costs less than handing it to a thread
_LOOK_S = 0.02


class Digester:
    """The versions of one mount that still lack a digest."""

    def __init__(
        self, catalog: SqliteCatalog, placement: Placement, flusher: Flusher, *, delay_s: float
    ) -> None:
        self._catalog = catalog
        self._placement = placement
        self._flusher = flusher
        self._delay_s = delay_s
        self._waiting: dict[int, int] = {}  # ino → version, the longest closed first
        self._current: int | None = None
        self.on_digest: Callable[[int, int, bytes], None] | None = None
        """Called with inode, version and its blocks' digests; then nothing waits to settle."""
        self._wake = trio.Event()

    def add(self, ino: int, version: int) -> None:
        """Have the digest of a version computed once it has settled."""
        self._waiting.pop(ino, None)
        self._waiting[ino] = version
        self._wake.set()

    def forget(self, ino: int) -> None:
        """The version is gone or about to change: its digest is not wanted any more."""
        self._waiting.pop(ino, None)
        if self._current == ino:
            self._current = None  # what the thread looks at between two buffers

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            inode = self._next()
            if inode is not None:
                await self.digest(inode)
                continue
            self._wake = trio.Event()
            with trio.move_on_after(_LOOK_S if self._waiting else float("inf")):
                await self._wake.wait()

    def _next(self) -> Inode | None:
        now = time.time()
        for ino, version in list(self._waiting.items()):
            inode = self._catalog.find(ino)
            gone = inode is None or (inode.nlink == 0 and not self._catalog.guarded.keeps(ino))
            if inode is None or gone or inode.version != version:
                del self._waiting[ino]
                continue
            settled = now - (inode.closed_at or 0.0) >= self._delay_s
            if settled or self.on_digest is not None or self._flusher.is_wanted(ino):
                del self._waiting[ino]
                return inode
        return None

    async def digest(self, inode: Inode) -> None:
        """Compute and note one version's digest, unless it changes or goes meanwhile."""
        tier = self._placement.tier(inode.tier)
        if tier is None:
            return
        path = tier.path(inode.ino)
        self._current = inode.ino
        cancelled: Callable[[], bool] = lambda: self._current != inode.ino  # noqa: E731
        try:
            if inode.version_size <= _SMALL_BYTES:
                digest, blocks = _digest(path, inode.version_size, cancelled)
            else:
                digest, blocks = await trio.to_thread.run_sync(
                    _digest, path, inode.version_size, cancelled, abandon_on_cancel=True
                )
            now = self._catalog.find(inode.ino)  # its times may have been set meanwhile
            if now is None or path.stat().st_mtime_ns != now.version_mtime_ns:
                return  # a writer came meanwhile: its close is a version of its own
        except (EOFError, DigestCancelledError) as error:
            log.debug("no digest", ino=inode.ino, reason=str(error))
            return
        except OSError as error:
            if error.errno != errno.ENOENT:
                log.error("no digest", ino=inode.ino, error=str(error))
            return
        finally:
            self._current = None
        self._catalog.contents.set_digest(inode.ino, inode.version, digest)
        if self.on_digest is not None:
            self.on_digest(inode.ino, inode.version, blocks)
        self._flusher.wake()


def _digest(path: Path, size: int, cancelled: Callable[[], bool]) -> tuple[str, bytes]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return digest_blocks(fd, size, cancelled)
    finally:
        os.close(fd)
