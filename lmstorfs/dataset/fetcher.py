"""Brings files that only the store has into a tier, whole and verified, once however many ask.

A file that fits no tier is not fetched; its reads go to the store range by range.
"""

import math
import os
from collections.abc import Awaitable, Callable

import msgspec
import structlog
import trio

from lmstorfs.catalog.catalog import Inode
from lmstorfs.catalog.sqlite import SqliteCatalog
from lmstorfs.errors import (
    ChangedInStoreError,
    CorruptCopyError,
    DeadlineError,
    NotInStoreError,
    StoreDeniedError,
    StoreError,
)
from lmstorfs.store import Store
from lmstorfs.store.pool import Fetch, WorkerPool
from lmstorfs.tiers import Placement, Tier

log = structlog.get_logger()

_RETRY_FIRST_S = 0.1
_RETRY_MAX_S = 5.0


class ReadStatistics(msgspec.Struct, kw_only=True):
    """Bytes that reads took from where; passthrough reads are not seen by the daemon."""

    ram_bytes: int = 0
    ssd_bytes: int = 0
    mirror_bytes: int = 0
    store_bytes: int = 0
    prefetched_bytes: int = 0
    prefetched_used_bytes: int = 0
    corrupt_copies: int = 0


class Fetcher:
    """Reads from the store for one mount."""

    def __init__(
        self,
        catalog: SqliteCatalog,
        placement: Placement,
        store: Store,
        pool: WorkerPool,
        *,
        read_timeout_s: float,
    ) -> None:
        self._catalog = catalog
        self._placement = placement
        self._store = store
        self._pool = pool
        self._timeout_s = read_timeout_s
        self.reads = ReadStatistics()
        self.names_changed: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
        """Waits until the store was told of some names."""

    async def fetch(self, inode: Inode) -> Tier | None:
        """Bring the stored version of `inode` into a tier; None where no tier has the room.

        The caller sees to it that one inode is fetched once at a time. Raises `DeadlineError`
        when the store did not give it within the read timeout, `ChangedInStoreError` when it is
        another file by now.
        """
        tier = next((t for t in self._placement.tiers if self._room(t, inode)), None)
        if tier is None:
            return None
        tier.hold(inode.ino, inode.size)
        try:
            await self._retrying(inode, tier)
        except BaseException:
            tier.drop(inode.ino)
            raise
        os.utime(tier.path(inode.ino), ns=(inode.mtime_ns, inode.mtime_ns))
        self._catalog.contents.set_tier(inode.ino, tier.name)
        self._placement.touched(inode.ino)
        self.reads.store_bytes += inode.size
        return tier

    def _room(self, tier: Tier, inode: Inode) -> bool:
        return inode.size <= tier.budget_bytes and self._placement.make_room(tier, inode.size)

    async def _retrying(self, inode: Inode, tier: Tier) -> None:
        assert inode.stored_key is not None
        fetch = Fetch(
            key=inode.stored_key,
            target=str(tier.path(inode.ino)),
            size=inode.size,
            etag=inode.etag,
            digest=inode.digest,
        )

        async def once() -> None:
            fetched = await self._pool.fetch(fetch)
            self._catalog.contents.set_digest(inode.ino, inode.version, fetched.digest)

        await self._until_deadline(inode.stored_key, once)

    async def read(self, inode: Inode, offset: int, length: int) -> bytes:
        """Read a range of a file that is in no tier straight from the store."""
        key = inode.stored_key
        assert key is not None
        got = b""

        async def once() -> None:
            nonlocal got
            got = await trio.to_thread.run_sync(
                lambda: self._store.read(key, offset, length, etag=inode.etag),
                abandon_on_cancel=True,
            )

        await self._until_deadline(key, once)
        self.reads.store_bytes += len(got)
        return got

    async def _until_deadline(self, key: str, once: Callable[[], Awaitable[None]]) -> None:
        """Try again until it works, the object turns out to be another, or time is up."""
        delay = _RETRY_FIRST_S
        last: StoreError | None = None
        with trio.move_on_after(self._timeout_s if self._timeout_s > 0 else math.inf):
            while self._catalog.journal.blocks(key):  # the object still has an older name
                last = StoreError("the store has not been told of its name yet")
                await self.names_changed()
            while True:
                try:
                    await once()
                except (ChangedInStoreError, NotInStoreError, StoreDeniedError):
                    raise
                except CorruptCopyError:
                    self.reads.corrupt_copies += 1
                    log.error("corrupt copy", copy="store", key=key)
                    raise
                except StoreError as error:
                    last = error
                    await trio.sleep(delay)
                    delay = min(2 * delay, _RETRY_MAX_S)
                else:
                    return
        raise DeadlineError(f"reading {key}: no answer in {self._timeout_s:.0f} s ({last})")
