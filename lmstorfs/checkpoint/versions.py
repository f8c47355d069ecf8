"""Makes versions: at a close, at an fsync, and when a mapping that outlived its file is gone.

A version gets its digest right away, in a thread that lets go of the GIL: before it is sent
anywhere, and so that a checkpoint is known to be complete while the store is away.
"""

import errno
import math
import os

import structlog
import trio

from lmstorfs.catalog.catalog import Inode
from lmstorfs.catalog.sqlite import SqliteCatalog
from lmstorfs.checkpoint.flusher import Flusher
from lmstorfs.digest import digest_file
from lmstorfs.errors import DeadlineError
from lmstorfs.tiers import Placement, files
from lmstorfs.units import MIB

log = structlog.get_logger()

_DIGEST_AT_ONCE_BYTES = 1 * MIB  # costs less than handing it to a thread
_MAPPED_LOOK_S = 0.5


class Versions:
    """The versions of one mount's files."""

    def __init__(
        self,
        catalog: SqliteCatalog,
        placement: Placement,
        flusher: Flusher,
        *,
        fsync: str,
        fsync_timeout_s: float,
    ) -> None:
        self._catalog = catalog
        self._placement = placement
        self._flusher = flusher
        self._fsync = fsync
        self._fsync_timeout_s = fsync_timeout_s
        self._send, self._receive = trio.open_memory_channel[tuple[int, int]](math.inf)
        self._mapped: set[int] = set()

    def close(self, ino: int, size: int, mtime_ns: int, *, writing: bool) -> int:
        """What the tier holds is a new version; return its number."""
        version = self._catalog.contents.close_version(ino, size, mtime_ns, writing=writing)
        self.digest_soon(ino, version)
        return version

    def digest_soon(self, ino: int, version: int) -> None:
        """Have the digest of a version computed; what waits for it is woken."""
        inode = self._catalog.find(ino)
        if inode is not None and inode.size <= _DIGEST_AT_ONCE_BYTES:
            self._digest_now(inode, version)
        else:
            self._send.send_nowait((ino, version))

    def _digest_now(self, inode: Inode, version: int) -> None:
        tier = self._placement.tier(inode.tier)
        if tier is None or inode.version != version:
            return
        try:
            digest = digest_file(tier.path(inode.ino), inode.version_size)
        except (OSError, EOFError) as error:
            self._not_digested(inode, error)
        else:
            self._catalog.contents.set_digest(inode.ino, version, digest)
        self._flusher.wake()

    def _not_digested(self, inode: Inode, error: Exception) -> None:
        """The content changed or went meanwhile: a later close brings it again."""
        log.debug("no digest", ino=inode.ino, error=str(error))

    async def fsync(self, inode: Inode, stat: os.stat_result | None, *, changed: bool) -> None:
        """Do what the mount promises of fsync(2) for a file whose tier shows `stat`.

        `changed`: the content is not the newest version's. Raises `DeadlineError` (EIO) when no
        second copy was made in time.
        """
        version = inode.version
        if changed and stat is not None:
            version = self.close(inode.ino, stat.st_size, stat.st_mtime_ns, writing=True)
        if self._fsync == "ram" or self._flusher.settled(inode.ino, version):
            return
        with trio.move_on_after(self._fsync_timeout_s):
            await self._flusher.stored(inode.ino, version)
            return
        reason = self._flusher.health.degraded_reason or "the store is slow"
        raise DeadlineError(
            f"fsync of {self._catalog.path(inode.ino)}: no second copy within"
            f" {self._fsync_timeout_s:.0f} s ({reason})"
        )

    def mapped(self, ino: int) -> None:
        """The file was closed but somebody still has it mapped for writing: watch it."""
        self._mapped.add(ino)

    async def run(self) -> None:
        """Compute digests and watch mappings until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_mapped)
            async for ino, version in self._receive:
                inode = self._catalog.find(ino)
                if inode is not None and inode.version == version:
                    await self._digest(inode)

    async def _digest(self, inode: Inode) -> None:
        tier = self._placement.tier(inode.tier)
        if tier is None:
            return
        try:
            digest = await trio.to_thread.run_sync(
                digest_file, tier.path(inode.ino), inode.version_size, abandon_on_cancel=True
            )
        except (OSError, EOFError) as error:
            if isinstance(error, OSError) and error.errno not in (errno.ENOENT, errno.EINVAL):
                raise
            self._not_digested(inode, error)
        else:
            self._catalog.contents.set_digest(inode.ino, inode.version, digest)
        self._flusher.wake()

    async def _watch_mapped(self) -> None:
        while True:
            await trio.sleep(_MAPPED_LOOK_S)
            for ino in list(self._mapped):
                inode = self._catalog.find(ino)
                tier = self._placement.tier(inode.tier) if inode is not None else None
                if inode is None or tier is None or inode.nlink == 0:
                    self._mapped.discard(ino)
                elif not files.has_writers(tier.path(ino)):
                    self._mapped.discard(ino)
                    await self._unmapped(inode)

    async def _unmapped(self, inode: Inode) -> None:
        """Nobody writes any more: what the mapping left is a new version, if it differs."""
        tier = self._placement.tier(inode.tier)
        if tier is None or inode.writing:
            return
        stat = tier.path(inode.ino).stat()
        digest = await trio.to_thread.run_sync(digest_file, tier.path(inode.ino), stat.st_size)
        now = self._catalog.find(inode.ino)
        if now is None or now.version != inode.version or now.writing:
            return
        if digest != now.digest:
            self.close(inode.ino, stat.st_size, stat.st_mtime_ns, writing=False)
