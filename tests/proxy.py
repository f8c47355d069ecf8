"""A TCP proxy between a client and an S3 server, to make a network misbehave on purpose.

It passes bytes on, until told to cut connections, refuse them, answer HTTP errors in the server's
place, delay, or throttle. One thread a direction; nothing here waits for a time on its own.
"""

import contextlib
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_BUFFER_BYTES = 64 << 10
_LOOK_S = 0.05


class Proxy:
    """Stands in for the server at `host:port`, on an address of its own."""

    def __init__(self, host: str, port: int, address: str) -> None:
        self._server = (host, port)
        self._listener = socket.create_server((address, 0))
        self.endpoint = f"http://{address}:{self._listener.getsockname()[1]}"
        self.mode = "pass"
        """`pass`, `cut` (connections are reset at once), or a status such as `503`."""
        self.delay_s = 0.0
        """How long each piece of data waits before it is passed on."""
        self.bytes_per_s: float | None = None
        self.received_bytes = 0
        """What clients sent through, all together."""
        self.answered = 0
        """Requests that were answered in the server's place."""
        self._live: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    # --- what a test asks for ----------------------------------------------------------------

    def cut(self) -> None:
        """Reset all connections, now and until `restore`."""
        self.mode = "cut"
        self._reset_all()

    def answer(self, status: int) -> None:
        """Answer every request with this status, until `restore`."""
        self.mode = str(status)
        self._reset_all()

    def restore(self) -> None:
        """Be a good network again."""
        self.mode = "pass"
        self.delay_s, self.bytes_per_s = 0.0, None

    def close(self) -> None:
        """End all threads and connections."""
        self._closed.set()
        self._listener.close()
        self._reset_all()
        for thread in self._threads:
            thread.join(10)

    # --- inside ------------------------------------------------------------------------------

    def _reset_all(self) -> None:
        with self._lock:
            live = list(self._live)
        for sock in live:
            _reset(sock)

    def _accept(self) -> None:
        self._listener.settimeout(_LOOK_S)
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        with self._lock:
            self._live.add(client)
        try:
            if self.mode == "cut":
                _reset(client)
            elif self.mode == "pass":
                self._pass(client)
            else:
                self._refuse(client)
        except (OSError, ValueError):
            pass  # a connection that ended: what this proxy is for
        finally:
            with self._lock:
                self._live.discard(client)
            client.close()

    def _refuse(self, client: socket.socket) -> None:
        """Take whole requests off the connection and answer each."""
        buffer = b""
        while not self._closed.is_set() and (data := client.recv(_BUFFER_BYTES)):
            buffer += data
            while b"\r\n\r\n" in buffer:
                head, _, rest = buffer.partition(b"\r\n\r\n")
                want = _content_length(head)
                if b"100-continue" not in head.lower():
                    while len(rest) < want and (data := client.recv(_BUFFER_BYTES)):
                        rest += data
                    rest = rest[want:]
                self.answered += 1
                client.sendall(_error(self.mode, head.startswith(b"HEAD ")))
                buffer = rest

    def _pass(self, client: socket.socket) -> None:
        with socket.create_connection(self._server) as server:
            with self._lock:
                self._live.add(server)
            try:
                self._shovel(client, server)
            finally:
                with self._lock:
                    self._live.discard(server)

    def _shovel(self, client: socket.socket, server: socket.socket) -> None:
        while not self._closed.is_set():
            ready, _, _ = select.select([client, server], [], [], _LOOK_S)
            for source in ready:
                data = source.recv(_BUFFER_BYTES)
                if not data:
                    return
                if self.delay_s:
                    self._closed.wait(self.delay_s)
                if self.bytes_per_s is not None:
                    self._closed.wait(len(data) / self.bytes_per_s)
                (server if source is client else client).sendall(data)
                if source is client:
                    self.received_bytes += len(data)


def _reset(sock: socket.socket) -> None:
    """End a connection the hard way; whoever reads from it wakes up."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        sock.shutdown(socket.SHUT_RDWR)


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    return 0


def _error(status: str, bare: bool) -> bytes:
    code = {"503": "SlowDown", "500": "InternalError"}.get(status, "Error")
    body = b"" if bare else f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
    head = f"HTTP/1.1 {status} {code}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Content-Type: application/xml\r\n\r\n".encode() + body


@contextmanager
def proxied(endpoint: str, address: str = "127.0.0.1") -> Iterator[Proxy]:
    """Run a proxy at `address` before the server at `endpoint` (`http://HOST:PORT`)."""
    host, _, port = endpoint.removeprefix("http://").partition(":")
    proxy = Proxy(host, int(port), address)
    try:
        yield proxy
    finally:
        proxy.close()
