"""The flusher: brings closed versions to the store, the longest closed first, retrying for ever.

It decides order and time and keeps the books; content travels in worker processes, the rest
(directories, symlinks, attributes) in threads. Only versions that a close or an fsync vouched
for are sent; a file that changes on the way is given up (`SupersededError`) and comes again as
its next version. What names must become of stored objects is `namesync.py`'s.
"""

import os
import stat
import time
from collections.abc import Callable

import msgspec
import structlog
import trio

from lmstorfs.catalog.catalog import Inode
from lmstorfs.catalog.sqlite import SqliteCatalog
from lmstorfs.checkpoint.fence import Fence
from lmstorfs.checkpoint.flight import Flight, FlushStatistics, attributes_of
from lmstorfs.checkpoint.health import Backoff, StoreHealth
from lmstorfs.errors import FencedError, StoreError, StoreUnreachableError, SupersededError
from lmstorfs.store import Attributes, Kind, ObjectInfo, Store
from lmstorfs.store.pool import Upload, WorkerPool
from lmstorfs.tiers import Placement, files

log = structlog.get_logger()

_MAX_IN_FLIGHT = 32  # small files go several to a worker
_THE_STORE = 0  # no inode's number: the wait that holds for all
_BATCH = 256  # rows looked at in one go
_LOOK_EVERY_S = 0.02
_IDLE_S = 30.0  # the longest sleep: only a net under missed wakes


class Flusher:
    """Brings one catalog's dirty versions to one store."""

    def __init__(
        self,
        catalog: SqliteCatalog,
        placement: Placement,
        store: Store,
        pool: WorkerPool,
        fence: Fence,
        *,
        delay_s: float,
    ) -> None:
        self.fence = fence
        self._catalog = catalog
        self._placement = placement
        self._store = store
        self._pool = pool
        self._delay_s = delay_s
        self.on_suspect: Callable[[int], None] = lambda ino: None
        """Called where the tier's file shows a version whose content it has not."""
        self.health = StoreHealth()
        self.hurry = False  # drain: no version waits for its rename any more
        self.in_flight: dict[int, Flight] = {}
        self.held_back: set[int] = set()
        """Inodes of which the store may hold a newer version than the catalog knows."""
        self._urgent: set[int] = set()
        # ino → (version, its mtime) whose content is gone; with another mtime it may be there
        self._superseded: dict[int, tuple[int, int]] = {}
        self._doubted: dict[int, tuple[int, int]] = {}  # the same, after the first look only
        self._backoff = Backoff()
        self._wake = trio.Event()
        self._changed = trio.Event()
        self._stored_files = self._stored_bytes = self._superseded_count = self._cancelled = 0

    # --- asked by others ---------------------------------------------------------------------

    def wake(self) -> None:
        """Something new may be there to flush."""
        self._wake.set()

    def urgent(self, ino: int) -> None:
        """Somebody waits for this inode: do not wait for a rename."""
        self._urgent.add(ino)
        self._backoff.succeeded(ino)
        self.wake()

    def is_wanted(self, ino: int) -> bool:
        """Whether somebody waits for this inode to be stored."""
        return self.hurry or ino in self._urgent

    def cancel(self, ino: int) -> None:
        """The inode was unlinked: give up what is under way for it."""
        flight = self.in_flight.get(ino)
        if flight is not None:
            flight.scope.cancel()
        self._urgent.discard(ino)
        self._superseded.pop(ino, None)
        self._doubted.pop(ino, None)

    def is_busy(self, key: str) -> bool:
        """Whether an upload to `key`, or to something below it, is under way."""
        return any(
            flight.key == key or flight.key.startswith(key + "/")
            for flight in self.in_flight.values()
        )

    async def changed(self) -> None:
        """Return when something was stored, cancelled or given up."""
        await self._changed.wait()

    def announce(self) -> None:
        """Wake all that wait for `changed`."""
        self._changed.set()
        self._changed = trio.Event()

    def is_overtaken(self, inode: Inode) -> bool:
        """Whether a writer changes the file now: the newest version's content is gone already."""
        found = self._found(inode) if inode.writing and inode.is_file else None
        return found is not None and not inode.is_version(found)

    def settled(self, ino: int, version: int) -> bool:
        """Whether the store has `version` or a newer one, or the file is gone."""
        inode = self._catalog.find(ino)
        return inode is None or inode.nlink == 0 or inode.stored_version >= version

    async def stored(self, ino: int, version: int) -> None:
        """Return when the store has `version` of `ino`."""
        self.urgent(ino)
        while not self.settled(ino, version):
            await self.changed()

    def statistics(self) -> FlushStatistics:
        """Return the books."""
        flights = list(self.in_flight.values())
        return FlushStatistics(
            in_flight=len(flights),
            in_flight_bytes=sum(flight.size for flight in flights),
            in_flight_moved=sum(flight.moved for flight in flights),
            stored_files=self._stored_files,
            stored_bytes=self._stored_bytes,
            superseded=self._superseded_count,
            cancelled=self._cancelled,
        )

    # --- the schedule ------------------------------------------------------------------------

    async def run(self) -> None:
        """Flush until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                self._wake = trio.Event()
                wait_s = self._start_ready(nursery)
                with trio.move_on_after(wait_s):
                    await self._wake.wait()
                if not self._urgent:  # many closes at once are looked at once
                    await trio.sleep(_LOOK_EVERY_S)

    def _start_ready(self, nursery: trio.Nursery) -> float:
        """Start what may start; return how long nothing else can, seconds."""
        wait_s, offset = _IDLE_S, 0
        if self.fence.reason is not None:
            return wait_s
        for ino in list(self._urgent):
            inode = self._catalog.find(ino)
            if inode is None or not (inode.dirty or inode.attrs_dirty):
                self._urgent.discard(ino)
            elif (ready_in := self._ready_in(inode)) == 0:
                self._start(inode, nursery)
            elif ready_in is not None:
                wait_s = min(wait_s, ready_in)
        while len(self.in_flight) < self._limit():
            batch = self._catalog.contents.dirty(_BATCH, offset)
            for inode in batch:
                if len(self.in_flight) >= self._limit():
                    break
                ready_in = self._ready_in(inode)
                if ready_in is None:
                    continue
                if ready_in > 0:
                    wait_s = min(wait_s, ready_in)
                    if inode.dirty and not self._backoff.not_before(inode.ino):
                        return wait_s  # those after it were closed later
                    continue
                self._start(inode, nursery)
            if len(batch) < _BATCH:
                break
            offset += _BATCH
        return wait_s

    def _limit(self) -> int:
        """A store that does not answer is asked by one upload, not by all."""
        return 1 if self.health.state == "unreachable" else _MAX_IN_FLIGHT

    def _ready_in(self, inode: Inode) -> float | None:
        """Return in how many seconds `inode` may start; None: not before something changes."""
        ino = inode.ino
        state = (inode.version, inode.version_mtime_ns)
        if ino in self.in_flight or ino in self.held_back or self._superseded.get(ino) == state:
            return None
        if inode.is_file and inode.dirty and (inode.tier is None or inode.digest is None):
            return None  # lost with a tier (`status` counts it), or its digest is on its way
        key = self._catalog.key(ino)
        if key is None or self._catalog.journal.blocks(key) or self._is_taken(inode, key):
            return None
        if inode.is_dir and inode.stored_version and self._awaits_children(ino):
            return None  # its times would be overtaken by what comes into it
        not_before = max(self._backoff.not_before(ino), self._backoff.not_before(_THE_STORE))
        wait_s = not_before - time.monotonic()
        if not self.is_wanted(ino):
            since = max(inode.closed_at or 0.0, inode.ctime_ns / 1e9)
            wait_s = max(wait_s, min(self._delay_s, since + self._delay_s - time.time()))
        return max(0.0, wait_s)

    def _awaits_children(self, ino: int) -> bool:
        children = self._catalog.contents.awaits_children(ino)
        return any(not self.is_overtaken(child) for child in children)

    def _is_taken(self, inode: Inode, key: str) -> bool:
        """Whether an upload of another inode, which had this name before, is still under way."""
        if inode.is_dir:
            return any(flight.key == key for flight in self.in_flight.values())
        return self.is_busy(key)

    def _start(self, inode: Inode, nursery: trio.Nursery) -> None:
        key = self._catalog.key(inode.ino)
        assert key is not None
        flight = Flight(key, inode.version, inode.version_size, trio.CancelScope())
        self.in_flight[inode.ino] = flight
        nursery.start_soon(self._fly, inode, flight)

    async def _fly(self, inode: Inode, flight: Flight) -> None:
        ino = inode.ino
        try:
            with flight.scope:
                await self._bring(inode, flight)
            if flight.scope.cancelled_caught:
                self._cancelled += 1
                self._given_up(inode, flight)
        except SupersededError:
            self._given_up(inode, flight)
            self._overtaken(inode)
        except FencedError as error:
            self.fence.fence(str(error))
        except StoreError as error:
            self._given_up(inode, flight)
            self.health.failed(error)
            self._backoff.failed(ino, time.monotonic())
            if isinstance(error, StoreUnreachableError):
                self._backoff.failed(_THE_STORE, time.monotonic())
            log.warning("flush failed", key=flight.key, error=str(error))
        except OSError as error:  # the tier's file: gone or unreadable
            self._backoff.failed(ino, time.monotonic())
            log.error("flush failed", key=flight.key, error=str(error))
        else:
            if not flight.scope.cancelled_caught:
                self._succeeded(ino)
        finally:
            self.in_flight.pop(ino, None)
            self.announce()
            self.wake()

    def _overtaken(self, inode: Inode) -> None:
        """The content on the way was not the version's. It comes with the next version, if at all.

        But to reserve room, or to give it back, moves a file's time for a moment: where the tier
        shows the version after all, a second look decides.
        """
        state = (inode.version, inode.version_mtime_ns)
        found = self._found(inode)
        is_there = found is not None and inode.is_version(found)
        if is_there and self._doubted.get(inode.ino) != state:
            self._doubted[inode.ino] = state
            self._backoff.failed(inode.ino, time.monotonic())
            return
        self._doubted.pop(inode.ino, None)
        self._superseded_count += 1
        self._superseded[inode.ino] = state
        if is_there:  # nobody wrote, and yet it has another digest
            self.on_suspect(inode.ino)

    def look_again(self, ino: int) -> None:
        """Another copy of the version was put into the tier."""
        self._superseded.pop(ino, None)
        self.wake()

    def _found(self, inode: Inode) -> os.stat_result | None:
        """Return what the tier shows of a file; None where no tier has it."""
        tier = self._placement.tier(inode.tier)
        try:
            return None if tier is None else tier.path(inode.ino).stat()
        except FileNotFoundError:
            return None

    def _given_up(self, inode: Inode, flight: Flight) -> None:
        """The upload failed, or it was given up: what it may have left must not stay."""
        if inode.dirty:
            self._catalog.contents.given_up(inode.ino, flight.key, is_dir=inode.is_dir)

    def _succeeded(self, ino: int) -> None:
        if self.health.state == "unreachable":
            self._backoff.forgive_all()
        self.health.succeeded()
        self._backoff.succeeded(_THE_STORE)
        self._backoff.succeeded(ino)
        self._doubted.pop(ino, None)
        self._urgent.discard(ino)
        self._catalog.note_stored(ino)

    # --- one version -------------------------------------------------------------------------

    async def _bring(self, inode: Inode, flight: Flight) -> None:
        await self.fence.verify()
        attributes = attributes_of(inode, self._catalog.xattrs(inode.ino))
        if not inode.dirty:
            await self._bring_attributes(inode, flight.key, attributes)
            return
        kind = stat.S_IFMT(inode.mode)
        if kind == stat.S_IFREG:
            info = await self._bring_file(inode, flight, attributes)
        elif kind == stat.S_IFDIR:
            self._catalog.contents.upload_began(inode.ino, flight.key + "/")
            info = await trio.to_thread.run_sync(self._store.put_directory, flight.key, attributes)
        elif kind == stat.S_IFLNK:
            target = os.fsdecode(inode.target or b"")
            self._catalog.contents.upload_began(inode.ino, flight.key)
            info = await trio.to_thread.run_sync(
                self._store.put_symlink, flight.key, target, attributes
            )
        else:
            self._catalog.contents.kept_here(inode.ino)
            return
        self._record(inode, flight, info, attributes)

    async def _bring_file(self, inode: Inode, flight: Flight, attributes: Attributes) -> ObjectInfo:
        tier = self._placement.tier(inode.tier)
        assert tier is not None
        self._catalog.contents.upload_began(inode.ino, flight.key)
        path = tier.path(inode.ino)
        upload = Upload(
            key=flight.key,
            source=str(path),
            size=inode.version_size,
            attributes=attributes,
            mtime_ns=inode.version_mtime_ns,
            verify=files.has_writers(path),
            owner=self.fence.owner,
        )

        def moved(count: int) -> None:
            flight.moved += count

        def began(key: str, upload_id: str) -> None:
            self._catalog.contents.upload_began(inode.ino, key, upload_id)

        done = await self._pool.upload(upload, on_moved=moved, on_began=began)
        self._stored_files += 1
        self._stored_bytes += inode.version_size
        shown = msgspec.structs.replace(attributes, digest=done.digest)
        return msgspec.structs.replace(done.info, attributes=shown)

    def _record(self, before: Inode, flight: Flight, info: ObjectInfo, sent: Attributes) -> None:
        now = self._catalog.find(before.ino)
        changed = False
        if now is not None:
            here = attributes_of(now, self._catalog.xattrs(now.ino))
            changed = (here.mode, here.uid, here.gid, here.xattrs) != (
                sent.mode, sent.uid, sent.gid, sent.xattrs,
            )  # fmt: skip
            changed |= now.version == before.version and now.mtime_ns != before.mtime_ns
        self._catalog.contents.stored(
            before.ino, flight.version, flight.key, info, attributes_changed=changed
        )
        if self._store.directory_times_drift:
            self._catalog.contents.attributes_behind(self._catalog.parent(before.ino))

    async def _bring_attributes(self, inode: Inode, key: str, attributes: Attributes) -> None:
        kind = Kind.FILE
        if inode.is_dir:
            kind = Kind.DIRECTORY
        elif inode.is_symlink:
            kind = Kind.SYMLINK
        info = await trio.to_thread.run_sync(self._store.set_attributes, key, kind, attributes)
        self._catalog.contents.attributes_stored(inode, info.etag)
