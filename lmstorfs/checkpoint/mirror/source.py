"""Reads replicas back from the mirror that holds them, and takes over from a node that died."""

import os
from pathlib import Path

import msgspec
import structlog
import trio

from lmstorfs.catalog.database import Database
from lmstorfs.checkpoint.mirror.messages import Held, Replica
from lmstorfs.checkpoint.mirror.peer import Identity, Peer, PeerAddress, UnknownReplicaError
from lmstorfs.errors import PeerError, SetupError

log = structlog.get_logger()

# The dead node may have made more versions, and have stored some, than its mirror heard of.
_VERSIONS_UNSEEN = 1_000_000
_CONNECTIONS = 2  # one keeps the link busy while the other's content is digested


class ReplicaSource:
    """One mirror that holds replicas of this node's files, or of its predecessor's."""

    def __init__(self, where: PeerAddress, who: Identity) -> None:
        self._where = where
        self._who = who
        self._idle: list[Peer] = []
        self._limit = trio.CapacityLimiter(_CONNECTIONS)
        self.held: dict[int, int] | None = None
        """Inode → version, as the mirror said when it was asked last; None: never."""

    async def look(self) -> list[Held]:
        """Ask which replicas there are. Raises `PeerError`."""
        peer = await self._open()
        self._idle.append(peer)
        self.held = {replica.ino: replica.version for replica in peer.welcome.held}
        return peer.welcome.held

    async def fetch(self, ino: int, version: int, fd: int) -> Replica:
        """Fetch a replica into the file `fd` and verify it; return its size and digest.

        Raises `PeerError` (`UnknownReplicaError` where there is none) or `CorruptCopyError`.
        """
        async with self._limit:
            peer = self._idle.pop() if self._idle else await self._open()
            try:
                replica = await trio.to_thread.run_sync(
                    peer.fetch, ino, version, fd, abandon_on_cancel=True
                )
            except UnknownReplicaError:
                self._idle.append(peer)
                raise
            except BaseException:
                peer.close()
                raise
            self._idle.append(peer)
            return replica

    async def _open(self) -> Peer:
        return await trio.to_thread.run_sync(
            Peer.open, self._where, self._who, "read", abandon_on_cancel=True
        )

    def close(self) -> None:
        """End the idle connections."""
        while self._idle:
            self._idle.pop().close()


class Succession(msgspec.Struct, frozen=True, kw_only=True):
    """Whose place was taken."""

    origin: str
    epoch: int
    replicas: int


def take_catalog(where: PeerAddress, who: Identity, target: Path) -> Succession:
    """Take over from a node that died: its catalog comes to `target`, and it is fenced.

    Blocking. Raises `SetupError` with one line for a person; nothing is left behind then.
    """
    fresh = target.with_name(target.name + ".taken")
    fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        peer = Peer.open(where, who, "recover")
        try:
            peer.catalog(fd)
        finally:
            peer.close()
        _make_own(fresh, peer)
        fresh.replace(target)
    except PeerError as error:
        raise SetupError(f"--recover-from {where.address}: {error}") from error
    finally:
        os.close(fd)
        for leftover in fresh.parent.glob(fresh.name + "*"):
            leftover.unlink(missing_ok=True)
    welcome = peer.welcome
    log.info("took over", origin=welcome.origin, epoch=welcome.epoch, replicas=len(welcome.held))
    return Succession(origin=welcome.origin, epoch=welcome.epoch, replicas=len(welcome.held))


def _make_own(path: Path, peer: Peer) -> None:
    """Turn the mirror's copy of a catalog into this node's catalog."""
    db = Database(path)
    try:
        (verdict,) = db.execute("PRAGMA quick_check").fetchone()
        if verdict != "ok":
            raise SetupError(f"the mirror's copy of the catalog is corrupt: {verdict}")
        with db.transaction():
            db.execute("DROP TABLE IF EXISTS replicas")
            db.execute("DELETE FROM meta WHERE key LIKE 'mirror.%'")
            db.set_meta("origin", peer.welcome.origin)
            db.set_meta("epoch", str(peer.welcome.epoch))
            db.set_meta("sequence", str(peer.welcome.sequence))
            db.set_meta("succeeded", "1")
            (newest,) = db.execute("SELECT MAX(version) FROM inodes").fetchone()
            db.versions_reach(int(newest or 0) + _VERSIONS_UNSEEN)
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        db.close()
