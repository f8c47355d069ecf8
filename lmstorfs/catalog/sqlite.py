"""The namespace: names and attributes of all files, one transaction an operation.

What a rename or an unlink means for the store is decided in the same transaction (`moves.py`).
Contents and versions are `contents.py`'s, what was deleted and is kept `guarded.py`'s.
"""

import errno
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmstorfs.catalog.catalog import ROOT_INO, Entry, Inode
from lmstorfs.catalog.contents import Contents
from lmstorfs.catalog.database import COLUMNS, Database
from lmstorfs.catalog.guarded import Guarded
from lmstorfs.catalog.journal import Journal
from lmstorfs.catalog.moves import Moves
from lmstorfs.errors import LmstorfsError

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
_NAME_MAX_BYTES = 255


class NamespaceError(LmstorfsError):
    """An operation that the namespace refuses, with its errno."""

    def __init__(self, code: int, what: str = "") -> None:
        super().__init__(f"{os.strerror(code)}{': ' if what else ''}{what}")
        self.errno = code


def join_key(parent: str, name: bytes) -> str:
    """Return the store's key of `name` in the directory whose key is `parent`."""
    text = os.fsdecode(name)
    return f"{parent}/{text}" if parent else text


class SqliteCatalog:
    """The catalog of one mount in one SQLite file."""

    def __init__(self, path: Path) -> None:
        self.db = Database(path)
        self.journal = Journal(self.db)
        self.guarded = Guarded(self.db, self.journal)
        self.contents = Contents(self.db, self.journal, self.key)
        self._moves = Moves(
            self.db, self.journal, self.contents, self.guarded, self.children, self.below
        )
        self._watched: dict[int, set[bytes]] = {}

    # --- reading -----------------------------------------------------------------------------

    def find(self, ino: int) -> Inode | None:
        """Return the inode numbered `ino`, or None."""
        return self.db.inode("WHERE i.ino = ?", (ino,))

    def get(self, ino: int) -> Inode:
        """Return the inode numbered `ino`. Raises ENOENT."""
        inode = self.find(ino)
        if inode is None:
            raise NamespaceError(errno.ENOENT, f"inode {ino}")
        return inode

    def lookup(self, parent: int, name: bytes) -> Inode | None:
        """Return what `name` in directory `parent` is, or None."""
        return self.db.inode(
            "JOIN names n ON n.ino = i.ino WHERE n.parent = ? AND n.name = ?", (parent, name)
        )

    def children(self, parent: int, after: int = 0, limit: int = -1) -> list[Entry]:
        """Return up to `limit` entries of a directory whose cookies lie beyond `after`."""
        rows = self.db.execute(
            f"SELECT n.cookie, n.name, {COLUMNS} FROM names n JOIN inodes i ON i.ino = n.ino"
            " WHERE n.parent = ? AND n.cookie > ? ORDER BY n.cookie LIMIT ?",
            (parent, after, limit),
        )
        return [Entry(row[0], row[1], Inode(*row[2:])) for row in rows]

    def parent(self, ino: int) -> int:
        """Return the directory that holds `ino`; the root is its own."""
        row = self.db.execute("SELECT parent FROM names WHERE ino = ?", (ino,)).fetchone()
        return ROOT_INO if row is None else int(row[0])

    def path(self, ino: int) -> str | None:
        """Return the path below the mount point, which is the store's key; None when unlinked."""
        parts: list[str] = []
        while ino != ROOT_INO:
            row = self.db.execute("SELECT parent, name FROM names WHERE ino = ?", (ino,)).fetchone()
            if row is None:
                return None
            parts.append(os.fsdecode(row[1]))
            ino = row[0]
        return "/".join(reversed(parts))

    def key(self, ino: int) -> str | None:
        """Return where the store has or is to have `ino`; None: it is not to have it."""
        path = self.path(ino)
        return self.guarded.refuge(ino) if path is None else path

    def resolve(self, path: str) -> Inode | None:
        """Return the inode at `path` below the mount point, without following symlinks."""
        return self.contents.at(path)

    def below(self, ino: int) -> Iterator[Inode]:
        """Yield everything below the directory `ino`."""
        yield from self.db.inodes(
            "WHERE i.ino IN (WITH RECURSIVE tree(ino) AS (SELECT ino FROM names WHERE parent = ?"
            " UNION ALL SELECT n.ino FROM names n JOIN tree t ON n.parent = t.ino)"
            " SELECT ino FROM tree)",
            (ino,),
        )

    def count(self) -> int:
        """Return how many inodes there are."""
        (number,) = self.db.execute("SELECT COUNT(*) FROM inodes").fetchone()
        return int(number)

    # --- changing names ----------------------------------------------------------------------

    def create(
        self, parent: int, name: bytes, *, mode: int, uid: int, gid: int,
        rdev: int = 0, target: bytes | None = None, writing: bool = False, tier: str | None = None,
    ) -> Inode:  # fmt: skip
        """Make a new file, directory or symlink. Raises EEXIST, ENAMETOOLONG or ENOENT.

        Directories and symlinks are their own first version; a file has none until it is closed.
        """
        self._check_name(name)
        now = time.time_ns()
        is_file = stat.S_ISREG(mode)
        with self.db.transaction():
            folder = self.get(parent)
            if folder.nlink == 0:
                raise NamespaceError(errno.ENOENT)
            if folder.mode & stat.S_ISGID:  # a set-gid directory hands its group down
                gid = folder.gid
                mode |= stat.S_ISGID if stat.S_ISDIR(mode) else 0
            if self.lookup(parent, name) is not None:
                raise NamespaceError(errno.EEXIST)
            cursor = self.db.execute(
                "INSERT INTO inodes VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, NULL, ?,"
                " ?, 0, NULL, NULL, 0, 0, 0, 0)",
                (mode, uid, gid, len(target or b""), now, now, now,
                 2 if stat.S_ISDIR(mode) else 1, rdev, target, int(writing),
                 int(not is_file), int(not is_file), now / 1e9, tier),
            )  # fmt: skip
            ino = cursor.lastrowid
            assert ino is not None
            self.db.execute(
                "INSERT INTO names (parent, name, ino) VALUES (?, ?, ?)", (parent, name, ino)
            )
            self._touch_directory(parent, now, links=int(stat.S_ISDIR(mode)))
            if not self.guarded.is_empty():
                self._moves.made(self.get(ino), join_key(self._key(parent), name))
        self._changed(parent, name)
        return self.get(ino)

    def restore(self, parent: int, name: bytes, ino: int) -> None:
        """Give an inode that lost its name one again. Raises EEXIST or ENOENT."""
        now = time.time_ns()
        with self.db.transaction():
            inode = self.get(ino)
            if self.lookup(parent, name) is not None:
                raise NamespaceError(errno.EEXIST)
            self.db.execute(
                "INSERT INTO names (parent, name, ino) VALUES (?, ?, ?)", (parent, name, ino)
            )
            self.db.execute("UPDATE inodes SET nlink = 1, ctime_ns = ? WHERE ino = ?", (now, ino))
            self._touch_directory(parent, now, links=0)
            self._moves.came_back(inode, self._key(ino))
        self._changed(parent, name)

    def unlink(self, parent: int, name: bytes) -> Inode:
        """Remove a file's or symlink's name; the inode stays (nlink 0) until `purge`."""
        with self.db.transaction():
            inode = self._existing(parent, name)
            if inode.is_dir:
                raise NamespaceError(errno.EISDIR)
            self._detach(parent, name, inode)
            self._moves.unlinked(inode)
        self._changed(parent, name)
        return inode

    def rmdir(self, parent: int, name: bytes) -> Inode:
        """Remove an empty directory."""
        with self.db.transaction():
            inode = self._existing(parent, name)
            if not inode.is_dir:
                raise NamespaceError(errno.ENOTDIR)
            self._check_empty(inode.ino)
            self._detach(parent, name, inode)
            if inode.stored_key is not None:
                self.journal.remove_directory(inode.stored_key)
        self._changed(parent, name)
        return inode

    def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int = 0
    ) -> Inode | None:
        """Rename as rename(2) and renameat2(2) do; return the inode that was replaced."""
        self._check_name(new_name)
        replaced: Inode | None = None
        with self.db.transaction():
            inode = self._existing(parent, name)
            target = self.lookup(new_parent, new_name)
            if flags & RENAME_EXCHANGE:
                if target is None:
                    raise NamespaceError(errno.ENOENT)
                self._exchange(inode, target, (parent, name), (new_parent, new_name))
            elif target is None or target.ino != inode.ino:
                if target is not None and flags & RENAME_NOREPLACE:
                    raise NamespaceError(errno.EEXIST)
                if target is not None:
                    replaced = target
                    self._check_replaceable(inode, target)
                    self._detach(new_parent, new_name, target)
                self._move(inode, target, parent, name, new_parent, new_name)
        self._changed(parent, name)
        self._changed(new_parent, new_name)
        return replaced

    def _move(
        self, inode: Inode, target: Inode | None, parent: int, name: bytes,
        new_parent: int, new_name: bytes,
    ) -> None:  # fmt: skip
        now = time.time_ns()
        self._check_no_cycle(inode, new_parent)
        self.db.execute(
            "UPDATE names SET parent = ?, name = ? WHERE parent = ? AND name = ?",
            (new_parent, new_name, parent, name),
        )
        self.db.execute("UPDATE inodes SET ctime_ns = ? WHERE ino = ?", (now, inode.ino))
        links = int(inode.is_dir and parent != new_parent)
        self._touch_directory(parent, now, links=-links)
        self._touch_directory(new_parent, now, links=links)
        self._moves.moved(inode, join_key(self._key(new_parent), new_name), target)

    def _exchange(
        self, one: Inode, other: Inode, place: tuple[int, bytes], other_place: tuple[int, bytes]
    ) -> None:
        """Swap two names: three renames through a name that nobody can have."""
        self._check_no_cycle(one, other_place[0])
        self._check_no_cycle(other, place[0])
        aside = (place[0], b".lmstorfs-exchange-%d" % one.ino)
        self._move(one, None, *place, *aside)
        self._move(self.get(other.ino), None, *other_place, *place)
        self._move(self.get(one.ino), None, *aside, *other_place)

    def purge(self, ino: int) -> bool:
        """Forget an unlinked inode for good, unless it is kept; return whether there was one."""
        with self.db.transaction():
            gone = self.db.execute(
                "DELETE FROM inodes WHERE ino = ? AND nlink = 0"
                " AND NOT EXISTS (SELECT 1 FROM guarded g WHERE g.ino = ? AND g.deleted_at > 0)",
                (ino, ino),
            )
            if gone.rowcount:
                self.db.execute("DELETE FROM guarded WHERE ino = ?", (ino,))
                self.db.execute("DELETE FROM xattrs WHERE ino = ?", (ino,))
        return gone.rowcount > 0

    def orphans(self) -> list[int]:
        """Return unlinked inodes that are still here and that nobody keeps."""
        rows = self.db.execute("SELECT ino FROM inodes WHERE nlink = 0")
        return [row[0] for row in rows.fetchall() if not self.guarded.keeps(row[0])]

    # --- attributes --------------------------------------------------------------------------

    def set_attributes(self, ino: int, **fields: Any) -> Inode:
        """Change attributes by column name; what the store shows is marked as behind."""
        with self.db.transaction():
            names = ", ".join(f"{name} = ?" for name in fields)
            self.db.execute(
                f"UPDATE inodes SET {names}, attrs_dirty = (stored_key IS NOT NULL"
                f" AND ino != {ROOT_INO}) WHERE ino = ?",
                (*fields.values(), ino),
            )
            return self.get(ino)

    def xattrs(self, ino: int) -> dict[bytes, bytes]:
        """Return all extended attributes."""
        return dict(self.db.execute("SELECT name, value FROM xattrs WHERE ino = ?", (ino,)))

    def set_xattr(self, ino: int, name: bytes, value: bytes | None) -> None:
        """Set one extended attribute, or remove it (None). Raises ENODATA."""
        with self.db.transaction():
            if value is None:
                gone = self.db.execute("DELETE FROM xattrs WHERE ino = ? AND name = ?", (ino, name))
                if not gone.rowcount:
                    raise NamespaceError(errno.ENODATA)
            else:
                self.db.execute(
                    "INSERT OR REPLACE INTO xattrs VALUES (?, ?, ?)", (ino, name, value)
                )
            self.set_attributes(ino, ctime_ns=time.time_ns())

    # --- helpers -----------------------------------------------------------------------------

    def watch(self, ino: int) -> set[bytes]:
        """Start to note the names that change in directory `ino`; end with `unwatch`."""
        return self._watched.setdefault(ino, set())

    def unwatch(self, ino: int) -> None:
        """Stop noting."""
        self._watched.pop(ino, None)

    def _changed(self, parent: int, name: bytes) -> None:
        if parent in self._watched:
            self._watched[parent].add(name)

    def note_stored(self, ino: int) -> None:
        """The store's entry of `ino` just changed: a listing under way may not show it."""
        if self._watched:
            row = self.db.execute("SELECT parent, name FROM names WHERE ino = ?", (ino,)).fetchone()
            if row is not None:
                self._changed(row[0], row[1])

    def _existing(self, parent: int, name: bytes) -> Inode:
        inode = self.lookup(parent, name)
        if inode is None:
            raise NamespaceError(errno.ENOENT)
        return inode

    def _detach(self, parent: int, name: bytes, inode: Inode) -> None:
        now = time.time_ns()
        self.db.execute("DELETE FROM names WHERE parent = ? AND name = ?", (parent, name))
        self.db.execute("UPDATE inodes SET nlink = 0, ctime_ns = ? WHERE ino = ?", (now, inode.ino))
        self._touch_directory(parent, now, links=-int(inode.is_dir))

    def _touch_directory(self, ino: int, now: int, *, links: int) -> None:
        self.db.execute(
            "UPDATE inodes SET mtime_ns = ?, ctime_ns = ?, nlink = nlink + ? WHERE ino = ?",
            (now, now, links, ino),
        )

    def _key(self, ino: int) -> str:
        key = self.path(ino)
        if key is None:
            raise NamespaceError(errno.ENOENT)
        return key

    def _check_name(self, name: bytes) -> None:
        if len(name) > _NAME_MAX_BYTES:
            raise NamespaceError(errno.ENAMETOOLONG)

    def _check_empty(self, ino: int) -> None:
        if self.children(ino, limit=1):
            raise NamespaceError(errno.ENOTEMPTY)

    def _check_replaceable(self, inode: Inode, target: Inode) -> None:
        if target.is_dir and not inode.is_dir:
            raise NamespaceError(errno.EISDIR)
        if inode.is_dir and not target.is_dir:
            raise NamespaceError(errno.ENOTDIR)
        if target.is_dir:
            self._check_empty(target.ino)

    def _check_no_cycle(self, inode: Inode, new_parent: int) -> None:
        ino = new_parent
        while inode.is_dir and ino != ROOT_INO:
            if ino == inode.ino:
                raise NamespaceError(errno.EINVAL)
            ino = self.parent(ino)

    def close(self) -> None:
        """Close the database."""
        self.db.close()
