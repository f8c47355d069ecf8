"""How two nodes exchange messages and content: one interface, TCP as its first form (`tcp.py`).

An RDMA form (Mooncake's transfer engine, UCX) would need: the tier's files mapped and registered
as memory regions once, not for each transfer; the mirror to hand out remote keys for the parts it
makes room for, so that `send_file` becomes one-sided writes without its processor; a completion
queue in place of sockets that block; and a last message after the writes, since one-sided writes
tell the receiver nothing. The handshake, and the small messages, stay on TCP.
"""

import ipaddress
from typing import Protocol

from lmstorfs.errors import UsageError

MESSAGE_MAX_BYTES = 16 << 20


class Connection(Protocol):
    """One authenticated connection; blocking, used by one thread at a time but for `close`."""

    peer: str
    """HOST:PORT of the other end."""
    idle_s: float
    """How long `receive` waits for the next message."""

    def send(self, message: bytes) -> None:
        """Send one message, 1 to `MESSAGE_MAX_BYTES` bytes. Raises `PeerError`."""
        ...

    def receive(self) -> bytes:
        """Return the next message. Raises `PeerError`."""
        ...

    def send_file(self, fd: int, offset: int, count: int) -> None:
        """Send `count` bytes of a file as they are. A shorter file ends the connection."""
        ...

    def receive_file(self, fd: int, offset: int, count: int) -> None:
        """Take `count` bytes straight into a file, which grows as needed."""
        ...

    def has_news(self) -> bool:
        """Whether `receive` would return, or raise, at once."""
        ...

    def close(self) -> None:
        """End the connection; wakes a thread that waits on it."""
        ...


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT` or `[IPV6]:PORT`. Raises `UsageError`."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"'{text}' is not HOST:PORT; write for example node2:7070")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
