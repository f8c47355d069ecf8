"""The channel between kernel and pyfuse3, with a socket in the kernel's place."""

import errno
import os
import socket
import struct
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from lmstorfs.fuse import protocol as fuse
from lmstorfs.fuse.channel import Channel
from lmstorfs.fuse.openlog import OpenLog

ANSWER_S = 10.0


class Opened:
    """Files as the channel sees them: none in passthrough; data as the test says."""

    def __init__(self) -> None:
        self.now: bytes | Exception | None = b"now"
        self.later: bytes | Exception = b"later"

    def backing_fd(self, handle: int) -> int | None:
        return None

    def backing_id(self, handle: int) -> int | None:
        return None

    def set_backing_id(self, handle: int, backing_id: int | None) -> None:
        raise AssertionError("nothing is in passthrough")

    def forget_handle(self, handle: int) -> None:
        """Nothing is held."""

    def data_now(self, opcode: int, nodeid: int, body: memoryview) -> bytes | None:
        if isinstance(self.now, Exception):
            raise self.now
        return self.now

    async def data(self, opcode: int, nodeid: int, body: memoryview) -> bytes:
        await trio.lowlevel.checkpoint()
        if isinstance(self.later, Exception):
            raise self.later
        return self.later


class Ends:
    """The kernel's end and libfuse's end."""

    def __init__(self, kernel: socket.socket, libfuse: socket.socket, opened: Opened) -> None:
        self.kernel = kernel
        self.libfuse = libfuse
        self.opened = opened

    def ask(self, opcode: int, unique: int, body: bytes = b"") -> None:
        header = fuse.IN_HEADER.pack(40 + len(body), opcode, unique, 1, 0, 0, 0, 0, 0)
        self.kernel.send(header + body)

    async def kernel_gets(self) -> tuple[int, int, bytes]:
        """Return (errno, unique, body) of the next reply."""
        data = await received(self.kernel)
        length, error, unique = fuse.OUT_HEADER.unpack_from(data)
        assert length == len(data)
        return -error, unique, data[16:]

    async def libfuse_gets(self) -> tuple[int, int, bytes]:
        """Return (opcode, unique, body) of the next request."""
        data = await received(self.libfuse)
        length, opcode, unique = struct.unpack_from("<IIQ", data)
        assert length == len(data)
        return opcode, unique, data[40:]


async def received(sock: socket.socket) -> bytes:
    with trio.fail_after(ANSWER_S):
        await trio.lowlevel.wait_readable(sock)
    return sock.recv(1 << 21)


@asynccontextmanager
async def running(*, adopted: bool = False) -> AsyncIterator[Ends]:
    kernel, device = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    opened = Opened()
    folder = tempfile.TemporaryDirectory()
    openlog = OpenLog(Path(folder.name) / "opens", adopted=False)
    channel = Channel(device.fileno(), opened, openlog, passthrough=False)
    far = int(channel.mountpoint.rpartition("/")[2])
    libfuse = socket.socket(fileno=os.dup(far))
    async with trio.open_nursery() as nursery:

        async def run() -> None:
            await channel.run(adopted=adopted)

        nursery.start_soon(run)
        yield Ends(kernel, libfuse, opened)
        nursery.cancel_scope.cancel()
    channel.close()
    openlog.close()
    folder.cleanup()
    os.close(far)
    for sock in (kernel, device, libfuse):
        sock.close()


def in_trio(test: Callable[[], Awaitable[None]]) -> Any:
    def wrapper() -> None:
        trio.run(test)

    wrapper.__name__ = test.__name__
    return wrapper


@in_trio
async def test_init_is_answered_here_and_libfuses_answer_is_dropped() -> None:
    async with running() as ends:
        ends.ask(fuse.FUSE_INIT, 2, struct.pack("<IIIII", 7, 45, 1 << 20, 0xFFFFFFFF, 0))
        code, unique, body = await ends.kernel_gets()
        assert (code, unique, len(body)) == (0, 2, 64)
        opcode, unique, body = await ends.libfuse_gets()
        assert (opcode, struct.unpack_from("<II", body)) == (fuse.FUSE_INIT, (7, 13))
        ends.libfuse.send(fuse.reply(unique, b"libfuse's own"))
        ends.libfuse.send(fuse.reply(4, b"another"))
        assert await ends.kernel_gets() == (0, 4, b"another")


@in_trio
async def test_other_requests_and_replies_pass_untouched() -> None:
    async with running() as ends:
        ends.ask(fuse.FUSE_LOOKUP, 6, b"name\0")
        assert await ends.libfuse_gets() == (fuse.FUSE_LOOKUP, 6, b"name\0")
        ends.libfuse.send(fuse.reply(6, error=errno.ENOENT))
        assert await ends.kernel_gets() == (errno.ENOENT, 6, b"")


@in_trio
async def test_bytes_are_answered_without_libfuse() -> None:
    async with running() as ends:
        ends.ask(fuse.FUSE_READ, 8, bytes(40))
        assert await ends.kernel_gets() == (0, 8, b"now")
        ends.opened.now = None
        ends.ask(fuse.FUSE_READ, 10, bytes(40))
        assert await ends.kernel_gets() == (0, 10, b"later")
        ends.opened.later = OSError(errno.ENOSPC, "full")
        ends.ask(fuse.FUSE_WRITE, 12, bytes(50))
        assert await ends.kernel_gets() == (errno.ENOSPC, 12, b"")
        ends.opened.now = ValueError("a bug")
        ends.ask(fuse.FUSE_READ, 14, bytes(40))
        assert await ends.kernel_gets() == (errno.EIO, 14, b"")


@in_trio
async def test_an_ioctl_is_refused_at_once() -> None:
    async with running() as ends:
        ends.ask(fuse.FUSE_IOCTL, 16, bytes(32))
        assert await ends.kernel_gets() == (errno.ENOTTY, 16, b"")


@in_trio
async def test_a_later_daemon_has_unanswered_requests_sent_again() -> None:
    async with running(adopted=True) as ends:
        opcode, made_up, _ = await ends.libfuse_gets()
        assert opcode == fuse.FUSE_INIT
        data = await received(ends.kernel)
        assert fuse.OUT_HEADER.unpack(data) == (16, fuse.FUSE_NOTIFY_RESEND, 0)
        ends.libfuse.send(fuse.reply(made_up, bytes(64)))
        ends.ask(fuse.FUSE_LOOKUP, 18 | fuse.FUSE_UNIQUE_RESEND, b"name\0")
        _, unique, _ = await ends.libfuse_gets()
        ends.libfuse.send(fuse.reply(unique))
        assert await ends.kernel_gets() == (0, 18 | fuse.FUSE_UNIQUE_RESEND, b"")
