"""How much room the mount has, for statfs(2): programs check it before they write."""

import time

import pyfuse3
import structlog
import trio

from lmstorfs.errors import StoreError
from lmstorfs.store import Capacity, Store

log = structlog.get_logger()

_BLOCK_BYTES = 4096
_UNBOUNDED_BYTES = 1 << 50  # an object store has no size: a PiB is more than anyone asks for
_ASK_AGAIN_S = 10.0
_INODES = 1 << 32
_NAME_MAX_BYTES = 255


class SpaceReport:
    """Asks the store for its room now and then."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._capacity: Capacity | None = None
        self._asked_at = 0.0

    async def statfs(self, inodes: int) -> pyfuse3.StatvfsData:
        """Return the room; what is stored in the end must fit the store, so it is the store's."""
        if time.monotonic() - self._asked_at > _ASK_AGAIN_S:
            self._asked_at = time.monotonic()
            try:
                self._capacity = await trio.to_thread.run_sync(self._store.capacity)
            except StoreError as error:  # what was known serves on
                log.warning("room of the store not told", error=str(error))
        room = self._capacity or Capacity(total=_UNBOUNDED_BYTES, free=_UNBOUNDED_BYTES)
        data = pyfuse3.StatvfsData()
        data.f_bsize = data.f_frsize = _BLOCK_BYTES
        data.f_blocks = room.total // _BLOCK_BYTES
        data.f_bfree = data.f_bavail = room.free // _BLOCK_BYTES
        data.f_files = _INODES
        data.f_ffree = data.f_favail = _INODES - inodes
        data.f_namemax = _NAME_MAX_BYTES
        return data
