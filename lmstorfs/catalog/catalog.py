"""The catalog's records: what is known of a file, and what the store must still be told.

Kept apart from the engine (SQLite in `database.py`) so that another engine can hold the same
records.
"""

import os
import stat

import msgspec

ROOT_INO = 1


class Inode(msgspec.Struct, frozen=True):
    """One file, directory or symlink. Field order is the order of the table's columns."""

    ino: int
    mode: int
    """Type and permission bits, as in `st_mode`."""
    uid: int
    gid: int
    size: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    nlink: int
    rdev: int
    target: bytes | None
    """A symlink's target."""
    writing: int
    """1 while a writer has the file open: after a crash its content is in doubt."""
    sealed: int
    """1 when a close or fsync vouched for the content; 0 before, and after a crash in a write."""
    version: int
    """Number of the newest closed version; 0 where there was none yet. Only grows."""
    digest: str | None
    """xxh3-128 of that version; None until it has been computed."""
    closed_at: float | None
    """When that version was closed here, seconds since the epoch; None for the store's own."""
    tier: str | None
    """The tier that holds the content; None where only the store does."""
    stored_version: int
    """The version that the store holds under `stored_key`; 0: none of this file's."""
    stored_key: str | None
    """The object that the store will hold for this inode once the journal is empty."""
    etag: str | None
    """The store's ETag of it; None where it must be learned from the next listing."""
    attrs_dirty: int
    """1 when the store's copy of mode, owner, mtime or xattrs is behind."""
    needs_head: int
    """1 when only a listing was seen: mode, owner and mtime are not known yet."""
    version_size: int
    """Bytes of the newest closed version; `size` may be ahead of it while a writer is there."""
    version_mtime_ns: int
    """mtime of the tier's file when that version was closed: tells whether it still is it."""

    @property
    def is_dir(self) -> bool:
        """Whether it is a directory."""
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        """Whether it is a regular file."""
        return stat.S_ISREG(self.mode)

    @property
    def is_symlink(self) -> bool:
        """Whether it is a symlink."""
        return stat.S_ISLNK(self.mode)

    @property
    def dirty(self) -> bool:
        """Whether a closed version waits to be brought to the store."""
        return self.version != self.stored_version

    def is_version(self, found: os.stat_result) -> bool:
        """Whether the tier's file, which shows `found`, still is the newest closed version."""
        known = (self.version_size, self.version_mtime_ns)
        return self.version > 0 and (found.st_size, found.st_mtime_ns) == known

    @property
    def torn(self) -> bool:
        """Whether a crash left content that no close or fsync ever vouched for."""
        return bool(self.writing) and not self.sealed


class Entry(msgspec.Struct, frozen=True):
    """One name in a directory; `cookie` orders the names and never changes."""

    cookie: int
    name: bytes
    inode: Inode


class JournalEntry(msgspec.Struct, frozen=True):
    """Something that the store must still be told: `delete`, `rename`, `rmdir`, `abort`.

    `new_key` is where a rename leads, and an abort's upload id.
    """

    seq: int
    op: str
    key: str
    new_key: str | None
    is_dir: int

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the one or two keys that it is about."""
        if self.op == "rename" and self.new_key is not None:
            return (self.key, self.new_key)
        return (self.key,)

    def touches(self, key: str) -> bool:
        """Whether this entry changes what lies at, above or below `key`."""
        return any(
            key == mine or key.startswith(mine + "/") or mine.startswith(key + "/")
            for mine in self.keys
        )

    def moves(self, key: str) -> str | None:
        """Return where the object at `key` is after this entry; None when it is gone."""
        if self.op == "rename" and self.new_key is not None:
            if key == self.key:
                return self.new_key
            if self.is_dir and key.startswith(self.key + "/"):
                return self.new_key + key[len(self.key) :]
            if key == self.new_key:
                return None
        if self.op == "delete" and key == self.key:
            return None
        return key


class Pending(msgspec.Struct, frozen=True):
    """What the store does not hold yet."""

    files: int
    bytes: int
    oldest_closed_at: float | None
