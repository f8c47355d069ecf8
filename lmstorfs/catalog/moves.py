"""What a change of names means for the store: which object goes where, inside one transaction.

A version that was never stored leaves nothing to do, a stored one leaves a journal entry.
"""

from collections.abc import Callable, Iterator

from lmstorfs.catalog.catalog import Entry, Inode
from lmstorfs.catalog.contents import Contents
from lmstorfs.catalog.database import Database
from lmstorfs.catalog.guarded import Guarded
from lmstorfs.catalog.journal import Journal


class Moves:
    """The store's side of one catalog's names."""

    def __init__(
        self,
        db: Database,
        journal: Journal,
        contents: Contents,
        guarded: Guarded,
        children: Callable[[int], list[Entry]],
        below: Callable[[int], Iterator[Inode]],
    ) -> None:
        self._db = db
        self._journal = journal
        self._contents = contents
        self._guarded = guarded
        self._children = children
        self._below = below

    def made(self, inode: Inode, key: str) -> None:
        """A new inode got the name `key`."""
        left = self._guarded.vacate(key, is_file=inode.is_file, alone=inode.is_dir)
        if left is not None:
            self._set_stored_key(inode.ino, left)

    def unlinked(self, inode: Inode) -> None:
        """A file or symlink lost its name."""
        if self._guarded.keeps(inode.ino):
            self._guarded.settle_object(inode.ino)
        elif inode.stored_key is not None:
            self._journal.delete(inode.stored_key)

    def came_back(self, inode: Inode, key: str) -> None:
        """An inode that had lost its name has one again."""
        left = self._guarded.vacate(key, is_file=True)
        if inode.stored_key is None:
            self._set_stored_key(inode.ino, left)
        elif inode.stored_key != key:
            self._journal.rename(inode.stored_key, key, is_dir=False)
            self._set_stored_key(inode.ino, key)
        self._contents.claim_above(key)

    def moved(self, inode: Inode, new_key: str, target: Inode | None) -> None:
        """`inode` has moved to `new_key`, and replaced `target` there.

        A file whose content the store never had inherits the object that it replaces: the next
        upload overwrites it, so that the store is never without a whole version.
        """
        old_object = self._object_left(inode, new_key, target)
        if inode.is_dir:
            self._directory_moved(inode, new_key, old_object)
        elif inode.stored_key is not None and inode.stored_version > 0:
            self._journal.rename(inode.stored_key, new_key, is_dir=False)
            self._set_stored_key(inode.ino, new_key)
            self._contents.claim_above(new_key)
        else:
            if inode.stored_key is not None:  # inherited from what it replaced earlier
                self._journal.delete(inode.stored_key)
            self._set_stored_key(inode.ino, old_object)

    def _object_left(self, inode: Inode, new_key: str, target: Inode | None) -> str | None:
        """Return the object at `new_key` that what comes there is to replace."""
        own = target.stored_key if target is not None else None
        if target is not None and own is not None and self._guarded.keeps(target.ino):
            if self._guarded.gives_up_object(target.ino):
                self._guarded.forget_object(target.ino)
            else:
                own = None  # it has to make way
        left = self._guarded.vacate(new_key, is_file=inode.is_file)
        return own if own is not None else left

    def _directory_moved(self, inode: Inode, new_key: str, old_object: str | None) -> None:
        if old_object is not None:
            self._journal.remove_directory(old_object)
        if inode.stored_key is not None or self._any_stored_below(inode.ino):
            old_key = inode.stored_key
            if old_key is None:
                old_key = self._key_of_stored_child(inode.ino)
            self._journal.rename(old_key, new_key, is_dir=True)
            self._rebase_stored(inode.ino, old_key, new_key)
            self._guarded.moved(old_key, new_key)
            self._contents.claim_above(new_key)

    def _any_stored_below(self, ino: int) -> bool:
        return any(child.stored_key is not None for child in self._below(ino))

    def _key_of_stored_child(self, ino: int) -> str:
        """Return the key under which the store knows a directory that has no entry of its own."""
        for entry in self._children(ino):
            if entry.inode.stored_key is not None:
                return entry.inode.stored_key.rpartition("/")[0]
            if entry.inode.is_dir and self._any_stored_below(entry.inode.ino):
                return self._key_of_stored_child(entry.inode.ino).rpartition("/")[0]
        raise AssertionError("only called where something below is stored")

    def _rebase_stored(self, ino: int, old_key: str, new_key: str) -> None:
        self._db.execute(
            "UPDATE inodes SET stored_key = ? || substr(stored_key, length(?) + 1)"
            " WHERE stored_key IS NOT NULL AND (ino = ? OR ino IN (WITH RECURSIVE tree(ino) AS"
            " (SELECT ino FROM names WHERE parent = ? UNION ALL"
            " SELECT n.ino FROM names n JOIN tree t ON n.parent = t.ino) SELECT ino FROM tree))",
            (new_key, old_key, ino, ino),
        )

    def _set_stored_key(self, ino: int, key: str | None) -> None:
        self._db.execute("UPDATE inodes SET stored_key = ? WHERE ino = ?", (key, ino))
