"""The fence: a node whose place was taken must not bring anything to the store any more.

A mount with a mirror writes its origin and epoch into the store's owner record before it flushes
anything. A successor has a higher epoch, and writes its own. Who finds another owner than itself
stops; workers look once more just before they publish, so that an upload that began long ago does
not end over a newer object. Epochs decide, no clock does.
"""

import random
import time
from collections.abc import Callable

import structlog
import trio

from lmstorfs.catalog.database import Database
from lmstorfs.errors import FencedError, StoreError
from lmstorfs.store import Store
from lmstorfs.store.records import OWNER_KEY, check_owner, owner_of, read_record, write_record

log = structlog.get_logger()

_BELIEVED_S = 1.0
_RETRY_FIRST_S = 0.5
_RETRY_MAX_S = 10.0
# What a predecessor publishes may have looked at the record so long ago.
_SETTLE_S = 3.0


class Fence:
    """Whether one mount still may write to its store."""

    def __init__(self, store: Store, db: Database, *, enabled: bool, label: str) -> None:
        """Take `enabled`: whether another node may take this one's place; `label` names it."""
        self._store = store
        self._db = db
        self._enabled = enabled
        self._label = label
        self._claimed = trio.Event()
        self._checked_at = 0.0
        self.reason: str | None = None
        """Why nothing may be brought to the store any more."""
        self.on_fenced: Callable[[], None] = lambda: None
        if not enabled:
            self._claimed.set()

    @property
    def owner(self) -> str | None:
        """What the owner record must name for an upload to be published; None: anything."""
        if not self._enabled:
            return None
        return f"{self._db.meta('origin')} {self._db.meta('epoch')}"

    def fence(self, reason: str) -> None:
        """Somebody said that another node has taken over."""
        if self.reason is None:
            log.error("fenced", reason=reason)
            self.reason = reason
            self._claimed.set()
            self.on_fenced()

    async def run(self) -> None:
        """Claim the store, however long it takes to answer."""
        wait_s = _RETRY_FIRST_S
        while self._enabled and self.reason is None:
            try:
                await self._claim()
            except StoreError as error:
                log.warning("the store's owner record", error=str(error))
                await trio.sleep(wait_s * random.uniform(0.5, 1.0))
                wait_s = min(2 * wait_s, _RETRY_MAX_S)
            except FencedError as error:
                self.fence(str(error))
            else:
                self._claimed.set()
                return

    async def _claim(self) -> None:
        owner = self.owner
        assert owner is not None
        record = await trio.to_thread.run_sync(read_record, self._store, OWNER_KEY)
        found = owner_of(record)
        if found == owner:
            return
        if found is not None and self._is_past(found):
            await trio.to_thread.run_sync(check_owner, self._store, owner)
        content = f"{owner} {self._label} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
        await trio.to_thread.run_sync(write_record, self._store, OWNER_KEY, content.encode())
        self._db.set_meta("owned", owner)
        if found is not None:
            await trio.sleep(_SETTLE_S)

    def _is_past(self, found: str) -> bool:
        """Whether this node was the owner once, and `found` came after it."""
        origin, _, epoch = found.partition(" ")
        own = (self._db.meta("origin"), int(self._db.meta("epoch") or 0))
        if origin == own[0] and epoch.isdecimal():
            return int(epoch) > own[1]
        return self._db.meta("owned") is not None

    async def verify(self) -> None:
        """Return when this node may write to the store. Raises `FencedError` or `StoreError`."""
        await self._claimed.wait()
        owner = self.owner
        fresh = trio.current_time() - self._checked_at < _BELIEVED_S
        if owner is not None and self.reason is None and not fresh:
            try:
                await trio.to_thread.run_sync(check_owner, self._store, owner)
            except FencedError as error:
                self.fence(str(error))
            self._checked_at = trio.current_time()
        if self.reason is not None:
            raise FencedError(self.reason)
