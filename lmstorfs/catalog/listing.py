"""What the store shows, brought into the catalog: files that other tools put, changed, removed.

The catalog wins wherever it knows something that the store cannot know yet: dirty or open files,
names whose delete or rename still waits, names that changed while the listing was under way.
"""

import os
import stat
import time
from collections.abc import Callable, Sequence

import msgspec

from lmstorfs.catalog.catalog import Inode
from lmstorfs.catalog.sqlite import SqliteCatalog, join_key
from lmstorfs.store.store import Kind, ObjectInfo

_MODES = {
    Kind.FILE: stat.S_IFREG | 0o644,
    Kind.DIRECTORY: stat.S_IFDIR | 0o755,
    Kind.SYMLINK: stat.S_IFLNK | 0o777,
}


class Changes(msgspec.Struct):
    """What a merge changed, for the kernel's caches and the tiers."""

    replaced: list[Inode] = []
    """Files whose content is another one now; their tier copies are to be dropped."""
    removed: list[tuple[bytes, Inode]] = []


class Merger:
    """Brings listings of one store into one catalog."""

    def __init__(
        self, catalog: SqliteCatalog, is_open: Callable[[int], bool], *, empty_shown: bool = True
    ) -> None:
        """Take `empty_shown`: whether the store's listings show empty directories."""
        self._catalog = catalog
        self._empty_shown = empty_shown
        self._is_open = is_open

    def merge(self, parent: int, seen: Sequence[ObjectInfo], moved: set[bytes]) -> Changes:
        """Bring a listing of directory `parent` into the catalog.

        `moved` are names that changed here since the listing began: they are left alone.
        """
        catalog = self._catalog
        changes = Changes()
        with catalog.db.transaction():
            directory = catalog.path(parent)
            if directory is None:
                return changes
            known = {entry.name: entry.inode for entry in catalog.children(parent)}
            found: set[bytes] = set()
            for info in seen:
                name = os.fsencode(info.key.rpartition("/")[2])
                found.add(name)
                if name in moved or catalog.journal.blocks(info.key):
                    continue
                inode = known.get(name)
                if inode is None and catalog.guarded.holds(info.key):
                    continue  # it was deleted here, and is kept for a while
                if inode is None:
                    self._insert(parent, name, info)
                elif inode.is_dir and info.kind is Kind.DIRECTORY:
                    continue
                elif self._believes_store(inode):
                    self._update(parent, name, inode, info, changes)
            for name, inode in known.items():
                if name in found or name in moved or self._may_be_empty(inode):
                    continue
                if self._believes_store(inode) and not catalog.journal.blocks(
                    join_key(directory, name)
                ):
                    self._remove(parent, name, inode, changes)
        return changes

    def _may_be_empty(self, inode: Inode) -> bool:
        """Whether it is a directory made here that the store may hold without showing it."""
        return inode.is_dir and not self._empty_shown and inode.closed_at is not None

    def _believes_store(self, inode: Inode) -> bool:
        """Whether the store may overrule what the catalog says of `inode`."""
        if inode.dirty or inode.writing or inode.stored_key is None or self._is_open(inode.ino):
            return False
        if not inode.is_dir:
            return stat.S_ISREG(inode.mode) or inode.is_symlink
        return all(
            not (child.dirty or child.writing or self._is_open(child.ino))
            for child in self._catalog.below(inode.ino)
        )

    def _insert(self, parent: int, name: bytes, info: ObjectInfo) -> None:
        shown = info.attributes
        now = time.time_ns()
        mode = shown.mode if shown else _MODES[info.kind]
        mtime_ns = shown.mtime_ns if shown else info.mtime_ns
        cursor = self._catalog.db.execute(
            "INSERT INTO inodes VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, 0, NULL, 0, 1, 1, ?, NULL,"
            " NULL, 1, ?, ?, 0, ?, ?, ?)",
            (mode, shown.uid if shown else os.getuid(), shown.gid if shown else os.getgid(),
             info.size, mtime_ns, mtime_ns, now, 2 if info.kind is Kind.DIRECTORY else 1,
             shown.digest if shown else None, info.key, info.etag, int(shown is None),
             info.size, mtime_ns),
        )  # fmt: skip
        self._catalog.db.execute(
            "INSERT INTO names (parent, name, ino) VALUES (?, ?, ?)",
            (parent, name, cursor.lastrowid),
        )
        if info.kind is Kind.DIRECTORY:
            self._catalog.db.execute("UPDATE inodes SET nlink = nlink + 1 WHERE ino = ?", (parent,))
        if shown is not None and shown.xattrs and cursor.lastrowid is not None:
            self._set_xattrs(cursor.lastrowid, shown.xattrs)

    def _update(
        self, parent: int, name: bytes, inode: Inode, info: ObjectInfo, changes: Changes
    ) -> None:
        was_dir, is_dir = inode.is_dir, info.kind is Kind.DIRECTORY
        if was_dir != is_dir:
            self._remove(parent, name, inode, changes)
            self._insert(parent, name, info)
        elif is_dir or inode.etag == info.etag:
            return
        elif inode.etag is None and inode.size == info.size:
            self._catalog.contents.set_etags({info.key: info.etag})
        else:
            self.replace(inode, info)
            changes.replaced.append(inode)

    def replace(self, inode: Inode, info: ObjectInfo) -> None:
        """Another content lies under the file's name in the store: a new version, theirs."""
        if info.attributes is not None and info.attributes.version is not None:
            self._catalog.db.versions_reach(info.attributes.version)
        version = self._catalog.db.next_version()
        mtime_ns = info.attributes.mtime_ns if info.attributes else info.mtime_ns
        self._catalog.db.execute(
            "UPDATE inodes SET size = ?, mtime_ns = ?, ctime_ns = ?, version = ?,"
            " stored_version = ?, digest = ?, closed_at = NULL, tier = NULL,"
            " target = NULL, etag = ?, attrs_dirty = 0, needs_head = 1, version_size = ?,"
            " version_mtime_ns = ? WHERE ino = ?",
            (info.size, mtime_ns, time.time_ns(), version, version,
             info.attributes.digest if info.attributes else None, info.etag, info.size, mtime_ns,
             inode.ino),
        )  # fmt: skip
        if info.attributes is not None:
            self.complete(inode.ino, info)

    def complete(self, ino: int, info: ObjectInfo) -> None:
        """The store was asked about one object: take over all that it told."""
        shown = info.attributes
        assert shown is not None
        with self._catalog.db.transaction():
            self._catalog.db.execute(
                "UPDATE inodes SET mode = ?, uid = ?, gid = ?, mtime_ns = ?, version_mtime_ns = ?,"
                " digest = ?, needs_head = 0 WHERE ino = ? AND needs_head",
                (
                    shown.mode,
                    shown.uid,
                    shown.gid,
                    shown.mtime_ns,
                    shown.mtime_ns,
                    shown.digest,
                    ino,
                ),
            )
            self._set_xattrs(ino, shown.xattrs)

    def _set_xattrs(self, ino: int, xattrs: dict[str, bytes]) -> None:
        for name, value in xattrs.items():
            self._catalog.db.execute(
                "INSERT OR REPLACE INTO xattrs VALUES (?, ?, ?)", (ino, os.fsencode(name), value)
            )

    def _remove(self, parent: int, name: bytes, inode: Inode, changes: Changes) -> None:
        db = self._catalog.db
        for child in [*self._catalog.below(inode.ino), inode]:
            changes.removed.append((name if child.ino == inode.ino else b"", child))
            db.execute("DELETE FROM names WHERE ino = ?", (child.ino,))
            db.execute("UPDATE inodes SET nlink = 0 WHERE ino = ?", (child.ino,))
        if inode.is_dir:
            db.execute("UPDATE inodes SET nlink = nlink - 1 WHERE ino = ?", (parent,))
