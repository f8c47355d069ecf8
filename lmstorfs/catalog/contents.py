"""Contents and their versions: who is writing, what was closed, what the store has.

The life of a version: `begin_writing` → `close_version` → (`end_writing`) → `stored`.
Every step is one transaction and is committed before the call that it answers returns, so after
a crash the rows say which contents some close or fsync vouched for.
"""

import os
import stat
import time
from collections.abc import Callable

from lmstorfs.catalog.catalog import ROOT_INO, Inode, Pending
from lmstorfs.catalog.database import Database
from lmstorfs.catalog.journal import Journal, ancestors
from lmstorfs.store.store import Kind, ObjectInfo

# The words of the partial index, so that SQLite uses it.
_BEHIND = "(version != stored_version OR attrs_dirty)"
_REGULAR = f"(mode & {stat.S_IFMT(0o177777)}) = {stat.S_IFREG}"
_HERE = f"(tier IS NOT NULL OR NOT {_REGULAR} OR version = stored_version)"
_SOME = 32  # more files than are open in one directory at one time, mostly
_FLUSHABLE = f"{_BEHIND} AND nlink > 0 AND (sealed OR NOT writing) AND {_HERE}"


class Contents:
    """The content side of the catalog."""

    def __init__(
        self, db: Database, journal: Journal, path_of: Callable[[int], str | None]
    ) -> None:
        """Take `path_of`: where the store is to have an inode."""
        self._db = db
        self._journal = journal
        self._path_of = path_of

    # --- writers -----------------------------------------------------------------------------

    def begin_writing(self, ino: int, tier: str) -> None:
        """A writer opens the file, whose content is in `tier`."""
        self._db.execute("UPDATE inodes SET writing = 1, tier = ? WHERE ino = ?", (tier, ino))

    def close_version(self, ino: int, size: int, mtime_ns: int, *, writing: bool) -> int:
        """What the tier holds is a new version; return its number."""
        now = time.time_ns()
        with self._db.transaction():
            version = self._db.next_version()
            self._db.execute(
                "UPDATE inodes SET size = ?, mtime_ns = ?, ctime_ns = ?, sealed = 1, writing = ?,"
                " version = ?, digest = NULL, closed_at = ?, version_size = ?,"
                " version_mtime_ns = ? WHERE ino = ?",
                (size, mtime_ns, now, int(writing), version, now / 1e9, size, mtime_ns, ino),
            )
        return version

    def roll_back(self, ino: int, version: int, size: int, digest: str) -> None:
        """No copy is left of the newest version: an older one takes its place."""
        self._db.execute(
            "UPDATE inodes SET version = ?, size = ?, version_size = ?, digest = ?, sealed = 1,"
            " writing = 0 WHERE ino = ?",
            (version, size, size, digest, ino),
        )

    def set_times(self, ino: int, atime_ns: int, mtime_ns: int, *, of_version: bool) -> None:
        """Someone set the times; `of_version`: the content is still the newest version's."""
        with self._db.transaction():
            self._db.execute(
                "UPDATE inodes SET atime_ns = ?, mtime_ns = ?, ctime_ns = ?,"
                " attrs_dirty = (stored_key IS NOT NULL AND stored_key != '') WHERE ino = ?",
                (atime_ns, mtime_ns, time.time_ns(), ino),
            )
            if of_version:
                self._db.execute(
                    "UPDATE inodes SET version_mtime_ns = ? WHERE ino = ?", (mtime_ns, ino)
                )

    def doubt(self, ino: int) -> None:
        """A daemon died while the file was being written: nobody vouches for its content."""
        self._db.execute("UPDATE inodes SET writing = 1, sealed = 0 WHERE ino = ?", (ino,))

    def end_writing(self, ino: int) -> None:
        """The last writer is gone and left the newest version as it was."""
        self._db.execute("UPDATE inodes SET writing = 0 WHERE ino = ?", (ino,))

    def set_digest(self, ino: int, version: int, digest: str) -> None:
        """The digest of a version is known; ignored where a newer one was closed meanwhile."""
        self._db.execute(
            "UPDATE inodes SET digest = ? WHERE ino = ? AND version = ?", (digest, ino, version)
        )

    def set_tier(self, ino: int, tier: str | None) -> None:
        """The content is now in `tier`; None: only in the store."""
        self._db.execute("UPDATE inodes SET tier = ? WHERE ino = ?", (tier, ino))

    def set_target(self, ino: int, target: bytes) -> None:
        """The store told where a symlink points."""
        self._db.execute(
            "UPDATE inodes SET target = ?, size = ? WHERE ino = ?", (target, len(target), ino)
        )

    # --- the store ---------------------------------------------------------------------------

    def dirty(self, limit: int, offset: int = 0) -> list[Inode]:
        """Return what the flusher may bring to the store, the longest closed first."""
        return self._db.inodes(
            f"WHERE {_FLUSHABLE} ORDER BY closed_at LIMIT ? OFFSET ?", (limit, offset)
        )

    def awaits_children(self, directory: int) -> list[Inode]:
        """Return some of what is still to come into this directory of the store.

        What nobody writes comes first.
        """
        return self._db.inodes(
            "JOIN names n ON n.ino = i.ino WHERE n.parent = ?"
            f" AND version != stored_version AND {_FLUSHABLE} ORDER BY writing LIMIT {_SOME}",
            (directory,),
        )

    def pending(self) -> Pending:
        """Return how much the store does not hold yet."""
        row = self._db.execute(
            "SELECT COUNT(*),"
            " TOTAL(CASE WHEN version != stored_version THEN version_size ELSE 0 END),"
            f" MIN(closed_at) FROM inodes WHERE {_FLUSHABLE}"
        ).fetchone()
        return Pending(int(row[0]), int(row[1]), row[2])

    def dirty_bytes(self, tier: str) -> int:
        """Return the bytes in a tier that the store does not hold yet."""
        row = self._db.execute(
            "SELECT TOTAL(size) FROM inodes WHERE tier = ? AND nlink > 0"
            " AND (version != stored_version OR writing)",
            (tier,),
        ).fetchone()
        return int(row[0])

    def torn(self) -> list[Inode]:
        """Return the files that are being written, or were when a daemon died."""
        return self._db.inodes("WHERE writing")

    def recent(self, limit: int) -> list[Inode]:
        """Return the files closed here last, newest first."""
        return self._db.inodes(
            f"WHERE closed_at IS NOT NULL AND nlink > 0 AND {_REGULAR}"
            " ORDER BY closed_at DESC LIMIT ?",
            (limit,),
        )

    def stored_bytes(self) -> int:
        """Return the bytes of all files whose newest version the store holds."""
        row = self._db.execute(
            "SELECT TOTAL(size) FROM inodes WHERE version = stored_version AND nlink > 0"
            f" AND {_REGULAR}"
        ).fetchone()
        return int(row[0])

    def stored(
        self, ino: int, version: int, key: str, info: ObjectInfo, *, attributes_changed: bool
    ) -> None:
        """The store now holds `version` at `key`.

        The file may have been renamed, replaced or unlinked while it was on its way: then the
        object is sent after it, left for the upload that will replace it, or deleted. What the
        journal says of `key` waited for this upload, so all of it comes after it.
        """
        with self._db.transaction():
            self.upload_ended(ino)
            is_dir = info.kind is Kind.DIRECTORY
            path = self._path_of(ino)
            waits = self._journal.blocks(key)
            where = self._journal.future_key(key) if waits else key
            nested = path is not None and (path.startswith(key + "/") or key.startswith(path + "/"))
            if path is None or (where != path and (waits or nested)):
                self._leftover(key, is_dir=is_dir)
                return
            if where != path:
                self._journal.rename(key, path, is_dir=is_dir)
                self._tidy_above(key)
            self._db.execute(
                "UPDATE inodes SET stored_version = ?, stored_key = ?, etag = ?, needs_head = 0,"
                " attrs_dirty = ?, digest = CASE WHEN version = ? THEN ? ELSE digest END"
                " WHERE ino = ?",
                (version, path, info.etag if path == key else None, int(attributes_changed),
                 version, info.attributes.digest if info.attributes else None, ino),
            )  # fmt: skip
            self.claim_above(path)

    def given_up(self, ino: int, key: str, *, is_dir: bool = False) -> None:
        """An upload to `key` ended and nobody knows how: the store may hold all of it, or parts.

        The object counts as one that the next upload replaces, or is deleted; a multipart upload
        is aborted for as long as it takes.
        """
        with self._db.transaction():
            row = self._db.execute("SELECT upload_id FROM uploads WHERE ino = ?", (ino,)).fetchone()
            self.upload_ended(ino)
            path = self._path_of(ino)
            if path is not None and self._journal.future_key(key) == path:
                self._claim(ino, path)
                self.claim_above(path)
            else:
                self._leftover(key, is_dir=is_dir)
            if row is not None and row[0] is not None:
                self._journal.abort(key, row[0])

    def recover_uploads(self) -> None:
        """The daemon that these uploads belonged to is dead."""
        for ino, key, upload_id in self.uploads():
            is_dir = key.endswith("/")
            with self._db.transaction():
                self.given_up(ino, key.rstrip("/"), is_dir=is_dir)
                if upload_id is None and not is_dir:
                    self._journal.abort(key, "")  # one may have begun that it never heard of

    def _leftover(self, key: str, *, is_dir: bool) -> None:
        """What lies at `key` belongs to nobody: leave it to the file of that name, or delete it.

        Where the journal speaks of `key`, all of it is still to be done, so the deletes go ahead.
        """
        ahead = self._journal.blocks(key)
        where = self._journal.future_key(key)
        if where is None and not self._journal.in_the_way(key):
            return  # what waits deletes or replaces it
        owner = None if where is None else self.at(where)
        fits = owner is not None and owner.is_dir == is_dir and (is_dir or not ahead)
        if fits and owner is not None and where is not None:
            self._claim(owner.ino, where)
            self.claim_above(where)
            return
        if ahead:  # each goes before the last
            self._tidy_above(key, ahead=True)
        if not is_dir:
            self._journal.delete(key, ahead=ahead)
        else:
            if ahead and where is not None:  # again, once what waits has emptied it
                self._journal.remove_directory(where)
            self._journal.remove_directory(key, ahead=ahead)
        if not ahead:
            self._tidy_above(key)

    def _tidy_above(self, key: str, *, ahead: bool = False) -> None:
        """An upload made the directories above `key`: those that no longer are go again."""
        gone = []
        for above in ancestors(key):
            where = self._journal.future_key(above)
            owner = None if where is None else self.at(where)
            if owner is not None and where is not None and owner.is_dir:
                self._claim(owner.ino, where)
            elif where is not None or self._journal.in_the_way(above):
                gone.append(above)
        for above in reversed(gone) if ahead else gone:
            self._journal.remove_directory(above, ahead=ahead)

    def drop_objects(self, keys: list[str]) -> None:
        """These objects belong to nobody any more, and the directories above them may be empty."""
        for key in keys:
            self._journal.delete(key)
        for key in {key.rpartition("/")[0]: key for key in keys}.values():
            self._tidy_above(key)

    def claim_above(self, key: str) -> None:
        """The store has made the directories above `key`, whatever it knows of them."""
        for above in ancestors(key):
            owner = self.at(above)
            if owner is not None and owner.stored_key is None:
                self._claim(owner.ino, above)

    def _claim(self, ino: int, key: str) -> None:
        self._db.execute(
            "UPDATE inodes SET stored_key = ? WHERE ino = ? AND stored_key IS NULL", (key, ino)
        )

    def at(self, key: str) -> Inode | None:
        """Return the inode whose path is `key` now, without following symlinks."""
        ino = ROOT_INO
        for part in filter(None, os.fsencode(key).split(b"/")):
            row = self._db.execute(
                "SELECT ino FROM names WHERE parent = ? AND name = ?", (ino, part)
            ).fetchone()
            if row is None:
                return None
            ino = row[0]
        return self._db.inode("WHERE i.ino = ?", (ino,))

    def kept_here(self, ino: int) -> None:
        """The store has no form for it (a FIFO): the catalog alone holds it."""
        self._db.execute("UPDATE inodes SET stored_version = version WHERE ino = ?", (ino,))

    def attributes_stored(self, inode: Inode, etag: str | None) -> None:
        """The store's attributes are those of `inode`, as it was read."""
        self._db.execute(
            "UPDATE inodes SET attrs_dirty = 0, etag = COALESCE(?, etag)"
            " WHERE ino = ? AND ctime_ns = ? AND attrs_dirty = ?",
            (etag, inode.ino, inode.ctime_ns, inode.attrs_dirty),
        )

    def attributes_behind(self, ino: int) -> None:
        """The store's attributes of `ino` must be written again, also where that is under way."""
        self._db.execute(
            "UPDATE inodes SET attrs_dirty = attrs_dirty + 1"
            " WHERE ino = ? AND stored_key IS NOT NULL AND stored_key != ''",
            (ino,),
        )

    def set_etags(self, etags: dict[str, str | None]) -> None:
        """The objects at these keys have these ETags now (None: learn it from a listing)."""
        with self._db.transaction():
            for key, etag in etags.items():
                self._db.execute("UPDATE inodes SET etag = ? WHERE stored_key = ?", (etag, key))

    def forget_etags_below(self, key: str) -> None:
        """Objects below `key` were moved by the store: their ETags must be learned again."""
        self._db.execute(
            "UPDATE inodes SET etag = NULL WHERE stored_key >= ? AND stored_key < ?",
            (key + "/", key + "0"),
        )

    def lost_in_store(self, key: str) -> None:
        """The store lost the object that was to lie at `key`: bring what a tier has again."""
        self._db.execute(
            "UPDATE inodes SET stored_version = 0, stored_key = NULL, etag = NULL"
            f" WHERE stored_key = ? AND (tier IS NOT NULL OR NOT {_REGULAR})",
            (key,),
        )

    # --- uploads under way -------------------------------------------------------------------

    def upload_began(self, ino: int, key: str, upload_id: str | None = None) -> None:
        """An upload to `key` is under way; whoever finds the row after a crash can clean up.

        A directory's key ends with `/`.
        """
        self._db.execute("INSERT OR REPLACE INTO uploads VALUES (?, ?, ?)", (ino, key, upload_id))

    def upload_ended(self, ino: int) -> None:
        """Nothing of the upload is left in the air."""
        self._db.execute("DELETE FROM uploads WHERE ino = ?", (ino,))

    def uploads(self) -> list[tuple[int, str, str | None]]:
        """Return (inode, key, upload id) of the uploads under way."""
        return list(self._db.execute("SELECT ino, key, upload_id FROM uploads"))
