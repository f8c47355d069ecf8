"""Whether the store has already passed a version that the catalog thinks is still to be stored.

A successor's catalog is what the mirror heard of last. The node that died may have stored newer
versions after that, while its mirror was away: they must neither be overwritten by what the mirror
holds, nor be hidden by it. Version numbers, which grow over a whole catalog, tell which is newer.
"""

import random

import structlog
import trio

from lmstorfs.catalog import Merger, SqliteCatalog
from lmstorfs.checkpoint.flusher import Flusher
from lmstorfs.errors import NotInStoreError, StoreError
from lmstorfs.store import Kind, Store
from lmstorfs.tiers import Placement

log = structlog.get_logger()

_RETRY_FIRST_S = 0.5
_RETRY_MAX_S = 10.0
_PATIENCE_S = 2.0


class PassedVersions:
    """Compares dirty versions with what the store holds under their names, before all else."""

    def __init__(
        self,
        catalog: SqliteCatalog,
        merger: Merger,
        placement: Placement,
        store: Store,
        flusher: Flusher,
    ) -> None:
        self._catalog = catalog
        self._merger = merger
        self._placement = placement
        self._store = store
        self._flusher = flusher

    def doubt(self, inodes: list[int]) -> None:
        """These may have newer versions in the store; none is flushed before that is known."""
        self._flusher.held_back.update(inodes)

    async def look(self, ino: int) -> None:
        """Compare one inode now, unless the store does not answer within a moment."""
        if ino not in self._flusher.held_back:
            return
        with trio.move_on_after(_PATIENCE_S):
            try:
                await self._compare(ino)
            except StoreError as error:
                log.info("not compared with the store", ino=ino, error=str(error))

    async def take_stored(self, ino: int) -> bool:
        """No copy is left of a newer version: let the file be what the store has; False: nothing.

        Raises `StoreError`.
        """
        path = self._catalog.path(ino)
        if path is None or not self._catalog.get(ino).stored_version:
            return False
        await self._named(path)
        try:
            info = await trio.to_thread.run_sync(self._store.head, path, abandon_on_cancel=True)
        except NotInStoreError:
            return False
        if info.kind is not Kind.FILE or self._catalog.path(ino) != path:
            return False
        self._merger.replace(self._catalog.get(ino), info)
        return True

    async def run(self) -> None:
        """Compare all that is in doubt, however long the store takes to answer."""
        wait_s = _RETRY_FIRST_S
        while self._flusher.held_back:
            for ino in sorted(self._flusher.held_back):
                try:
                    await self._compare(ino)
                    wait_s = _RETRY_FIRST_S
                except StoreError as error:
                    self._flusher.health.failed(error)
                    break
            else:
                break
            await trio.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(2 * wait_s, _RETRY_MAX_S)

    async def _named(self, path: str) -> None:
        """Return when what is at `path` in the store is what the catalog means by it."""
        while self._catalog.journal.blocks(path):
            await self._flusher.changed()

    async def _compare(self, ino: int) -> None:
        path = self._catalog.path(ino)
        if path is not None:
            await self._named(path)
        inode = self._catalog.find(ino)
        if inode is not None and path is not None and inode.dirty:
            try:
                info = await trio.to_thread.run_sync(self._store.head, path, abandon_on_cancel=True)
            except NotInStoreError:
                info = None
            now = self._catalog.find(ino)
            theirs = info.attributes.version if info and info.attributes else None
            same = now is not None and now.version == inode.version and not now.writing
            if info is not None and info.kind is Kind.FILE and theirs is not None and same:
                if theirs > inode.version:
                    log.warning("the store is ahead", key=path, ours=inode.version, theirs=theirs)
                    self._placement.drop(ino, inode.tier)
                    self._merger.replace(inode, info)
                elif theirs == inode.version and info.size == inode.version_size:
                    self._catalog.contents.stored(ino, theirs, path, info, attributes_changed=False)
        self._flusher.held_back.discard(ino)
        self._flusher.wake()
        self._flusher.announce()
