"""Open files: from the kernel's OPEN to its RELEASE.

Here it is decided whether a file is in passthrough, room is reserved ahead of its writer, and a
close becomes a version. Bytes are `data.py`'s, names `operations.py`'s.
"""

import errno
import os
import stat
from collections.abc import Callable

import structlog
import trio

from lmstorfs.catalog import Inode, NamespaceError, SqliteCatalog
from lmstorfs.checkpoint import Digester, Flusher, Versions
from lmstorfs.checkpoint.guard import Guard
from lmstorfs.checkpoint.ladder import Ladder, LostCopyError
from lmstorfs.dataset import Fetcher
from lmstorfs.digest import digest_bytes
from lmstorfs.fuse.handle import handle_ino, handle_writable, make_handle
from lmstorfs.fuse.openfile import OpenFile
from lmstorfs.fuse.openlog import Survivors
from lmstorfs.tiers import Placement, Tier, files
from lmstorfs.tiers.placement import RESERVE_AHEAD_BYTES
from lmstorfs.units import MIB

log = structlog.get_logger()

_GROWTH_LOOK_S = 0.004  # 40 MiB at 10 GiB/s, far less than is reserved ahead
_GROWTH_IDLE_S = 0.02
_RESERVE_STEP_MIN_BYTES = 4 * MIB
_OF_NOTHING = (None, digest_bytes(b""))  # another digest tells that the store lost the content


class OpenFiles:
    """All files that are open on one mount."""

    def __init__(
        self,
        catalog: SqliteCatalog,
        placement: Placement,
        versions: Versions,
        flusher: Flusher,
        digester: Digester,
        fetcher: Fetcher,
        ladder: Ladder,
        guard: Guard,
    ) -> None:
        self.catalog = catalog
        self.placement = placement
        self.versions = versions
        self.flusher = flusher
        self.digester = digester
        self.fetcher = fetcher
        self.ladder = ladder
        self.guard = guard
        self.passthrough = False
        """Whether the kernel gives passthrough; set once INIT was answered."""
        self.close_backing: Callable[[int, int], None] = lambda ino, backing_id: None
        self._files: dict[int, OpenFile] = {}
        self._locks: dict[int, trio.Lock] = {}
        self._growing = trio.Event()
        self._proved: set[int] = set()
        """Inodes whose copy here was written, fetched or verified by this daemon."""

    # --- what others ask ---------------------------------------------------------------------

    def get(self, ino: int) -> OpenFile | None:
        """Return the open file of `ino`, or None."""
        return self._files.get(ino)

    def is_open(self, ino: int) -> bool:
        """Whether anybody has `ino` open."""
        return ino in self._files or ino in self._locks

    def writers(self) -> list[OpenFile]:
        """Return the files that are open for writing."""
        return [opened for opened in self._files.values() if opened.writers]

    def stat(self, ino: int) -> os.stat_result | None:
        """Return what the tier shows of a file that is open for writing; else None."""
        opened = self._files.get(ino)
        if opened is None or opened.fd is None or not opened.writers:
            return None
        return os.fstat(opened.fd)

    # --- open --------------------------------------------------------------------------------

    async def open(self, ino: int, flags: int, *, keep_bits: bool = True) -> int:
        """Open a file; return its handle.

        `keep_bits`: the opener may keep set-id bits (it is root). Everyone else loses them now,
        since no passthrough write asks the daemon (the duty that HANDLE_KILLPRIV_V2 brings).
        """
        handle = make_handle(ino, flags)
        lock = self._locks.setdefault(ino, trio.Lock())
        try:
            async with lock:
                inode = self.catalog.get(ino)
                truncate = bool(flags & os.O_TRUNC) and handle_writable(handle)
                opened = self._files.get(ino)
                if opened is None and truncate and self.guard.losing_content(inode):
                    inode = self.catalog.get(ino)
                if opened is None:
                    opened = await self._load(inode, handle_writable(handle), truncate)
                    self._files[ino] = opened
                opened.add(handle)
                try:
                    if handle_writable(handle):
                        self._begin_writing(opened, inode, keep_bits)
                    if truncate and opened.fd is not None:
                        self.digester.forget(ino)
                        os.ftruncate(opened.fd, 0)
                        opened.written = opened.anew = True
                        self._proved.add(ino)
                except BaseException:
                    self.release(handle)
                    raise
        finally:
            if not lock.statistics().tasks_waiting and not lock.locked():
                self._locks.pop(ino, None)
        self.placement.touched(ino)
        return handle

    def create(self, inode: Inode, name: bytes, flags: int, wanted: int) -> int:
        """Open a file that was just made where `home` said (its row says `writing`).

        `wanted` is what to reserve, bytes, as `home` said it. Returns the handle.
        """
        handle = make_handle(inode.ino, flags)
        opened = self._make(inode, name, wanted)
        opened.written = opened.anew = True
        opened.add(handle)
        self._files[inode.ino] = opened
        self._proved.add(inode.ino)
        self.placement.touched(inode.ino)
        self._growing.set()
        return handle

    def home(self, name: bytes) -> tuple[Tier, int]:
        """Return the tier for a new file of this name, and what to reserve (0: it must wait)."""
        return self.placement.place(name) or (self.placement.tiers[0], 0)

    def _make(self, inode: Inode, name: bytes, wanted: int) -> OpenFile:
        tier = self.placement.tier(inode.tier)
        assert tier is not None
        fd = tier.open(inode.ino, create=True)
        reserved = wanted > 0 and self.placement.reserve(tier, inode.ino, fd, wanted)
        return OpenFile(inode.ino, name, fd, tier, passthrough=self.passthrough and reserved)

    async def _load(self, inode: Inode, writable: bool, truncate: bool) -> OpenFile:
        name = self.catalog.path(inode.ino) or ""
        base = os.fsencode(name.rpartition("/")[2])
        tier = self.placement.tier(inode.tier)
        if tier is not None and not truncate and not await self._is_right(inode, tier):
            inode = self.catalog.get(inode.ino)
            tier = None
        if tier is None and (truncate or (inode.size == 0 and inode.digest in _OF_NOTHING)):
            tier, wanted = self.home(base)
            self.catalog.contents.set_tier(inode.ino, tier.name)
            opened = self._make(self.catalog.get(inode.ino), base, wanted)
            if not truncate:  # the flusher knows a version by its time
                mtime_ns = inode.version_mtime_ns if inode.version else inode.mtime_ns
                os.utime(tier.path(inode.ino), ns=(inode.atime_ns, mtime_ns))
            return opened
        if tier is None:
            tier = await self.ladder.bring(inode)
            self._proved.add(inode.ino)
        if tier is None:
            if writable:
                raise NamespaceError(errno.ENOSPC, f"no tier has room for {name}")
            return OpenFile(inode.ino, base, None, None, passthrough=False)
        try:
            fd = tier.open(inode.ino)
        except FileNotFoundError as error:
            raise LostCopyError(f"{name}: its copy in {tier.name} is gone") from error
        return OpenFile(inode.ino, base, fd, tier, passthrough=self.passthrough)

    async def _is_right(self, inode: Inode, tier: Tier) -> bool:
        """Whether the tier's copy may be served; it is proved by digest once in a daemon's life.

        And again where the tier's file is not what the version's close left.
        """
        try:
            found = tier.path(inode.ino).stat()
        except FileNotFoundError:
            self.catalog.contents.set_tier(inode.ino, None)
            return False
        if inode.writing or (inode.ino in self._proved and inode.is_version(found)):
            return True
        if not await self.ladder.is_right(inode, tier):
            return False
        self._proved.add(inode.ino)
        return True

    def _begin_writing(self, opened: OpenFile, inode: Inode, keep_bits: bool) -> None:
        assert opened.tier is not None
        assert opened.fd is not None
        if opened.writers == 1:
            self.catalog.contents.begin_writing(inode.ino, opened.tier.name)
        if not keep_bits and inode.mode & (stat.S_ISUID | stat.S_ISGID):
            self.catalog.set_attributes(inode.ino, mode=inode.mode & ~(stat.S_ISUID | stat.S_ISGID))
        size = os.fstat(opened.fd).st_size
        if opened.writers == 1:
            opened.last_size = size  # nobody has written yet
        else:
            opened.written = True  # a reservation may set back the time that tells of a write
        wanted = size + (self.placement.expect(opened.name) or RESERVE_AHEAD_BYTES) // 4
        ahead = self._extend(opened, size, wanted)
        if not ahead and opened.count == 1:
            opened.passthrough = False  # it must wait for room, and only we can make it wait
        self._growing.set()

    # --- takeover ----------------------------------------------------------------------------

    def take_over(self, survivors: Survivors) -> None:
        """Know again what the kernel has open since an earlier daemon's time."""
        for ino, opens in survivors.by_inode().items():
            inode = self.catalog.find(ino)
            if inode is None:  # its last release is under way
                continue
            backing_id = max(opened.backing_id for opened in opens)
            self._files[ino] = self._known_again(inode, backing_id)
            for opened in opens:
                self._files[ino].add(opened.handle)
            self._files[ino].written = self._files[ino].writers > 0  # nobody saw what was written
        self._growing.set()

    def _known_again(self, inode: Inode, backing_id: int) -> OpenFile:
        name = os.fsencode((self.catalog.path(inode.ino) or "").rpartition("/")[2])
        tier = self.placement.tier(inode.tier)
        try:
            fd = None if tier is None else tier.open(inode.ino)
        except FileNotFoundError:
            log.error("an open file's copy is gone", ino=inode.ino, tier=inode.tier)
            fd = tier = None
        opened = OpenFile(inode.ino, name, fd, tier, passthrough=backing_id != 0)
        opened.backing_id = backing_id or None
        return opened

    # --- growth ------------------------------------------------------------------------------

    async def watch_growth(self) -> None:
        """Keep the reservation ahead of every passthrough writer, until cancelled."""
        while True:
            writers = [file for file in self.writers() if file.passthrough]
            if not writers:
                self._growing = trio.Event()
                await self._growing.wait()
                continue
            grew = [self._keep_ahead(file) for file in writers]
            await trio.sleep(_GROWTH_LOOK_S if any(grew) else _GROWTH_IDLE_S)

    def _keep_ahead(self, opened: OpenFile) -> bool:
        assert opened.fd is not None
        assert opened.tier is not None
        size = os.fstat(opened.fd).st_size
        grew = size > opened.last_size
        opened.last_size = size
        if grew and opened.tier.held(opened.ino) - size < RESERVE_AHEAD_BYTES // 2:
            opened.written = True  # as above
            self._extend(opened, size, size + RESERVE_AHEAD_BYTES)
        return grew

    def _extend(self, opened: OpenFile, size: int, end: int) -> bool:
        """Reserve up to `end`, or as much of it as there is room for; False: nothing."""
        assert opened.fd is not None
        assert opened.tier is not None
        while end - size >= _RESERVE_STEP_MIN_BYTES:
            last = end - size < 2 * _RESERVE_STEP_MIN_BYTES
            if self.placement.reserve(opened.tier, opened.ino, opened.fd, end, urgent=last):
                return True
            end = size + (end - size) // 2
        return opened.tier.held(opened.ino) > size

    # --- close -------------------------------------------------------------------------------

    def flush(self, handle: int) -> None:
        """A descriptor was closed: what the tier holds is a version before close(2) returns.

        Not only at the last writer's RELEASE: a process that was forked meanwhile, a worker that
        reads data, may hold the file open for as long as it lives.
        """
        opened = self._files.get(handle_ino(handle))
        if opened is None or opened.fd is None or not handle_writable(handle):
            return
        inode = self.catalog.find(opened.ino)
        if inode is None or inode.nlink == 0:
            return
        if opened.written or not inode.is_version(os.fstat(opened.fd)):
            self._make_version(opened, writing=True)

    def _make_version(self, opened: OpenFile, *, writing: bool) -> None:
        assert opened.fd is not None
        found = os.fstat(opened.fd)
        opened.written = False
        opened.vouched = writing
        self.versions.close(opened.ino, found.st_size, found.st_mtime_ns, writing=writing)
        self.flusher.wake()

    def release(self, handle: int) -> None:
        """The kernel is done with an open: after the last writer's, the room is settled."""
        opened = self._files.get(handle_ino(handle))
        if opened is None:
            return
        opened.remove(handle)
        if handle_writable(handle) and not opened.writers:
            self._end_writing(opened)
        if opened.count == 0:
            del self._files[opened.ino]
            self._close(opened)

    def _end_writing(self, opened: OpenFile) -> None:
        assert opened.fd is not None
        assert opened.tier is not None
        inode = self.catalog.find(opened.ino)
        if inode is None or inode.nlink == 0:
            if inode is not None and self.guard.keeps(opened.ino):
                self._settle_kept(opened, inode)
            return
        found = os.fstat(opened.fd)
        self.placement.learn(opened.name, found.st_size)
        # A mapping writes without moving the time. Where the version has a digest already, that
        # may be of what the file held before.
        mapped = opened.mappable and opened.vouched and inode.digest is not None
        if opened.written or mapped or not inode.is_version(found):
            self._make_version(opened, writing=False)
        else:
            self.catalog.contents.end_writing(opened.ino)
            if inode.dirty and inode.digest is None:
                self.digester.add(opened.ino, inode.version)
        # After the catalog: to give room back moves the mtime for a moment, and a crash just then
        # must not look like a writer's.
        opened.tier.settle(opened.ino, opened.fd)
        opened.vouched = False
        self.flusher.wake()

    def _settle_kept(self, opened: OpenFile, inode: Inode) -> None:
        """The last writer of a file that was deleted and is kept is gone."""
        assert opened.fd is not None
        assert opened.tier is not None
        if inode.is_version(os.fstat(opened.fd)):
            self.catalog.contents.end_writing(opened.ino)
        else:
            self.catalog.contents.doubt(opened.ino)
        opened.tier.settle(opened.ino, opened.fd)

    def set_times(self, inode: Inode, atime_ns: int, mtime_ns: int) -> None:
        """Do what utimensat(2) asks. The tier's file has the same mtime: it tells of writes."""
        opened = self._files.get(inode.ino)
        tier = self.placement.tier(inode.tier)
        of_version = not inode.writing
        if opened is not None and opened.fd is not None:
            found = os.fstat(opened.fd)
            if opened.writers:
                if not inode.is_version(found):
                    opened.written = True  # the time that told of it is about to be set back
                of_version = not opened.written
            os.utime(opened.fd, ns=(atime_ns, mtime_ns))
        elif tier is not None:
            os.utime(tier.path(inode.ino), ns=(atime_ns, mtime_ns))
        self.catalog.contents.set_times(inode.ino, atime_ns, mtime_ns, of_version=of_version)

    def _close(self, opened: OpenFile) -> None:
        if opened.backing_id is not None:
            self.close_backing(opened.ino, opened.backing_id)
        if opened.fd is not None:
            os.close(opened.fd)
        inode = self.catalog.find(opened.ino)
        if self.guard.keeps(opened.ino):
            return
        if inode is None or inode.nlink == 0:
            if opened.tier is not None:
                self.placement.drop(opened.ino, opened.tier.name)
            self._proved.discard(opened.ino)
            self.catalog.purge(opened.ino)
            self.flusher.announce()
            return
        if opened.mappable and opened.tier is not None:
            path = opened.tier.path(opened.ino)
            if files.has_writers(path):
                self.versions.mapped(opened.ino)
        self.placement.touched(opened.ino)

    async def fsync(self, handle: int) -> None:
        """Make what the handle's file holds a version, and wait for its second copy."""
        ino = handle_ino(handle)
        inode = self.catalog.find(ino)
        opened = self._files.get(ino)
        if inode is None or inode.nlink == 0:
            return  # unlinked: there is no name under which a copy could be found
        found = self.stat(ino)
        changed = False
        if found is not None and opened is not None:
            changed = opened.written or not inode.is_version(found)
            opened.written = False
            opened.vouched |= changed
        await self.versions.fsync(inode, found, changed=changed)
