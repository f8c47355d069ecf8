"""What a mirror keeps of one origin: a copy of its catalog, and replicas of its versions.

    ROOT/ORIGIN/catalog.db   the copy, and which replicas are whole
    ROOT/ORIGIN/INO          the replica of an inode's newest version that came whole
    ROOT/ORIGIN/INO.part     the next one, on its way

The copy of the catalog tells what is still needed: a replica lives until the store has its version,
those of the newest checkpoints longer. Blocking; one thread at a time (`lock`).
"""

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import structlog

from lmstorfs.catalog import Inode, SqliteCatalog
from lmstorfs.checkpoint import checkpoints
from lmstorfs.checkpoint.mirror import changes
from lmstorfs.checkpoint.mirror.messages import Held, Offer, Rows
from lmstorfs.checkpoint.mirror.parts import Part
from lmstorfs.digest import BLOCK_BYTES, BLOCK_DIGEST_BYTES
from lmstorfs.errors import NoRoomError, PeerProtocolError

log = structlog.get_logger()

_FILE_MAX_BYTES = 1 << 50
_LOOK_EVERY_S = 1.0  # what is not needed any more goes so late at most, once more rows come
_RECENT_FILES = 5000  # among which the newest checkpoints are looked for

_REPLICAS = """
CREATE TABLE IF NOT EXISTS replicas (
    ino INTEGER PRIMARY KEY, version INTEGER NOT NULL, size INTEGER NOT NULL,
    digest TEXT NOT NULL, blocks BLOB NOT NULL
);
"""


class Budget:
    """Bytes that all origins of a mirror share."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._lock = threading.Lock()

    def take(self, count: int) -> bool:
        """Take `count` bytes; False: there is no room."""
        with self._lock:
            if self.used_bytes + count > self.limit_bytes:
                return False
            self.used_bytes += count
            return True

    def give(self, count: int) -> None:
        """Give `count` bytes back."""
        with self._lock:
            self.used_bytes -= count


class Origin:
    """One origin."""

    def __init__(self, directory: Path, budget: Budget) -> None:
        """Open what `directory` holds, or begin it."""
        directory.mkdir(mode=0o700, exist_ok=True)
        self.name = directory.name
        self.lock = threading.RLock()
        self._directory = directory
        self._budget = budget
        self.catalog = SqliteCatalog(directory / "catalog.db")
        self._db = self.catalog.db
        self._db.connection.executescript(_REPLICAS)
        self._parts: dict[int, Part] = {}
        self._looked_at = 0.0
        self._filling = False  # between the first and the last of all rows
        self._adopt()

    def _adopt(self) -> None:
        """Take what an earlier mirror process left into the books."""
        known = {str(held.ino): size for held, size in self._replicas()}
        for path in list(self._directory.iterdir()):
            if path.name.startswith("catalog.db"):
                continue
            if path.name in known and path.stat().st_size == known[path.name]:
                self._budget.take(known.pop(path.name))
            else:
                path.unlink()
        for name in known:
            self._db.execute("DELETE FROM replicas WHERE ino = ?", (int(name),))

    # --- what is known -----------------------------------------------------------------------

    def meta(self, key: str, default: str = "") -> str:
        """Return what was noted of the origin."""
        found = self._db.meta(f"mirror.{key}")
        return default if found is None else found

    def set_meta(self, key: str, value: str) -> None:
        """Note something of the origin."""
        self._db.set_meta(f"mirror.{key}", value)

    @property
    def epoch(self) -> int:
        """How often the origin was recovered."""
        return int(self.meta("epoch", "0"))

    @property
    def sequence(self) -> int:
        """The last batch of rows; 0 where the copy of the catalog is not whole."""
        return 0 if self._filling else int(self.meta("sequence", "0"))

    def held(self) -> list[Held]:
        """Return the replicas that are whole."""
        return [held for held, _ in self._replicas()]

    def bytes(self) -> int:
        """Return what the whole replicas take."""
        return sum(size for _, size in self._replicas())

    def _replicas(self) -> list[tuple[Held, int]]:
        rows = self._db.execute("SELECT ino, version, size FROM replicas")
        return [(Held(ino, version), size) for ino, version, size in rows]

    def _path(self, ino: int) -> Path:
        return self._directory / str(ino)

    # --- the catalog -------------------------------------------------------------------------

    def rows(self, message: Rows) -> list[Held]:
        """Bring changed rows into the copy; return the replicas that were dropped for it.

        Between `first` and `last` nothing is committed: a copy is whole, or it is the last whole.
        """
        connection = self._db.connection
        if message.first and self._filling:
            self.give_up_rows()
        if not self._filling:
            connection.execute("BEGIN IMMEDIATE")
        self._filling = True
        try:
            if message.first:
                changes.clear(self._db)
            changes.apply(self._db, message.rows)
            if message.last:
                self.set_meta("sequence", str(message.sequence))
        except BaseException:
            self.give_up_rows()
            raise
        if not message.last:
            return []
        connection.execute("COMMIT")
        self._filling = False
        if time.monotonic() - self._looked_at < _LOOK_EVERY_S:
            return []
        self._looked_at = time.monotonic()
        return self._drop_unneeded(int(self.meta("keep", "2")))

    def give_up_rows(self) -> None:
        """The rest of the rows will not come."""
        if self._filling:
            self._db.connection.execute("ROLLBACK")
            self._filling = False

    def _drop_unneeded(self, keep: int) -> list[Held]:
        kept = self._newest(keep)
        dropped = []
        for held in self.held():
            inode = self.catalog.find(held.ino)
            gone = inode is None or (inode.nlink == 0 and not self._is_guarded(held.ino))
            stored = inode is not None and inode.stored_version >= held.version
            if gone or (stored and held.ino not in kept and not self._is_guarded(held.ino)):
                self.drop(held)
                dropped.append(held)
        for ino, part in list(self._parts.items()):
            inode = self.catalog.find(ino)
            # Opened for writing, but closed as it was: nothing will be offered.
            idle = inode is not None and not inode.writing and not inode.dirty
            if inode is None or inode.nlink == 0 or (idle and part.offered is None):
                self._forget_part(ino)
        return dropped

    def _newest(self, keep: int) -> set[int]:
        """Return the inodes of the newest `keep` complete checkpoints."""
        recent = self.catalog.contents.recent(_RECENT_FILES)
        found = checkpoints.group(recent, self.catalog.path, lambda ino: False, len(recent))
        names = [found_.path for found_ in found if found_.complete][:keep]
        return {inode.ino for inode in recent if self._checkpoint(inode) in names}

    def _checkpoint(self, inode: Inode) -> str | None:
        path = self.catalog.path(inode.ino)
        return None if path is None else checkpoints.checkpoint_of(path)

    def _is_guarded(self, ino: int) -> bool:
        row = self._db.execute("SELECT 1 FROM guarded WHERE ino = ?", (ino,)).fetchone()
        return row is not None

    # --- replicas ----------------------------------------------------------------------------

    def part(self, ino: int, end: int) -> Part:
        """Return the part of `ino`, with room up to `end`. Raises `NoRoomError`."""
        if ino <= 0 or not 0 <= end <= _FILE_MAX_BYTES:
            raise PeerProtocolError(f"inode {ino}, {end} bytes")
        part = self._parts.get(ino)
        if part is None:
            part = self._parts[ino] = Part(self._directory / f"{ino}.part")
        missing = end - part.room_bytes
        if missing > 0:
            if not self._budget.take(missing) and not self._make_room(missing, ino):
                raise NoRoomError("the mirror's RAM is full")
            part.room_bytes = end
        return part

    def _make_room(self, count: int, ino: int) -> bool:
        """Let go of what the store has too; newer checkpoints last."""
        stored = []
        for held in self.held():
            inode = self.catalog.find(held.ino)
            if held.ino != ino and (inode is None or inode.stored_version >= held.version):
                stored.append((inode.closed_at or 0.0 if inode else 0.0, held))
        for _, held in sorted(stored, key=lambda pair: pair[0]):
            self.drop(held)
            if self._budget.take(count):
                return True
        return False

    def offer(self, offer: Offer) -> list[int]:
        """A version is whole at the origin; return the blocks that it must send.

        Blocks that came while the file was being written, or that the last version had too, need
        not come again.
        """
        count = -(-offer.size // BLOCK_BYTES)
        if len(offer.blocks) != count * BLOCK_DIGEST_BYTES:
            raise PeerProtocolError(f"{len(offer.blocks)} bytes of digests for {count} blocks")
        part = self.part(offer.ino, offer.size)
        part.offered = offer
        missing = [number for number in range(count) if not part.has(number, offer)]
        last = self._db.execute(
            "SELECT blocks FROM replicas WHERE ino = ?", (offer.ino,)
        ).fetchone()
        if last is None or not missing:
            return missing
        return part.copy_from(self._path(offer.ino), last[0], missing, offer)

    def commit(self, ino: int, version: int) -> bool | None:
        """Make the offered version the replica; False where a block is not what was offered.

        None where nothing was offered, or the file was deleted meanwhile.
        """
        part = self._parts.get(ino)
        if part is None or part.offered is None or part.offered.version != version:
            return None
        offer = part.offered
        if not part.is_whole(offer):
            return False
        before = self._db.execute("SELECT size FROM replicas WHERE ino = ?", (ino,)).fetchone()
        part.finish(offer.size, self._path(ino))
        self._db.execute(
            "INSERT OR REPLACE INTO replicas VALUES (?, ?, ?, ?, ?)",
            (ino, version, offer.size, offer.digest, offer.blocks),
        )
        del self._parts[ino]
        self._budget.give(part.room_bytes - offer.size + (before[0] if before else 0))
        return True

    def open_replica(self, ino: int, version: int) -> tuple[int, int, str] | None:
        """Return descriptor, size and digest of a whole replica; None where there is none."""
        row = self._db.execute(
            "SELECT size, digest FROM replicas WHERE ino = ? AND version = ?", (ino, version)
        ).fetchone()
        if row is None:
            return None
        try:
            return os.open(self._path(ino), os.O_RDONLY | os.O_CLOEXEC), row[0], row[1]
        except FileNotFoundError:
            log.error("a replica's file is gone", origin=self.name, ino=ino)
            return None

    def drop(self, held: Held) -> None:
        """Let a replica go, if it still is that version."""
        row = self._db.execute(
            "SELECT size FROM replicas WHERE ino = ? AND version = ?", (held.ino, held.version)
        ).fetchone()
        if row is not None:
            self._db.execute("DELETE FROM replicas WHERE ino = ?", (held.ino,))
            self._path(held.ino).unlink(missing_ok=True)
            self._budget.give(row[0])

    def _forget_part(self, ino: int) -> None:
        part = self._parts.pop(ino)
        self._budget.give(part.room_bytes)
        part.remove()

    # --- taking over -------------------------------------------------------------------------

    def begin_epoch(self) -> int:
        """A successor takes over: whoever comes with an older epoch is fenced from now on."""
        epoch = self.epoch + 1
        self.set_meta("epoch", str(epoch))
        return epoch

    def catalog_file(self) -> int:
        """Return a descriptor of the catalog's copy in one file, which has no name any more."""
        path = self._directory / "catalog.db.copy"
        path.unlink(missing_ok=True)
        self._db.connection.execute("VACUUM INTO ?", (str(path),))
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        finally:
            path.unlink()

    def close(self) -> None:
        """Let go of files; all stays for the mirror process that comes after."""
        self.give_up_rows()
        for part in self._parts.values():
            part.close()
        self.catalog.close()


def open_origins(root: Path, budget: Budget) -> Iterator[Origin]:
    """Open all origins that an earlier mirror process left in `root`."""
    for path in sorted(root.iterdir()):
        if path.is_dir():
            try:
                yield Origin(path, budget)
            except OSError as error:
                if error.errno != errno.ENOTDIR:
                    raise
