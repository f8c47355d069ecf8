"""The origin's end of one connection: what is asked, and what the answers mean. Blocking."""

import os
from pathlib import Path

import msgspec

from lmstorfs.checkpoint.mirror import messages as m
from lmstorfs.checkpoint.mirror.handshake import read_secret
from lmstorfs.checkpoint.mirror.tcp import connect
from lmstorfs.checkpoint.mirror.transport import Connection, parse_address
from lmstorfs.digest import BLOCK_BYTES, FollowingDigest
from lmstorfs.errors import (
    CorruptCopyError,
    FencedError,
    PeerError,
    PeerProtocolError,
    PeerRefusedError,
)
from lmstorfs.host import yield_to_training

SLICE_BLOCKS = 4  # sent in one go: what an urgent version may have to wait for
SLICE_BYTES = SLICE_BLOCKS * BLOCK_BYTES
CONNECT_TIMEOUT_S = 5.0


class PeerFencedError(PeerRefusedError, FencedError):
    """The mirror knows of a successor: what this node writes counts no more."""


class PeerFullError(PeerError):
    """The mirror has no room."""


class UnknownReplicaError(PeerError):
    """The mirror does not hold that version."""


class DiffersError(PeerError):
    """The content that arrived is not what was offered: it changed on its way."""


_ERRORS = {
    "fenced": PeerFencedError,
    "full": PeerFullError,
    "unknown": UnknownReplicaError,
    "differs": DiffersError,
}


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who this node is to a mirror."""

    origin: str
    epoch: int
    mountpoint: str
    store: str
    label: str
    keep: int


class PeerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a mirror listens, and what proves that it and we belong together."""

    address: str
    secret_file: str | None = None

    def connect(self) -> Connection:
        """Return a connection whose both ends have proved the secret."""
        host, port = parse_address(self.address)
        secret = b"" if self.secret_file is None else read_secret(Path(self.secret_file))
        return connect(host, port, secret, CONNECT_TIMEOUT_S)


class Offered(msgspec.Struct, frozen=True, kw_only=True):
    """A version to be mirrored, with its file open."""

    ino: int
    version: int
    size: int
    digest: str
    blocks: bytes
    fd: int


class Peer:
    """One connection to a mirror."""

    def __init__(self, connection: Connection, welcome: m.Welcome) -> None:
        self._connection = connection
        self.welcome = welcome

    @classmethod
    def open(cls, where: PeerAddress, who: Identity, purpose: str) -> "Peer":
        """Connect and say hello. Raises `PeerError`, `PeerFencedError` among them."""
        connection = where.connect()
        try:
            hello = m.Hello(purpose=purpose, **msgspec.structs.asdict(who))
            connection.send(m.encode(hello))
            answer = _answer(connection, m.Welcome)
        except BaseException:
            connection.close()
            raise
        return cls(connection, answer)

    def close(self) -> None:
        """End the connection; from any thread, also while another one waits on it."""
        self._connection.close()

    def check(self) -> None:
        """Raise `PeerError` where the mirror is gone; to be asked while nothing is under way."""
        if self._connection.has_news():
            answer = _received(self._connection)  # raises at the connection's end
            raise PeerProtocolError(f"{type(answer).__name__} that nobody asked for")

    # --- replicating -------------------------------------------------------------------------

    def rows(self, batch: m.Rows) -> list[m.Held]:
        """Bring changed rows; return the replicas that the mirror dropped for them."""
        self._connection.send(m.encode(batch))
        return _answer(self._connection, m.Noted).dropped

    def data(self, ino: int, fd: int, offset: int, count: int) -> None:
        """Bring a range of a file, at most `SLICE_BYTES`."""
        yield_to_training()
        self._connection.send(m.encode(m.Data(ino=ino, offset=offset, count=count)))
        self._connection.send_file(fd, offset, count)

    def offer(self, versions: list[Offered]) -> list[list[int]]:
        """Offer versions; return for each the blocks that the mirror lacks.

        Raises `PeerFullError` where one of them has no room.
        """
        for version in versions:
            offer = m.Offer(
                ino=version.ino,
                version=version.version,
                size=version.size,
                digest=version.digest,
                blocks=version.blocks,
            )
            self._connection.send(m.encode(offer))
        answers = [_received(self._connection) for _ in versions]
        return [_expect(answer, m.Wanted).blocks for answer in answers]

    def blocks(self, version: Offered, numbers: list[int]) -> None:
        """Bring blocks of an offered version; those that follow each other in one go."""
        for first, count in _runs(numbers):
            start = first * BLOCK_BYTES
            end = min(version.size, start + count * BLOCK_BYTES)
            self.data(version.ino, version.fd, start, end - start)

    def commit(self, versions: list[Offered]) -> list[PeerError | None]:
        """All blocks are there; return for each version why it is not mirrored, None if it is."""
        for version in versions:
            self._connection.send(m.encode(m.Commit(ino=version.ino, version=version.version)))
        return [_failure(_received(self._connection)) for _ in versions]

    # --- reading -----------------------------------------------------------------------------

    def fetch(self, ino: int, version: int, fd: int) -> m.Replica:
        """Fetch a replica into the file `fd`; return its size and digest, which was verified.

        Raises `UnknownReplicaError`, or `CorruptCopyError` (and the mirror drops it).
        """
        self._connection.send(m.encode(m.Fetch(ino=ino, version=version)))
        replica = _answer(self._connection, m.Replica)
        with FollowingDigest(fd) as following:
            for start in range(0, replica.size, SLICE_BYTES):
                count = min(SLICE_BYTES, replica.size - start)
                self._connection.receive_file(fd, start, count)
                following.came(start, count)
            os.ftruncate(fd, replica.size)
            found = following.result(replica.size)
        if found != replica.digest:
            self._connection.send(m.encode(m.Corrupt(ino=ino, version=version)))
            _answer(self._connection, m.Noted)
            raise CorruptCopyError("the mirror's copy is corrupt")
        return replica

    def catalog(self, fd: int) -> None:
        """Take the catalog that follows the welcome to a recovery into the file `fd`."""
        size = self.welcome.catalog_bytes
        for start in range(0, size, SLICE_BYTES):
            self._connection.receive_file(fd, start, min(SLICE_BYTES, size - start))


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Return (first, how many) of the numbers that follow each other, `SLICE_BLOCKS` at most."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and sum(runs[-1]) == number and runs[-1][1] < SLICE_BLOCKS:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return runs


def _received(connection: Connection) -> m.Answer:
    return m.decode_answer(connection.receive())


def _failure(answer: m.Answer) -> PeerError | None:
    if isinstance(answer, m.Refused):
        return _ERRORS.get(answer.code, PeerRefusedError)(answer.reason)
    _expect(answer, m.Committed)
    return None


def _answer(connection: Connection, kind: type[m.A]) -> m.A:
    return _expect(_received(connection), kind)


def _expect(answer: m.Answer, kind: type[m.A]) -> m.A:
    if isinstance(answer, m.Refused):
        raise _ERRORS.get(answer.code, PeerRefusedError)(answer.reason)
    if not isinstance(answer, kind):
        raise PeerProtocolError(f"{type(answer).__name__} in answer, not {kind.__name__}")
    return answer
