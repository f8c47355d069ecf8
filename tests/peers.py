"""What the tests of the mirror's transport share: a listener with a handler, and an echo."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from lmstorfs.checkpoint.mirror.listener import HANDSHAKE_S, Listener
from lmstorfs.checkpoint.mirror.tcp import TcpConnection
from lmstorfs.checkpoint.mirror.transport import parse_address
from lmstorfs.errors import PeerError

SECRET = b"sixteen bytes and more"


@contextlib.contextmanager
def listening(
    handle: Callable[[TcpConnection], None],
    secret: bytes | None = SECRET,
    handshake_s: float = HANDSHAKE_S,
) -> Iterator[tuple[str, int]]:
    listener = Listener("127.0.0.1", 0, secret, handshake_s=handshake_s)
    thread = threading.Thread(target=listener.serve, args=(handle,))
    thread.start()
    try:
        yield parse_address(listener.address)
    finally:
        listener.close()
        thread.join(10)
        assert not thread.is_alive()


def echo(connection: TcpConnection) -> None:
    with contextlib.suppress(PeerError):
        while True:
            connection.send(connection.receive())
