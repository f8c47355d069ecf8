"""Where a mirror is reached: takes connections, and lets in only who proves the secret.

Whoever has not is given little: a thread, a few hundred bytes and some seconds, and at most
`STRANGERS_MAX` at one time.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable

import structlog

from lmstorfs.checkpoint.mirror import handshake
from lmstorfs.checkpoint.mirror.tcp import TcpConnection, enlarge, prepare, receiver
from lmstorfs.checkpoint.mirror.transport import is_loopback
from lmstorfs.errors import PeerError, SetupError
from lmstorfs.host import yield_to_training

log = structlog.get_logger()

STRANGERS_MAX = 64
PEERS_MAX = 64
HANDSHAKE_S = 5.0
_JOIN_S = 5.0
_LOG_EVERY_S = 1.0


class Listener:
    """One listening address."""

    def __init__(
        self, host: str, port: int, secret: bytes | None, *, handshake_s: float = HANDSHAKE_S
    ) -> None:
        """Listen; port 0 takes a free one. Raises `SetupError`."""
        if secret is None and not is_loopback(host):
            raise SetupError(f"--listen {host}:{port} needs --secret-file FILE")
        self._secret = secret or b""
        self._handshake_s = handshake_s
        self._lock = threading.Lock()
        self._closed = False
        self._strangers: set[socket.socket] = set()
        self._peers: set[TcpConnection] = set()
        self._threads: set[threading.Thread] = set()
        self._refused = 0
        self._said_at = 0.0
        self._socket = _listening(host, port)

    @property
    def address(self) -> str:
        """HOST:PORT as it was bound."""
        host, port, *_ = self._socket.getsockname()
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def serve(self, handle: Callable[[TcpConnection], None]) -> None:
        """Take connections until `close`, each `handle`d in a thread of its own."""
        while True:
            try:
                sock, where = self._socket.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.1)  # out of descriptors: the backlog waits
                continue
            peer = f"{where[0]}:{where[1]}"
            with self._lock:
                full = len(self._strangers) >= STRANGERS_MAX or len(self._peers) >= PEERS_MAX
                if not full and not self._closed:
                    self._strangers.add(sock)
            if full or self._closed:
                sock.close()
                self._say(peer, "too many connections")
                continue
            thread = threading.Thread(target=self._greet, args=(sock, peer, handle), daemon=True)
            try:
                with self._lock:  # `close` joins only what was started
                    thread.start()
                    self._threads.add(thread)
            except RuntimeError as error:  # the machine has no thread left: the next may have luck
                with self._lock:
                    self._strangers.discard(sock)
                sock.close()
                self._say(peer, str(error))

    def _greet(
        self, sock: socket.socket, peer: str, handle: Callable[[TcpConnection], None]
    ) -> None:
        connection = None
        full = False
        try:
            connection = self._authenticate(sock, peer)
        except (PeerError, OSError) as error:
            sock.close()
            self._say(peer, str(error))
        finally:
            with self._lock:
                self._strangers.discard(sock)
                if connection is not None and not self._closed:
                    full = len(self._peers) >= PEERS_MAX  # others came in since it was accepted
                    if not full:
                        self._peers.add(connection)
        try:
            if full:
                self._say(peer, "too many connections")
            elif connection is not None and not self._closed:
                yield_to_training()  # the peer that keeps replicas may be training, too
                handle(connection)
        except Exception as error:  # the thread's end: a bug is logged, and harms no other peer
            log.error("a connection failed", peer=peer, exc_info=error)
        finally:
            if connection is not None:
                connection.close()
            with self._lock:
                if connection is not None:
                    self._peers.discard(connection)
                self._threads.discard(threading.current_thread())

    def _authenticate(self, sock: socket.socket, peer: str) -> TcpConnection:
        prepare(sock)
        receive = receiver(sock, self._handshake_s)
        return TcpConnection(
            sock, handshake.prove_as_mirror(self._secret, sock.sendall, receive), peer
        )

    def _say(self, peer: str, reason: str) -> None:
        """Log at most once a second, however many knock."""
        with self._lock:
            self._refused += 1
            if time.monotonic() - self._said_at < _LOG_EVERY_S:
                return
            count, self._refused, self._said_at = self._refused, 0, time.monotonic()
        log.warning("refused a connection", peer=peer, reason=reason, count=count)

    def close(self) -> None:
        """End `serve`, all connections and their threads."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            strangers, peers = list(self._strangers), list(self._peers)
            threads = list(self._threads)
        _shut(self._socket)
        for sock in strangers:
            _shut(sock)
        for connection in peers:
            connection.close()
        give_up = time.monotonic() + _JOIN_S
        for thread in threads:
            thread.join(max(0.0, give_up - time.monotonic()))


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # not connected any more
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise SetupError(f"--listen {host}:{port}: {error.strerror or error}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        enlarge(sock)
        sock.bind(address)
        sock.listen(128)
    except OSError as error:
        sock.close()
        raise SetupError(
            f"--listen {host}:{port} cannot be bound: {error.strerror}; name a free port of an "
            "address of this machine"
        ) from error
    return sock
