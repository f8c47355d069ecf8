"""Keeps what the catalog says of the store's own files no older than the attribute timeout.

A directory that nobody has listed yet must be asked of the store; later looks ask again at most
every `attr_timeout`, and never for long: where the store is slow or away, what is known serves,
so that no checkpoint write ever waits for it.
"""

import errno
import math
import os
from collections.abc import Iterable

import structlog
import trio

from lmstorfs.catalog import Inode, Merger, NamespaceError, SqliteCatalog
from lmstorfs.checkpoint.health import StoreHealth
from lmstorfs.errors import DeadlineError, NotInStoreError, StoreError
from lmstorfs.store import ObjectInfo, Store
from lmstorfs.tiers import Placement

log = structlog.get_logger()

_REFRESH_WAIT_S = 1.0  # a look at a known directory waits for the store no longer than this
_HEADS_AT_ONCE = 16


class Refresher:
    """Brings listings of the store into the catalog, once however many ask."""

    def __init__(
        self,
        catalog: SqliteCatalog,
        merger: Merger,
        placement: Placement,
        store: Store,
        health: StoreHealth,
        *,
        attr_timeout_s: float,
        read_timeout_s: float,
    ) -> None:
        self._catalog = catalog
        self._merger = merger
        self._placement = placement
        self._store = store
        self._health = health
        self._attr_timeout_s = attr_timeout_s
        self._read_timeout_s = read_timeout_s
        self._listed_at: dict[int, float] = {}
        self._under_way: dict[int, trio.Event] = {}
        self._nursery: trio.Nursery | None = None
        self._heads = trio.CapacityLimiter(_HEADS_AT_ONCE)

    async def run(self) -> None:
        """Hold the listings that go on after nobody waits for them any more."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await trio.sleep_forever()

    def made_here(self, ino: int) -> None:
        """A directory was just made on this mount: all that is in it is known."""
        self._listed_at[ino] = trio.current_time()

    async def look(self, directory: Inode) -> None:
        """See to it that the catalog knows what the store has in `directory`.

        Raises `DeadlineError` where a directory was never listed and the store gives no answer.
        """
        ino = directory.ino
        listed_at = self._listed_at.get(ino)
        if listed_at is not None and trio.current_time() - listed_at < self._attr_timeout_s:
            return
        if directory.stored_key is None or directory.dirty:
            return  # the store does not have it yet
        # One that was made here was known whole, also by the daemon or node before this one.
        made_here = directory.closed_at is not None
        known = listed_at is not None or made_here or bool(self._catalog.children(ino, limit=1))
        if known and self._health.state == "unreachable":
            return
        done = self._under_way.get(ino)
        if done is None:  # an event is never true or false
            done = self._start(directory)
        with trio.move_on_after(_REFRESH_WAIT_S if known else self._read_timeout_s):
            await done.wait()
        if not known and ino not in self._listed_at:
            raise DeadlineError(f"listing {directory.stored_key or '/'}: {self._health.last_error}")

    def _start(self, directory: Inode) -> trio.Event:
        assert self._nursery is not None
        done = self._under_way[directory.ino] = trio.Event()
        self._nursery.start_soon(self._list, directory, done)
        return done

    async def _list(self, directory: Inode, done: trio.Event) -> None:
        ino, key = directory.ino, directory.stored_key or ""
        moved = self._catalog.watch(ino)
        try:
            seen = await trio.to_thread.run_sync(self._list_blocking, key)
        except StoreError as error:
            self._health.failed(error)
            log.warning("listing failed", key=key, error=str(error))
        else:
            self._health.succeeded()
            self._merge(ino, seen, moved)
            self._listed_at[ino] = trio.current_time()
        finally:
            self._catalog.unwatch(ino)
            del self._under_way[ino]
            done.set()

    def _list_blocking(self, key: str) -> list[ObjectInfo]:
        try:
            return list(self._store.list(key))
        except NotInStoreError:
            return []

    def _merge(self, ino: int, seen: list[ObjectInfo], moved: set[bytes]) -> None:
        changes = self._merger.merge(ino, seen, moved)
        for inode in changes.replaced:
            self._placement.drop(inode.ino, inode.tier)
            log.info("changed in the store by someone else", ino=inode.ino)
        for _, inode in changes.removed:
            self._placement.drop(inode.ino, inode.tier)
            self._listed_at.pop(inode.ino, None)

    async def link_target(self, inode: Inode) -> bytes:
        """Return a symlink's target, asking the store where only it knows."""
        if inode.target is not None:
            return inode.target
        if not inode.is_symlink or inode.stored_key is None:
            raise NamespaceError(errno.EINVAL)
        text = await trio.to_thread.run_sync(self._store.read_link, inode.stored_key)
        target = os.fsencode(text)
        self._catalog.contents.set_target(inode.ino, target)
        return target

    async def complete(self, inodes: Iterable[Inode]) -> None:
        """Ask the store for mode, owner and times of those that only a listing showed.

        What it does not answer stays as the listing had it, and is asked again next time.
        """
        missing = [inode for inode in inodes if inode.needs_head and inode.stored_key]
        if not missing or self._health.state == "unreachable":
            return
        with trio.move_on_after(self._read_timeout_s if self._read_timeout_s > 0 else math.inf):
            async with trio.open_nursery() as nursery:
                for inode in missing:
                    nursery.start_soon(self._head, inode)

    async def _head(self, inode: Inode) -> None:
        key = inode.stored_key
        assert key is not None
        try:
            info = await trio.to_thread.run_sync(
                self._store.head, key, abandon_on_cancel=True, limiter=self._heads
            )
        except StoreError as error:
            log.warning("attributes not told", key=key, error=str(error))
            return
        now = self._catalog.find(inode.ino)
        if now is None or not now.needs_head or info.attributes is None:
            return
        if info.etag != now.etag and not now.is_dir:
            self._merger.replace(now, info)
        else:
            self._merger.complete(inode.ino, info)
