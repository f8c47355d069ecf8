"""Makes versions: at a close, at an fsync, and when a mapping that outlived its file is gone."""

import os

import trio

from lmstorfs.catalog.catalog import Inode
from lmstorfs.catalog.sqlite import SqliteCatalog
from lmstorfs.checkpoint.digester import Digester
from lmstorfs.checkpoint.flusher import Flusher
from lmstorfs.checkpoint.mirror.client import Mirror
from lmstorfs.digest import digest_file
from lmstorfs.errors import DeadlineError, FencedError
from lmstorfs.tiers import Placement, files

_MAPPED_LOOK_S = 0.5
_MIRROR_PATIENCE_S = 1.0  # then the store is asked to hurry, too


class Versions:
    """The versions of one mount's files."""

    def __init__(
        self,
        catalog: SqliteCatalog,
        placement: Placement,
        flusher: Flusher,
        digester: Digester,
        *,
        mirror: Mirror | None,
        fsync: str,
        fsync_timeout_s: float,
    ) -> None:
        self._mirror = mirror
        self._catalog = catalog
        self._placement = placement
        self._flusher = flusher
        self._fsync = fsync
        self._fsync_timeout_s = fsync_timeout_s
        self._digester = digester
        self._mapped: set[int] = set()

    def close(self, ino: int, size: int, mtime_ns: int, *, writing: bool) -> int:
        """What the tier holds is a new version; return its number."""
        version = self._catalog.contents.close_version(ino, size, mtime_ns, writing=writing)
        self._digester.add(ino, version)
        return version

    async def fsync(self, inode: Inode, stat: os.stat_result | None, *, changed: bool) -> None:
        """Do what the mount promises of fsync(2) for a file whose tier shows `stat`.

        `changed`: the content is not the newest version's. Raises `DeadlineError` (EIO) when no
        second copy was made in time.
        """
        version = inode.version
        if changed and stat is not None:
            version = self.close(inode.ino, stat.st_size, stat.st_mtime_ns, writing=True)
        if self._fsync == "ram":
            return
        with trio.move_on_after(self._fsync_timeout_s):
            await self._second_copy(inode.ino, version)
            return
        reason = self._flusher.health.degraded_reason or "the store is slow"
        raise DeadlineError(
            f"fsync of {self._catalog.path(inode.ino)}: no second copy within"
            f" {self._fsync_timeout_s:.0f} s ({reason})"
        )

    async def _second_copy(self, ino: int, version: int) -> None:
        """Return when the mirror or the store has the version, whichever is first.

        The store is not hurried where the mirror answers: what is renamed or rewritten right after
        its fsync would cost it twice.
        """
        mirror = self._mirror if self._fsync == "copy" else None
        hurried = False
        if mirror is not None:
            mirror.urgent(ino)
        patient_until = trio.current_time() + _MIRROR_PATIENCE_S
        while not self._flusher.settled(ino, version):
            if mirror is not None and mirror.holds(ino, version):
                return
            if self._flusher.fence.reason is not None:
                raise FencedError(self._flusher.fence.reason)
            late = trio.current_time() > patient_until
            if not hurried and (mirror is None or not mirror.connected or late):
                self._flusher.urgent(ino)
                hurried = True
            with trio.move_on_after(_MIRROR_PATIENCE_S if not hurried else float("inf")):
                await self._flusher.changed()
        if mirror is not None:
            await mirror.names()  # a successor must not think that its older version is the newest

    async def fsync_names(self) -> None:
        """Do what the mount promises of fsync(2) for a directory.

        The catalog has its names already; where a mirror answers, it is to have them too.
        """
        if self._mirror is not None and self._fsync != "ram":
            with trio.move_on_after(self._fsync_timeout_s):
                await self._mirror.names()

    def mapped(self, ino: int) -> None:
        """The file was closed but somebody still has it mapped for writing: watch it."""
        self._mapped.add(ino)

    async def run(self) -> None:
        """Watch mappings until cancelled."""
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
