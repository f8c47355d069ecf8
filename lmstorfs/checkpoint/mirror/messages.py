"""What an origin (a node that writes) and its mirror say: msgpack, one struct a message.

A connection begins with `Hello`, which names the origin and what the connection is for; the mirror
answers `Welcome` or `Refused`. Then the origin asks and the mirror answers, in order, but for
`Data`, which has no answer. Content follows its message as it is (`Connection.send_file`).

Every field that the peer could lie about (sizes, counts, names) is checked where it is used.
"""

from typing import Any, TypeVar

import msgspec

from lmstorfs.errors import PeerProtocolError


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Who asks, and what for."""

    origin: str
    """32 hex digits: the origin's own random name, or the one to recover; empty: not known."""
    epoch: int
    """How often the origin was recovered: an older one is fenced."""
    purpose: str
    """`replicate` (write replicas), `read` (fetch one's own), or `recover` (take over)."""
    mountpoint: str = ""
    store: str = ""
    label: str = ""
    """For people: the origin's host name."""
    keep: int = 2
    """Newest checkpoints whose replicas stay after they are stored."""


class Held(msgspec.Struct, frozen=True, array_like=True):
    """One replica that the mirror holds whole."""

    ino: int
    version: int


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The mirror takes the connection."""

    origin: str
    epoch: int
    sequence: int
    """Number of the last batch of `Rows` that it has of this origin; 0: none."""
    catalog_bytes: int = 0
    """Answering `recover`: so long is the catalog that follows."""
    held: list[Held] = []


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The mirror does not do it; `reason` is one line for a person."""

    reason: str
    code: str = "refused"
    """`refused`, `fenced` (a successor took over), `full` (no room), `unknown` (no such replica)
    or `differs` (the content was not what was offered)."""


class Rows(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rows of the catalog that changed. Answered by `Noted`."""

    sequence: int
    first: bool = False
    """What came before is void: all rows come again, up to the one that is `last`."""
    last: bool = True
    rows: list[tuple[str, int, list[list[Any]]]]
    """Table, key, and the rows that it has under that key now (none: deleted)."""


class Noted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The rows are in; these replicas were not needed any more and are gone."""

    dropped: list[Held] = []


class Data(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`count` bytes of a file that is being written, or of an offered version, follow."""

    ino: int
    offset: int
    count: int


class Offer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A version is whole at the origin. Answered by `Wanted`."""

    ino: int
    version: int
    size: int
    digest: str
    blocks: bytes
    """16 bytes of xxh3-128 for each 8 MiB."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The blocks (by number) that the mirror lacks, or has of another content."""

    blocks: list[int]


class Commit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All blocks of the offered version were sent. Answered by `Committed` or `Refused`."""

    ino: int
    version: int


class Committed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The mirror holds the version whole, every block's digest is right."""

    ino: int
    version: int


class Fetch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answered by `Replica` and the content, or `Refused`."""

    ino: int
    version: int


class Replica(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`size` bytes follow."""

    size: int
    digest: str


class Corrupt(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What was fetched has another digest: the mirror drops it. Answered by `Noted`."""

    ino: int
    version: int


Request = Hello | Rows | Data | Offer | Commit | Fetch | Corrupt
Answer = Welcome | Refused | Noted | Wanted | Committed | Replica

A = TypeVar("A", Welcome, Noted, Wanted, Committed, Replica)
_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_answers = msgspec.msgpack.Decoder(Answer)


def encode(message: Request | Answer) -> bytes:
    """Return the message's bytes."""
    return _encoder.encode(message)


def decode_request(data: bytes) -> Request:
    """Return what an origin said; raises `PeerProtocolError`."""
    try:
        return _requests.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PeerProtocolError(f"no message: {error}") from error


def decode_answer(data: bytes) -> Answer:
    """Return what a mirror said; raises `PeerProtocolError`."""
    try:
        return _answers.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PeerProtocolError(f"no message: {error}") from error
