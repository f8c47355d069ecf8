"""Bytes: what the channel asks of open files, and the userspace path.

A READ or WRITE comes here only where the file is not in passthrough. It is served from the
tier's file at once where that needs no waiting; otherwise it waits for room (a write) or for the
store (a read of a file that no tier holds). FALLOCATE, LSEEK and COPY_FILE_RANGE come here for
all files: pyfuse3 has no handlers for them.
"""

import errno
import os

import trio

from lmstorfs.catalog import NamespaceError
from lmstorfs.errors import NoRoomError
from lmstorfs.fuse import protocol as fuse
from lmstorfs.fuse.handle import handle_ino
from lmstorfs.fuse.handles import OpenFiles
from lmstorfs.fuse.openfile import OpenFile
from lmstorfs.tiers import files
from lmstorfs.units import MIB

_GROW_BYTES = 8 * MIB  # room is asked for in steps of this, not for every write
_READ_MAX_BYTES = 1 << 20
# Memory of what was just evicted comes back when its last reader lets go of it.
_GIVE_UP_S = 3.0
_WAIT_LOOK_S = 1.0  # a waiting writer looks again at least this often


class DataPath:
    """Implements the channel's `Opened`."""

    def __init__(self, opened: OpenFiles) -> None:
        self._files = opened
        self._buffer = memoryview(bytearray(_READ_MAX_BYTES))
        self._waiting = 0

    # --- what an OPEN reply needs ------------------------------------------------------------

    def backing_fd(self, handle: int) -> int | None:
        """Return the tier's descriptor where the handle's file is in passthrough."""
        opened = self._files.get(handle_ino(handle))
        return opened.fd if opened is not None and opened.passthrough else None

    def backing_id(self, handle: int) -> int | None:
        """Return the backing id that the file has already."""
        opened = self._files.get(handle_ino(handle))
        return None if opened is None else opened.backing_id

    def set_backing_id(self, handle: int, backing_id: int | None) -> None:
        """Note the backing id; None: the kernel refused, so the file is not in passthrough."""
        opened = self._files.get(handle_ino(handle))
        if opened is not None:
            opened.backing_id = backing_id
            opened.passthrough = backing_id is not None

    def forget_handle(self, handle: int) -> None:
        """The kernel gave up the open before it got our answer."""
        self._files.release(handle)

    # --- bytes -------------------------------------------------------------------------------

    def data_now(self, opcode: int, nodeid: int, body: memoryview) -> bytes | memoryview | None:
        """Answer at once, or None where it has to wait."""
        opened = self._files.get(nodeid)
        if opened is None:
            raise NamespaceError(errno.EBADF)
        if opcode == fuse.FUSE_READ:
            _, offset, size, *_ = fuse.READ_IN.unpack_from(body)
            return self._read(opened, offset, size)
        if opcode == fuse.FUSE_WRITE:
            _, offset, size, *_ = fuse.WRITE_IN.unpack_from(body)
            if not self._has_room(opened, offset + size):
                return None
            return self._write(opened, offset, body[fuse.WRITE_IN.size :][:size])
        if opcode == fuse.FUSE_FALLOCATE:
            return self._fallocate(opened, body)
        if opcode == fuse.FUSE_LSEEK:
            return self._lseek(opened, body)
        return self._copy_range(opened, body)

    async def data(self, opcode: int, nodeid: int, body: memoryview) -> bytes | memoryview:
        """Answer, waiting for room or for the store."""
        opened = self._files.get(nodeid)
        if opened is None:
            raise NamespaceError(errno.EBADF)
        if opcode == fuse.FUSE_READ:
            _, offset, size, *_ = fuse.READ_IN.unpack_from(body)
            inode = self._files.catalog.get(nodeid)
            return await self._files.fetcher.read(inode, offset, size)
        await self._wait_for_room(opened, self._end(opcode, body))
        answer = self.data_now(opcode, nodeid, body)
        assert answer is not None
        return answer

    def _end(self, opcode: int, body: memoryview) -> int:
        if opcode == fuse.FUSE_WRITE:
            _, offset, size, *_ = fuse.WRITE_IN.unpack_from(body)
            return int(offset + size)
        _, offset, length, *_ = fuse.FALLOCATE_IN.unpack_from(body)
        return int(offset + length)

    def _read(self, opened: OpenFile, offset: int, size: int) -> memoryview | None:
        if opened.fd is None:
            return None
        got = os.preadv(opened.fd, [self._buffer[:size]], offset)
        return self._buffer[:got]

    def _write(self, opened: OpenFile, offset: int, content: memoryview) -> bytes:
        assert opened.fd is not None
        count = os.pwrite(opened.fd, content, offset)
        opened.written = True
        return fuse.WRITE_OUT.pack(count, 0)

    # --- room --------------------------------------------------------------------------------

    def _has_room(self, opened: OpenFile, end: int, *, admit: bool = True) -> bool:
        """Whether the file may grow to `end`, evicting stored versions where that helps.

        `admit`: one that has no room at all yet gets it for all that it will probably become, or
        none. Files that began with a part each would wait for each other.
        """
        tier = opened.tier
        if tier is None or opened.fd is None:
            raise NamespaceError(errno.EBADF)
        held = tier.held(opened.ino)
        if end <= held:
            return True
        reserve = self._files.placement.reserve
        if admit and held == 0:
            whole = max(end, self._files.placement.admission(tier, opened.name))
            return reserve(tier, opened.ino, opened.fd, whole)
        return reserve(tier, opened.ino, opened.fd, end + _GROW_BYTES) or reserve(
            tier, opened.ino, opened.fd, end
        )

    async def _wait_for_room(self, opened: OpenFile, end: int) -> None:
        """Hold the writer until the flusher has made room (backpressure).

        ENOSPC only where waiting cannot help: nothing that could be flushed is left, or the
        store is away.
        """
        flusher = self._files.flusher
        self._waiting += 1
        try:
            hopeful_at = trio.current_time()
            while not self._has_room(opened, end, admit=(hope := self._can_hope())):
                if hope:
                    hopeful_at = trio.current_time()
                elif trio.current_time() - hopeful_at > _GIVE_UP_S:
                    raise NoRoomError(
                        f"no room for {opened.name!r}: nothing more can be brought to the store"
                    )
                flusher.wake()
                with trio.move_on_after(_WAIT_LOOK_S):
                    await flusher.changed()
        finally:
            self._waiting -= 1

    def _can_hope(self) -> bool:
        flusher = self._files.flusher
        if flusher.health.state == "unreachable":
            return False
        pending = self._files.catalog.contents.pending().bytes
        if flusher.in_flight or pending or self._files.guard.makes_way():
            return True
        # Other writers may close and be flushed, unless they all wait as well.
        return self._waiting < len(self._files.writers())

    # --- what pyfuse3 has no handler for -----------------------------------------------------

    def _fallocate(self, opened: OpenFile, body: memoryview) -> bytes | None:
        _, offset, length, mode, _ = fuse.FALLOCATE_IN.unpack_from(body)
        if opened.fd is None:
            raise NamespaceError(errno.EBADF)
        if not mode & files.FALLOC_FL_PUNCH_HOLE and not self._has_room(opened, offset + length):
            return None
        files.fallocate(opened.fd, mode, offset, length)
        opened.written = True
        return b""

    def _lseek(self, opened: OpenFile, body: memoryview) -> bytes:
        _, offset, whence, _ = fuse.LSEEK_IN.unpack_from(body)
        if opened.fd is None:
            raise NamespaceError(errno.EOPNOTSUPP)
        return fuse.LSEEK_OUT.pack(os.lseek(opened.fd, offset, whence))

    def _copy_range(self, source: OpenFile, body: memoryview) -> bytes:
        """Leave it to the kernel, which falls back to a splice through both files."""
        raise NamespaceError(errno.ENOSYS)
