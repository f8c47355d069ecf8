"""What was deleted and is kept all the same: the table of the deletion guard.

Its rows come in sets, one a checkpoint whose deletion began. All files of the checkpoint get a row
then, and each is kept from when it loses its name or content (`deleted_at`). A kept file's inode
stays, without a name; so does its object in the store, under its old key, until something new is
to lie there. Which sets there are, and when one may go, is `checkpoint/guard.py`'s.
"""

import time
from collections.abc import Iterable

import msgspec

from lmstorfs.catalog.catalog import Inode
from lmstorfs.catalog.database import Database
from lmstorfs.catalog.journal import Journal, ancestors
from lmstorfs.store.keys import OWN_PREFIX

DELETED = OWN_PREFIX + "deleted"  # the store's directory for objects that had to make way

_UNNAMED = "i.nlink = 0 AND i.stored_key IS NOT NULL"  # the words of the partial index


class GuardedFile(msgspec.Struct, frozen=True):
    """One row. Field order is the order of the table's columns."""

    ino: int
    path: str
    """Its path when the set began."""
    checkpoint: str
    deleted_at: float
    """When it lost its name or content, seconds since the epoch; 0 while it has them."""
    number: int
    """Of the set; later sets have higher ones."""
    version: int
    """The version that belongs to the checkpoint."""
    weights: int
    """More than 0 for a file of weights, or one that they need, that every save writes anew."""


class Guarded:
    """The guard's rows in one catalog."""

    def __init__(self, db: Database, journal: Journal) -> None:
        self._db = db
        self._journal = journal
        self.sheltered: set[int] = set()
        """Kept inodes that the store is to have after all, since their tier needs the room."""
        self._stored_whole: dict[int, bool] = {}

    # --- reading -----------------------------------------------------------------------------

    def rows(self, number: int | None = None) -> list[GuardedFile]:
        """Return all rows, the sets in order; or those of one set."""
        rows = self._db.execute(
            "SELECT * FROM guarded WHERE ? IS NULL OR number = ? ORDER BY number, path",
            (number, number),
        )
        return [GuardedFile(*row) for row in rows]

    def newest_set(self, checkpoint: str) -> int | None:
        """Return the number of the newest set of a checkpoint, None where there is none."""
        (number,) = self._db.execute(
            "SELECT MAX(number) FROM guarded WHERE checkpoint = ?", (checkpoint,)
        ).fetchone()
        return None if number is None else int(number)

    def keeps_weights(self, number: int) -> bool:
        """Whether any file of weights of the set is kept already."""
        row = self._db.execute(
            "SELECT 1 FROM guarded WHERE number = ? AND weights > 0 AND deleted_at > 0 LIMIT 1",
            (number,),
        ).fetchone()
        return row is not None

    def find(self, ino: int) -> GuardedFile | None:
        """Return the row of `ino`, or None."""
        row = self._db.execute("SELECT * FROM guarded WHERE ino = ?", (ino,)).fetchone()
        return None if row is None else GuardedFile(*row)

    def is_empty(self) -> bool:
        """Whether nothing is guarded."""
        return self._db.execute("SELECT 1 FROM guarded LIMIT 1").fetchone() is None

    def keeps(self, ino: int) -> bool:
        """Whether the inode, which lost its name, is kept."""
        row = self._db.execute(
            "SELECT 1 FROM guarded WHERE ino = ? AND deleted_at > 0", (ino,)
        ).fetchone()
        return row is not None

    def holds(self, key: str) -> bool:
        """Whether the object or directory `key` of the store is there for kept files only."""
        return not self.is_empty() and bool(self._at_or_below(key))

    def _at_or_below(self, key: str) -> list[Inode]:
        found = self._db.inodes(f"WHERE {_UNNAMED} AND i.stored_key = ?", (key,))
        found += self._db.inodes(
            f"WHERE {_UNNAMED} AND i.stored_key > ? AND i.stored_key < ?", (key + "/", key + "0")
        )
        return [inode for inode in found if self.keeps(inode.ino)]

    # --- sets --------------------------------------------------------------------------------

    def begin(self, files: Iterable[GuardedFile]) -> int:
        """Make a set of these files (their `number` is not looked at); return its number."""
        (last,) = self._db.execute("SELECT COALESCE(MAX(number), 0) FROM guarded").fetchone()
        self._stored_whole.pop(int(last) + 1, None)
        self.extend(int(last) + 1, files)
        return int(last) + 1

    def extend(self, number: int, files: Iterable[GuardedFile]) -> None:
        """Let these files belong to the set, whichever they belonged to before."""
        with self._db.transaction():
            for file in files:
                self._db.execute(
                    "INSERT OR REPLACE INTO guarded VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (file.ino, file.path, file.checkpoint, 0.0, number, file.version, file.weights),
                )

    def set_weights(self, ino: int, weights: int) -> None:
        """Change what is thought of a file of weights."""
        self._db.execute("UPDATE guarded SET weights = ? WHERE ino = ?", (weights, ino))

    def deleted(self, ino: int) -> None:
        """The file is about to lose its name, and is kept."""
        self._db.execute("UPDATE guarded SET deleted_at = ? WHERE ino = ?", (time.time(), ino))

    def forget(self, files: Iterable[GuardedFile]) -> None:
        """Remove rows; what becomes of the files is the caller's."""
        with self._db.transaction():
            for file in files:
                self._db.execute("DELETE FROM guarded WHERE ino = ?", (file.ino,))

    def split(self, ino: int) -> int:
        """Give the content of `ino` to a new inode without a name; return that one's number.

        The old one begins anew, empty, as a file that was just made. The caller sees to the tier.
        """
        with self._db.transaction():
            cursor = self._db.execute(
                "INSERT INTO inodes SELECT NULL, mode, uid, gid, size, atime_ns, mtime_ns,"
                " ctime_ns, 0, rdev, target, 0, sealed, version, digest, closed_at, tier,"
                " stored_version, stored_key, etag, attrs_dirty, needs_head, version_size,"
                " version_mtime_ns FROM inodes WHERE ino = ?",
                (ino,),
            )
            kept = cursor.lastrowid
            assert kept is not None
            self._db.execute(
                "INSERT INTO xattrs SELECT ?, name, value FROM xattrs WHERE ino = ?", (kept, ino)
            )
            self._db.execute(
                "UPDATE guarded SET ino = ?, deleted_at = ? WHERE ino = ?", (kept, time.time(), ino)
            )
            self._db.execute(
                "UPDATE inodes SET size = 0, writing = 1, sealed = 0, tier = NULL, digest = NULL,"
                " stored_version = 0, stored_key = NULL, etag = NULL WHERE ino = ?",
                (ino,),
            )
            self._share_object(ino, kept)
        return kept

    def _share_object(self, ino: int, kept: int) -> None:
        """The object goes with the content that was kept, where it is that; else it stays."""
        key, useful = self._object(kept)
        if key is None:
            return
        if not useful:
            self.forget_object(kept)
        left = self.vacate(key, is_file=True) if useful else key
        self._db.execute("UPDATE inodes SET stored_key = ? WHERE ino = ?", (left, ino))

    # --- objects -----------------------------------------------------------------------------

    def settle_object(self, ino: int) -> None:
        """Keep the object of a file that is kept where it is of use; else delete it."""
        key, useful = self._object(ino)
        if key is not None and not useful:
            self._journal.delete(key)
            self.forget_object(ino)

    def gives_up_object(self, ino: int) -> bool:
        """Whether what replaces the kept file may have its object."""
        return not self._object(ino)[1]

    def _object(self, ino: int) -> tuple[str | None, bool]:
        """Return the key of the inode's object, and whether it is of use.

        It is where it is the newest version, and the store has all of the checkpoint or nobody
        else has the file: a part of a checkpoint is no copy.
        """
        key, newest, tier = self._db.execute(
            "SELECT stored_key, stored_version = version, tier FROM inodes WHERE ino = ?", (ino,)
        ).fetchone()
        return key, bool(newest) and (tier is None or self._is_stored_whole(ino))

    def _is_stored_whole(self, ino: int) -> bool:
        """Whether the store had all weights of the set when the first file of it was deleted."""
        (number,) = self._db.execute("SELECT number FROM guarded WHERE ino = ?", (ino,)).fetchone()
        if number not in self._stored_whole:
            dirty = self._db.execute(
                "SELECT 1 FROM guarded g JOIN inodes i ON i.ino = g.ino"
                " WHERE g.number = ? AND g.weights > 0 AND i.version != i.stored_version LIMIT 1",
                (number,),
            ).fetchone()
            self._stored_whole[number] = dirty is None
        return self._stored_whole[number]

    def vacate(self, key: str, *, is_file: bool, alone: bool = False) -> str | None:
        """Something new is to lie at `key`: the objects of kept files make way.

        Returns `key` where the object there stays until the new one's upload replaces it: that of
        a checkpoint of one file that a tier holds too. Others are moved. `alone`: a directory that
        is made, and not one that comes with what is in it, so that what lies below may stay.
        """
        if self.is_empty():
            return None
        left: str | None = None
        emptied: dict[str, None] = {}
        for inode in self._at_or_below(key):
            assert inode.stored_key is not None
            if alone and inode.stored_key != key:
                continue
            if is_file and inode.stored_key == key and inode.tier and self._is_single(inode.ino):
                self.forget_object(inode.ino)
                left = key
                continue
            self._move_aside(inode)
            for above in ancestors(inode.stored_key):
                if above == key or above.startswith(key + "/"):
                    emptied[above] = None
        for directory in sorted(emptied, key=lambda name: -name.count("/")):
            self._journal.remove_directory(directory)
        return left

    def _move_aside(self, inode: Inode) -> None:
        assert inode.stored_key is not None
        aside = self._aside(inode.ino)
        self._journal.rename(inode.stored_key, aside, is_dir=False)
        self._db.execute(
            "UPDATE inodes SET stored_key = ?, etag = NULL WHERE ino = ?", (aside, inode.ino)
        )

    def _aside(self, ino: int) -> str:
        origin = (self._db.meta("origin") or "0")[:8]  # another catalog may use the same store
        return f"{DELETED}/{origin}-{ino}"

    def came_back(self, keys: Iterable[str | None]) -> None:
        """Objects that were at these keys are to have their places again."""
        if any(key is not None and key.startswith(DELETED + "/") for key in keys):
            self._journal.remove_directory(DELETED)  # where it is empty by then

    def refuge(self, ino: int) -> str | None:
        """Return where the store is to have a kept inode; None: nowhere."""
        return self._aside(ino) if ino in self.sheltered and self.keeps(ino) else None

    def _is_single(self, ino: int) -> bool:
        (count,) = self._db.execute(
            "SELECT COUNT(*) FROM guarded"
            " WHERE number = (SELECT number FROM guarded WHERE ino = ?)",
            (ino,),
        ).fetchone()
        return int(count) == 1

    def forget_object(self, ino: int) -> None:
        """The object of a kept file is another's from now on: the store has no copy of it."""
        self._db.execute(
            "UPDATE inodes SET stored_version = 0, stored_key = NULL, etag = NULL WHERE ino = ?",
            (ino,),
        )

    def moved(self, old_key: str, new_key: str) -> None:
        """The store is to move the directory `old_key`, and with it the objects of kept files."""
        for inode in self._at_or_below(old_key):
            assert inode.stored_key is not None
            self._db.execute(
                "UPDATE inodes SET stored_key = ? WHERE ino = ?",
                (new_key + inode.stored_key[len(old_key) :], inode.ino),
            )
