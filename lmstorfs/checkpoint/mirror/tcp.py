"""Connections over TCP: signed messages, and content that the kernel moves.

A message is its length (u32), a keyed blake2b of 16 bytes over its number and itself, and itself.
Content follows unsigned, by sendfile(2) and splice(2) into the receiver's file: its digest is in a
message. Timeouts are the kernel's (SO_RCVTIMEO), so that a thread blocks without the GIL.
"""

import contextlib
import fcntl
import hashlib
import hmac
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

from lmstorfs.checkpoint.mirror import handshake
from lmstorfs.checkpoint.mirror.transport import MESSAGE_MAX_BYTES
from lmstorfs.errors import PeerError, PeerProtocolError, PeerTimeoutError

STALL_S = 20.0
IDLE_S = 30.0
_HEADER = struct.Struct("<I16s")
_BUFFER_BYTES = 4 << 20
_SEND_BYTES = 8 << 20
_PIPE_BYTES = 1 << 20
_TIMEVAL = struct.Struct("ll")
_TCP_USER_TIMEOUT = 18  # linux/tcp.h
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33  # asm-generic/socket.h


class TcpConnection:
    """One authenticated connection."""

    def __init__(self, sock: socket.socket, keys: tuple[bytes, bytes], peer: str) -> None:
        """Take a socket whose ends have proved the secret; `keys` for sending and receiving."""
        self._sock = sock
        self._send_key, self._receive_key = keys
        self._sent = self._received = 0
        self._pipe: tuple[int, int] | None = None
        self._lock = threading.Lock()
        self._busy = 0  # threads that are inside a call
        self._closed = False
        self.peer = peer
        self.idle_s = IDLE_S
        set_timeout(sock, STALL_S)

    def send(self, message: bytes) -> None:
        """Send one message."""
        if not 0 < len(message) <= MESSAGE_MAX_BYTES:
            raise PeerProtocolError(f"a message of {len(message)} bytes")
        signature = _sign(self._send_key, self._sent, message)
        self._sent += 1
        with self._using():
            self._sock.sendall(_HEADER.pack(len(message), signature) + message)

    def receive(self) -> bytes:
        """Return the next message."""
        with self._using():
            set_timeout(self._sock, self.idle_s)
            head = exactly(self._sock, _HEADER.size)
            set_timeout(self._sock, STALL_S)
            size, signature = _HEADER.unpack(head)
            if not 0 < size <= MESSAGE_MAX_BYTES:
                raise PeerProtocolError(f"a message of {size} bytes")
            message = exactly(self._sock, size)
            if not hmac.compare_digest(
                signature, _sign(self._receive_key, self._received, message)
            ):
                raise PeerProtocolError("a message with a wrong signature")
            self._received += 1
            return message

    def send_file(self, fd: int, offset: int, count: int) -> None:
        """Send `count` bytes of a file."""
        end = offset + count
        with self._using():
            while offset < end:
                sent = os.sendfile(self._sock.fileno(), fd, offset, min(end - offset, _SEND_BYTES))
                if sent == 0:  # truncated meanwhile: what was promised cannot come any more
                    raise EOFError("the file became shorter while it was sent")
                offset += sent

    def receive_file(self, fd: int, offset: int, count: int) -> None:
        """Take `count` bytes into a file."""
        end = offset + count
        with self._using():
            if os.fstat(fd).st_size < end:
                os.ftruncate(fd, end)  # first: tmpfs gives huge pages within the size only
            while offset < end:
                offset += self._splice(fd, offset, min(end - offset, _PIPE_BYTES))

    def _splice(self, fd: int, offset: int, most: int) -> int:
        """Move what has come from the socket into the file; return how much.

        Through a pipe of pages, not of bytes: one copy in all, where `recv_into` a mapping of
        fresh memory has the kernel clear the pages first, and is three times slower.
        """
        if self._pipe is None:
            self._pipe = os.pipe()
            with contextlib.suppress(PermissionError):  # the user has many pipes: a small one does
                fcntl.fcntl(self._pipe[1], fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        took = os.splice(self._sock.fileno(), self._pipe[1], most)
        if took == 0:
            raise PeerError("the connection ended in the middle of content")
        done = 0
        while done < took:
            done += os.splice(self._pipe[0], fd, took - done, offset_dst=offset + done)
        return took

    def has_news(self) -> bool:
        """Whether something can be read, or the other end has gone."""
        with self._using():
            watch = select.poll()
            watch.register(self._sock, select.POLLIN | select.POLLRDHUP)
            return bool(watch.poll(0))

    def close(self) -> None:
        """End the connection.

        The descriptors are closed once no thread uses them any more: another file could get their
        numbers in the middle of a transfer.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                with contextlib.suppress(OSError):  # the other end was first
                    self._sock.shutdown(socket.SHUT_RDWR)
            if not self._busy:
                self._release()

    def _release(self) -> None:
        self._sock.close()
        pipe, self._pipe = self._pipe, None
        for end in pipe or ():
            os.close(end)

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        """Turn what goes wrong into `PeerError`s; the connection is of no use afterwards."""
        with self._lock:
            if self._closed:
                raise PeerError("the connection was closed")
            self._busy += 1
        try:
            yield
        except BlockingIOError as error:
            self.close()
            raise PeerTimeoutError("the peer said nothing for too long") from error
        except OSError as error:
            self.close()
            raise PeerError(f"the connection broke: {error}") from error
        except (PeerError, EOFError):
            self.close()
            raise
        finally:
            with self._lock:
                self._busy -= 1
                if self._closed and not self._busy:
                    self._release()


def _sign(key: bytes, number: int, message: bytes) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little") + message, key=key, digest_size=16).digest()


def exactly(sock: socket.socket, count: int) -> bytes:
    """Return exactly `count` bytes. Raises `PeerError` at the connection's end."""
    parts = bytearray()
    while len(parts) < count:
        part = sock.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise PeerError("the connection ended")
        parts += part
    return bytes(parts)


def receiver(sock: socket.socket, timeout_s: float) -> Callable[[int], bytes]:
    """Return what receives exactly so many bytes, all calls within `timeout_s` together.

    However slowly the bytes drip. It raises `PeerTimeoutError`, `PeerError` at the end.
    """
    give_up = time.monotonic() + timeout_s

    def receive(count: int) -> bytes:
        data = b""
        while len(data) < count:
            left = give_up - time.monotonic()
            if left <= 0:
                raise PeerTimeoutError("no handshake came in time")
            set_timeout(sock, max(left, 0.001))
            try:
                part = sock.recv(count - len(data))
            except BlockingIOError as error:
                raise PeerTimeoutError("no handshake came in time") from error
            except ConnectionError as error:
                raise PeerError(f"the connection broke: {error.strerror}") from error
            if not part:
                raise PeerError("it went away in the middle of the handshake")
            data += part
        return data

    return receive


def set_timeout(sock: socket.socket, seconds: float) -> None:
    """Let reads and writes of a blocking socket fail with EAGAIN after so long."""
    value = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def prepare(sock: socket.socket) -> None:
    """Set what every socket of a mirror has."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, int(STALL_S * 1000))


def enlarge(sock: socket.socket) -> None:
    """Give a socket buffers for a fast link; before it connects or listens.

    Without the privilege the kernel's own tuning is better than a size that it would cap.
    """
    for option in (_SO_SNDBUFFORCE, _SO_RCVBUFFORCE):
        with contextlib.suppress(PermissionError):
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)


def connect(host: str, port: int, secret: bytes, timeout_s: float = 5.0) -> TcpConnection:
    """Connect and prove the secret. Raises `PeerError`."""
    peer = f"{host}:{port}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise PeerError(f"{peer}: {error.strerror or error}") from error
    try:
        enlarge(sock)
        sock.settimeout(timeout_s)
        sock.connect(address)
        prepare(sock)
        sock.settimeout(None)
        receive = receiver(sock, timeout_s)
        keys = handshake.prove_as_origin(secret, sock.sendall, receive)
        return TcpConnection(sock, keys, peer)
    except PeerTimeoutError as error:
        sock.close()
        raise PeerTimeoutError(f"{peer} does not answer the handshake") from error
    except OSError as error:
        sock.close()
        raise PeerError(f"{peer}: {error.strerror or error}") from error
    except BaseException:
        sock.close()
        raise
