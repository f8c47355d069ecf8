"""The channel: stands between `/dev/fuse` and pyfuse3, so that the kernel moves the bytes.

libfuse takes a mount point of the form `/dev/fd/N` as a device that is already mounted. It gets
one end of a SEQPACKET socket pair, which keeps message boundaries as the device does; the channel
holds the device and the other end. It passes requests and replies on untouched, but for

- the header's process id, in whose place a handler is told the request's number: by that a later
  daemon knows what an earlier one has done already,
- INIT, which it answers itself (libfuse knows neither passthrough nor a protocol without splice),
- OPEN and CREATE replies, into which it writes the backing id of the tier's file,
- READ and WRITE of files that are not in passthrough, and FALLOCATE, LSEEK, COPY_FILE_RANGE and
  IOCTL, which it has answered from the tier's file, by `data`.

What it deliberately does not do: know what a name or a version is. Two tasks of the daemon's one
thread; a thread of its own would only fight for the GIL.
"""

import contextlib
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Callable
from typing import Protocol

import structlog
import trio

from lmstorfs.errors import errno_of
from lmstorfs.fuse import protocol as fuse
from lmstorfs.fuse.closers import Closers
from lmstorfs.fuse.openlog import OpenLog

log = structlog.get_logger()

_SOCKET_BUFFER_BYTES = 8 << 20
_MAX_WRITE_BYTES = 1 << 20
# An unprivileged socket's buffer is small, and no message may be larger than it; data never
# passes through the socket, only names and xattrs do, which are smaller than this.
_REQUEST_SLACK_BYTES = 128 << 10
_REQUESTS_A_TURN = 64  # then other tasks get their turn
_UNNOTED = 64  # more backing ids are never made between two notes


class Opened(Protocol):
    """The files that are open on the mount, as the channel sees them."""

    def backing_fd(self, handle: int) -> int | None:
        """Return the tier's descriptor for a handle in passthrough; None: not in passthrough."""
        ...

    def backing_id(self, handle: int) -> int | None:
        """Return the backing id that the handle's inode already has."""
        ...

    def set_backing_id(self, handle: int, backing_id: int | None) -> None:
        """The handle's inode has this backing id; None: the kernel refused passthrough."""
        ...

    def forget_handle(self, handle: int) -> None:
        """The kernel never took the handle: its open was given up."""
        ...

    async def data(self, opcode: int, nodeid: int, body: memoryview) -> bytes | memoryview:
        """Answer a request about bytes; raises what `errno_of` understands."""
        ...

    def data_now(self, opcode: int, nodeid: int, body: memoryview) -> bytes | memoryview | None:
        """The same without waiting; None where it has to wait."""
        ...


class Channel:
    """One FUSE connection."""

    def __init__(
        self, device_fd: int, opened: Opened, openlog: OpenLog, *, passthrough: bool
    ) -> None:
        """Take the mounted device. `passthrough` says whether to ask the kernel for it."""
        os.set_blocking(device_fd, False)
        self._device = device_fd
        self._opened = opened
        self._openlog = openlog
        self._want_passthrough = passthrough
        self.passthrough = False
        self._socket, self._far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._socket, self._far):
            for option in (socket.SO_SNDBUF, 32):  # 32: SO_SNDBUFFORCE, for the privileged
                with contextlib.suppress(PermissionError):
                    end.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)
        self._socket.setblocking(False)
        self._request = bytearray(_MAX_WRITE_BYTES + _REQUEST_SLACK_BYTES)
        self._reply = bytearray(_MAX_WRITE_BYTES + _REQUEST_SLACK_BYTES)
        self._opening: dict[int, tuple[int, int]] = {}  # unique of an OPEN or CREATE → opcode, pid
        self._closers = Closers()
        self._releasing: dict[int, int] = {}  # unique of a RELEASE → its handle
        self.resent: set[int] = set()
        """Numbers of requests that an earlier daemon took and perhaps did; see `request_number`."""
        self._dropped: set[int] = set()  # uniques whose replies the kernel must not see
        self.initialised = trio.Event()

    @property
    def mountpoint(self) -> str:
        """What pyfuse3 is told to mount on."""
        return f"/dev/fd/{self._far.fileno()}"

    async def run(self, *, adopted: bool = False) -> None:
        """Serve until the kernel is done with the mount (unmounted, or the connection aborted).

        `adopted`: an earlier daemon has answered INIT on this device; requests that it took and
        did not answer are asked again.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._pump_replies)
            if adopted:
                await self._take_over()
            try:
                await self._pump_requests(nursery)
            finally:
                nursery.cancel_scope.cancel()

    def close(self) -> None:
        """Close our end, after pyfuse3 has closed the other with its session."""
        self._socket.close()
        self._far.detach()

    # --- kernel → pyfuse3 --------------------------------------------------------------------

    async def _pump_requests(self, nursery: trio.Nursery) -> None:
        view = memoryview(self._request)
        while True:
            await trio.lowlevel.wait_readable(self._device)
            for _ in range(_REQUESTS_A_TURN):
                try:
                    size = os.readv(self._device, [view])
                except BlockingIOError:
                    break
                except OSError as error:
                    if error.errno == errno.ENODEV:  # unmounted
                        return
                    if error.errno in (errno.ENOENT, errno.EINTR):  # the request was interrupted
                        continue
                    if error.errno == errno.ECONNABORTED:
                        return
                    raise
                await self._handle(view[:size], nursery)
            await trio.lowlevel.checkpoint()

    async def _handle(self, request: memoryview, nursery: trio.Nursery) -> None:
        opcode, unique, nodeid = fuse.OPCODE_UNIQUE_NODE.unpack_from(request)
        if opcode in _DATA:
            self._answer_data(opcode, unique, nodeid, request[fuse.IN_HEADER_BYTES :], nursery)
            return
        if unique & fuse.FUSE_UNIQUE_RESEND and self._was_done(opcode, unique):
            return
        if opcode in (fuse.FUSE_OPEN, fuse.FUSE_CREATE):
            self._opening[unique] = opcode, *fuse.PID.unpack_from(request, fuse.PID_OFFSET)
        elif opcode == fuse.FUSE_FLUSH and self._is_foreign(request):
            self._write(fuse.reply(unique))
            return
        elif opcode == fuse.FUSE_RELEASE:
            (self._releasing[unique],) = fuse.HANDLE.unpack_from(request, fuse.IN_HEADER_BYTES)
        elif opcode == fuse.FUSE_IOCTL:  # Python's open() asks isatty() at every open
            self._write(fuse.reply(unique, error=errno.ENOTTY))
            return
        elif opcode == fuse.FUSE_TMPFILE:
            self._write(fuse.reply(unique, error=errno.EOPNOTSUPP))
            return
        elif opcode == fuse.FUSE_INIT:
            request = memoryview(self._answer_init(unique, bytes(request)))
        if opcode != fuse.FUSE_INIT:
            fuse.PID.pack_into(request, fuse.PID_OFFSET, fuse.request_number(unique))
        await self._send(request)

    def _was_done(self, opcode: int, unique: int) -> bool:
        """A request comes again; whether the daemon before this one was through with it."""
        survivors = self._openlog.survivors
        first = unique & ~fuse.FUSE_UNIQUE_RESEND
        self.resent.add(fuse.request_number(unique))
        if opcode == fuse.FUSE_RELEASE and first in survivors.released:
            self._write(fuse.reply(unique))
            return True
        if opcode in (fuse.FUSE_OPEN, fuse.FUSE_CREATE):
            handle = survivors.handle_of(first)  # the kernel never heard of that open
            if handle is not None:
                self._opened.forget_handle(handle)
                self._openlog.released(first, handle)
        return False

    async def _send(self, request: memoryview) -> None:
        while True:
            try:
                self._socket.send(request)
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._socket)
            else:
                return

    def _answer_init(self, unique: int, request: bytes) -> bytes:
        offer = fuse.Init(request[fuse.IN_HEADER_BYTES :])
        self.passthrough = self._want_passthrough and offer.offers_passthrough
        answer = offer.answer(passthrough=self.passthrough, max_write=_MAX_WRITE_BYTES)
        self._write(fuse.reply(unique, answer))
        self._dropped.add(unique)
        self.initialised.set()
        return fuse.init_for_libfuse(request)

    async def _take_over(self) -> None:
        unique = (1 << 62) + 1  # the kernel counts up from zero in steps of two
        self._dropped.add(unique)
        self.passthrough = self._want_passthrough
        self._close_forgotten()
        await self._send(memoryview(fuse.made_up_init(unique)))
        resend = fuse.OUT_HEADER.pack(fuse.OUT_HEADER_BYTES, fuse.FUSE_NOTIFY_RESEND, 0)
        self._write(resend)
        self.initialised.set()

    def _close_forgotten(self) -> None:
        """Close backing ids that no open uses: a daemon died before it could close, or note, them.

        The kernel counts ids up, so those that were never noted follow the highest known one.
        """
        survivors = self._openlog.survivors
        used = {opened.backing_id for opened in survivors.opens}
        beyond = range(
            survivors.highest_backing_id + 1, survivors.highest_backing_id + 1 + _UNNOTED
        )
        for backing_id in {*survivors.closing, *beyond} - used:
            self.backing_close(backing_id)

    # --- bytes -------------------------------------------------------------------------------

    def _answer_data(
        self, opcode: int, unique: int, nodeid: int, body: memoryview, nursery: trio.Nursery
    ) -> None:
        try:
            now = self._opened.data_now(opcode, nodeid, body)
        except Exception as error:  # noqa: BLE001 - every failure becomes an errno, logged if odd
            self._fail(unique, error)
            return
        if now is None:
            nursery.start_soon(self._answer_later, opcode, unique, nodeid, bytes(body))
        else:
            self._write_parts(unique, now)

    async def _answer_later(self, opcode: int, unique: int, nodeid: int, body: bytes) -> None:
        try:
            answer = await self._opened.data(opcode, nodeid, memoryview(body))
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(unique, error)
        else:
            self._write_parts(unique, answer)

    def _fail(self, unique: int, error: Exception) -> None:
        code = errno_of(error)
        if code == errno.EIO:
            log.warning("request failed", error=str(error) or type(error).__name__)
        self._write(fuse.reply(unique, error=code))

    def _write_parts(self, unique: int, body: bytes | memoryview) -> None:
        header = fuse.OUT_HEADER.pack(fuse.OUT_HEADER_BYTES + len(body), 0, unique)
        self._quietly(lambda: os.writev(self._device, [header, body]))

    # --- pyfuse3 → kernel --------------------------------------------------------------------

    async def _pump_replies(self) -> None:
        view = memoryview(self._reply)
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            for _ in range(_REQUESTS_A_TURN):
                try:
                    size = self._socket.recv_into(view)
                except BlockingIOError:
                    break
                if size == 0:
                    return
                await self._pass_reply(view[:size])
            await trio.lowlevel.checkpoint()

    async def _pass_reply(self, reply: memoryview) -> None:
        _, error, unique = fuse.OUT_HEADER.unpack_from(reply)
        if unique == 0:
            # A notification may wait for a lock whose holder waits for us: not in this thread.
            await trio.to_thread.run_sync(self._write, bytes(reply), abandon_on_cancel=True)
        elif unique in self._dropped:
            self._dropped.discard(unique)
        elif unique in self._opening:
            opcode, pid = self._opening.pop(unique)
            if error == 0:
                self._write_opened(opcode, pid, unique, reply)
            else:
                self._write(reply)
        else:
            if unique in self._releasing:
                first = unique & ~fuse.FUSE_UNIQUE_RESEND
                self._released(first, self._releasing.pop(unique))
            self._write(reply)

    def _released(self, unique: int, handle: int) -> None:
        self._openlog.released(unique, handle)
        self._closers.released(handle, self._openlog.opens(handle))

    def _is_foreign(self, flush: memoryview) -> bool:
        (handle,) = fuse.HANDLE.unpack_from(flush, fuse.IN_HEADER_BYTES)
        (pid,) = fuse.PID.unpack_from(flush, fuse.PID_OFFSET)
        return self._closers.is_foreign(handle, pid)

    def _write_opened(self, opcode: int, pid: int, unique: int, reply: memoryview) -> None:
        at = fuse.OUT_HEADER_BYTES + (fuse.ENTRY_OUT_BYTES if opcode == fuse.FUSE_CREATE else 0)
        handle, flags, _ = fuse.OPEN_OUT.unpack_from(reply, at)
        backing = self._backing(handle)
        if backing is not None:
            flags = flags & ~(fuse.FOPEN_DIRECT_IO | fuse.FOPEN_KEEP_CACHE) | fuse.FOPEN_PASSTHROUGH
        fuse.OPEN_OUT.pack_into(reply, at, handle, flags, backing or 0)
        first = unique & ~fuse.FUSE_UNIQUE_RESEND
        self._openlog.opened(first, handle, backing or 0)
        self._closers.opened(handle, pid)
        if not self._write(reply):
            self._opened.forget_handle(handle)
            self._released(first, handle)

    def _backing(self, handle: int) -> int | None:
        """Return the backing id for a handle, registering the tier's file where it has none."""
        fd = self._opened.backing_fd(handle) if self.passthrough else None
        if fd is None:
            return None
        known = self._opened.backing_id(handle)
        if known is None:
            try:
                known = self.backing_open(fd)
            except OSError as error:
                log.warning("passthrough refused", reason=error.strerror)
            self._opened.set_backing_id(handle, known)
        return known

    def backing_open(self, fd: int) -> int:
        """Register a file with the kernel (FUSE_DEV_IOC_BACKING_OPEN); return its backing id."""
        request = bytearray(fuse.BACKING_MAP.pack(fd, 0, 0))
        return int(fcntl.ioctl(self._device, fuse.FUSE_DEV_IOC_BACKING_OPEN, request))

    def backing_close(self, backing_id: int) -> None:
        """Let the kernel forget a backing id; an id that stays keeps its file's memory for ever."""
        request = bytearray(struct.pack("<i", backing_id))
        with contextlib.suppress(OSError):  # ENOENT or ENOTCONN: the connection is gone with it
            fcntl.ioctl(self._device, fuse.FUSE_DEV_IOC_BACKING_CLOSE, request)

    def forget_backing(self, ino: int, backing_id: int) -> None:
        """Close the backing id of an inode that nobody has open any more."""
        self._openlog.closing(ino, backing_id)
        self.backing_close(backing_id)

    def _write(self, message: bytes | memoryview) -> bool:
        return self._quietly(lambda: os.write(self._device, message))

    def _quietly(self, write: Callable[[], int]) -> bool:
        """Write to the device; False where the kernel no longer waits for the answer."""
        try:
            write()
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENODEV, errno.ENOTCONN, errno.ECONNABORTED):
                return False
            raise
        return True


_DATA = frozenset(
    {
        fuse.FUSE_READ,
        fuse.FUSE_WRITE,
        fuse.FUSE_FALLOCATE,
        fuse.FUSE_LSEEK,
        fuse.FUSE_COPY_FILE_RANGE,
    }
)
