"""Tells the store of renames and deletes, in order, from the catalog's journal.

An entry waits while an upload to what it touches is under way, and entries that touch the same
keys keep their order; all others pass by. Deletes go in batches: rotating a checkpoint away must
not cost a request a file.
"""

import time

import structlog
import trio

from lmstorfs.catalog.catalog import JournalEntry
from lmstorfs.catalog.sqlite import SqliteCatalog
from lmstorfs.checkpoint.flusher import Flusher
from lmstorfs.checkpoint.health import Backoff
from lmstorfs.errors import FencedError, NotInStoreError, StoreError
from lmstorfs.store import Kind, Store

log = structlog.get_logger()

_DELETES_AT_ONCE = 1000  # S3's DeleteObjects takes no more
_LOOK_AGAIN_S = 1.0


class NameSync:
    """Works the journal off."""

    def __init__(self, catalog: SqliteCatalog, store: Store, flusher: Flusher) -> None:
        self._catalog = catalog
        self._store = store
        self._flusher = flusher
        self._backoff = Backoff()
        self._wake = trio.Event()
        catalog.journal.on_added = self.wake

    def wake(self) -> None:
        """The journal has grown."""
        self._wake.set()

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            self._wake = trio.Event()
            done = await self._pass()
            if done:
                self._flusher.announce()
                self._flusher.wake()
                continue
            waits_s = _LOOK_AGAIN_S if len(self._catalog.journal) else float("inf")
            with trio.move_on_after(waits_s):
                await self._wake.wait()

    async def _pass(self) -> int:
        """Go once through the journal; return how many entries the store has done."""
        waiting: list[JournalEntry] = []
        deletes: list[JournalEntry] = []
        done = 0
        for entry in self._catalog.journal.entries():
            if self._must_wait(entry, waiting):
                waiting.append(entry)
            elif entry.op == "delete":
                deletes.append(entry)
                if len(deletes) >= _DELETES_AT_ONCE:
                    break
            else:
                if any(entry.touches(other.key) for other in deletes):
                    break  # in order: the deletes first
                done += await self._try([entry])
                break
        if deletes:
            done += await self._try(deletes)
        return done

    def _must_wait(self, entry: JournalEntry, waiting: list[JournalEntry]) -> bool:
        keys = entry.keys
        if self._backoff.not_before(entry.seq) > time.monotonic():
            return True
        return any(self._flusher.is_busy(key) for key in keys) or any(
            other.touches(key) for other in waiting for key in keys
        )

    async def _try(self, entries: list[JournalEntry]) -> int:
        try:
            await self._flusher.fence.verify()
            await self._do(entries)
        except FencedError as error:
            self._flusher.fence.fence(str(error))
            await trio.sleep_forever()
        except StoreError as error:
            self._flusher.health.failed(error)
            for entry in entries:
                self._backoff.failed(entry.seq, time.monotonic())
            log.warning(
                "store refused", op=entries[0].op, key=entries[0].key, error=str(error),
                entries=len(entries),
            )  # fmt: skip
            return 0
        self._flusher.health.succeeded()
        for entry in entries:
            self._backoff.succeeded(entry.seq)
        self._catalog.journal.done([entry.seq for entry in entries])
        if self._store.directory_times_drift:
            self._directories_behind(entries)
        return len(entries)

    def _directories_behind(self, entries: list[JournalEntry]) -> None:
        """Names came or went in these directories of the store: their times must be set again."""
        keys = {key for entry in entries for key in entry.keys}
        for directory in {key.rpartition("/")[0] for key in keys}:
            where = self._catalog.journal.future_key(directory)
            inode = self._catalog.resolve(where) if where else None
            if inode is not None:
                self._catalog.contents.attributes_behind(inode.ino)

    async def _do(self, entries: list[JournalEntry]) -> None:
        first = entries[0]
        if first.op == "delete":
            keys = [entry.key for entry in entries]
            await trio.to_thread.run_sync(self._store.delete, keys)
        elif first.op == "rmdir":
            await trio.to_thread.run_sync(self._store.remove_directory, first.key)
        elif first.op == "abort":
            await trio.to_thread.run_sync(self._store.abort_upload, first.key, first.new_key or "")
        else:
            await self._rename(first)

    async def _rename(self, entry: JournalEntry) -> None:
        assert entry.new_key is not None
        kind = Kind.DIRECTORY if entry.is_dir else Kind.FILE
        try:
            await trio.to_thread.run_sync(self._store.rename, entry.key, entry.new_key, kind)
        except NotInStoreError:
            # Someone else took it away: what we have of it comes again as a whole.
            log.warning("renamed object is gone from the store", key=entry.key)
            self._catalog.contents.lost_in_store(entry.new_key)
            return
        if entry.is_dir:
            self._catalog.contents.forget_etags_below(entry.new_key)
        else:
            info = await trio.to_thread.run_sync(self._store.head, entry.new_key)
            self._catalog.contents.set_etags({entry.new_key: info.etag})
