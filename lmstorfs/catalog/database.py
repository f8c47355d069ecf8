"""The catalog's SQLite database: schema, connection, transactions.

WAL with `synchronous=NORMAL`: a committed transaction survives the death of the daemon at any
instruction; a power cut may lose the last ones, and with it the RAM tier that they speak of.
One connection, used from the daemon's one thread.
"""

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lmstorfs.catalog.catalog import ROOT_INO, Inode
from lmstorfs.errors import SetupError
from lmstorfs.store.keys import quote_name, unquote_name

SCHEMA_VERSION = 1
_SLOTS = 1024  # requests whose answer may be lost when the daemon dies: never nearly as many
_CACHE_KIB = 64 << 10  # bounds the daemon's memory however many inodes there are

_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS inodes (
    ino INTEGER PRIMARY KEY AUTOINCREMENT,
    mode INTEGER NOT NULL, uid INTEGER NOT NULL, gid INTEGER NOT NULL, size INTEGER NOT NULL,
    atime_ns INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, ctime_ns INTEGER NOT NULL,
    nlink INTEGER NOT NULL, rdev INTEGER NOT NULL, target BLOB,
    writing INTEGER NOT NULL, sealed INTEGER NOT NULL,
    version INTEGER NOT NULL, digest TEXT, closed_at REAL,
    tier TEXT, stored_version INTEGER NOT NULL, stored_key TEXT, etag TEXT,
    attrs_dirty INTEGER NOT NULL, needs_head INTEGER NOT NULL,
    version_size INTEGER NOT NULL, version_mtime_ns INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS names (
    cookie INTEGER PRIMARY KEY AUTOINCREMENT,
    parent INTEGER NOT NULL, name BLOB NOT NULL, ino INTEGER NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS names_by_name ON names (parent, name);
CREATE INDEX IF NOT EXISTS names_by_cookie ON names (parent, cookie);
CREATE INDEX IF NOT EXISTS names_by_ino ON names (ino);
CREATE INDEX IF NOT EXISTS inodes_dirty ON inodes (closed_at)
    WHERE version != stored_version OR attrs_dirty;
CREATE INDEX IF NOT EXISTS inodes_in_tier ON inodes (tier) WHERE tier IS NOT NULL;
CREATE INDEX IF NOT EXISTS inodes_closed ON inodes (closed_at) WHERE closed_at IS NOT NULL;
CREATE INDEX IF NOT EXISTS inodes_orphaned ON inodes (ino) WHERE nlink = 0;
CREATE INDEX IF NOT EXISTS inodes_writing ON inodes (ino) WHERE writing;
CREATE INDEX IF NOT EXISTS inodes_kept ON inodes (stored_key)
    WHERE nlink = 0 AND stored_key IS NOT NULL;
CREATE TABLE IF NOT EXISTS xattrs (
    ino INTEGER NOT NULL, name BLOB NOT NULL, value BLOB NOT NULL, PRIMARY KEY (ino, name)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS journal (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    op TEXT NOT NULL, key TEXT NOT NULL, new_key TEXT, is_dir INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS uploads (
    ino INTEGER PRIMARY KEY, key TEXT NOT NULL, upload_id TEXT
);
CREATE TABLE IF NOT EXISTS guarded (
    ino INTEGER PRIMARY KEY, path TEXT NOT NULL, checkpoint TEXT NOT NULL,
    deleted_at REAL NOT NULL, number INTEGER NOT NULL, version INTEGER NOT NULL,
    weights INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS guarded_by_set ON guarded (number, weights, deleted_at);
CREATE INDEX IF NOT EXISTS guarded_by_checkpoint ON guarded (checkpoint, number);
CREATE TABLE IF NOT EXISTS done (
    slot INTEGER PRIMARY KEY, number INTEGER NOT NULL, ino INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
INSERT OR IGNORE INTO meta VALUES ('schema', '{SCHEMA_VERSION}');
INSERT OR IGNORE INTO meta VALUES ('version', '1');
"""

COLUMNS = ", ".join(f"i.{field}" for field in Inode.__struct_fields__)


class Database:
    """One open catalog file."""

    def __init__(self, path: Path) -> None:
        """Open or create the database at `path`. Raises `SetupError` for a newer schema."""
        old_umask = os.umask(0o077)
        try:
            self.connection = sqlite3.connect(
                path, isolation_level=None, cached_statements=256, check_same_thread=False
            )
        finally:
            os.umask(old_umask)
        self.connection.text_factory = _as_text
        self._depth = 0
        self.on_change: Callable[[], None] = lambda: None
        """Called after each transaction."""
        execute = self.connection.execute
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = NORMAL")
        execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        execute("PRAGMA temp_store = MEMORY")
        self.connection.executescript(_SCHEMA)
        (schema,) = execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
        if int(schema) > SCHEMA_VERSION:
            self.close()
            raise SetupError(
                f"the catalog {path} was written by a newer lmstorfs (schema {schema}); "
                "upgrade lmstorfs or choose another --state"
            )
        self._make_root()

    def _make_root(self) -> None:
        now = time.time_ns()
        self.connection.execute(
            "INSERT OR IGNORE INTO inodes VALUES"
            " (?, ?, ?, ?, 0, ?, ?, ?, 2, 0, NULL, 0, 1, 1, NULL, NULL, NULL, 1, '', NULL, 0, 0,"
            " 0, 0)",
            (ROOT_INO, 0o040755, os.getuid(), os.getgid(), now, now, now),
        )

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make all that is executed inside one atomic change; may be nested."""
        if self._depth:
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
            return
        self.connection.execute("BEGIN IMMEDIATE")
        self._depth = 1
        try:
            yield
        except BaseException:
            self.connection.execute("ROLLBACK")
            raise
        else:
            self.connection.execute("COMMIT")
            self.on_change()
        finally:
            self._depth = 0

    @contextmanager
    def once(self, number: int) -> Iterator[Callable[[int], None]]:
        """One transaction that also says that the kernel's request `number` was done.

        Yields what takes the inode that came of it. See `done`.
        """
        made = 0

        def note(ino: int) -> None:
            nonlocal made
            made = ino

        with self.transaction():
            yield note
            self.execute(
                "INSERT OR REPLACE INTO done VALUES (?, ?, ?)", (number % _SLOTS, number, made)
            )

    def done(self, number: int) -> int | None:
        """Return the inode that came of the request `number` (0: none); None: not done yet."""
        row = self.execute(
            "SELECT ino FROM done WHERE slot = ? AND number = ?", (number % _SLOTS, number)
        ).fetchone()
        return None if row is None else int(row[0])

    def forget_done(self) -> None:
        """Another kernel connection begins, and counts its requests from the start."""
        self.execute("DELETE FROM done")

    def execute(self, sql: str, parameters: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        """Run one statement."""
        return self.connection.execute(sql, _as_sql(parameters))

    def inode(self, sql: str, parameters: tuple[Any, ...] = ()) -> Inode | None:
        """Return the first inode that `SELECT … FROM inodes i <sql>` yields."""
        found = self.execute(f"SELECT {COLUMNS} FROM inodes i {sql}", parameters).fetchone()
        return None if found is None else Inode(*found)

    def inodes(self, sql: str, parameters: tuple[Any, ...] = ()) -> list[Inode]:
        """Return all inodes that `SELECT … FROM inodes i <sql>` yields."""
        rows = self.execute(f"SELECT {COLUMNS} FROM inodes i {sql}", parameters)
        return [Inode(*row) for row in rows]

    def meta(self, key: str) -> str | None:
        """Return what is noted under `key`."""
        row = self.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def set_meta(self, key: str, value: str) -> None:
        """Note `value` under `key`."""
        self.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def next_version(self) -> int:
        """Return a number higher than any version of any file so far.

        So the versions of one name can be compared, whichever inodes had it.
        """
        row = self.execute(
            "UPDATE meta SET value = CAST(value AS INTEGER) + 1 WHERE key = 'version'"
            " RETURNING value"
        ).fetchone()
        return int(row[0])

    def versions_reach(self, version: int) -> None:
        """A version with this number was seen: those to come are higher."""
        self.execute(
            "UPDATE meta SET value = ? WHERE key = 'version' AND CAST(value AS INTEGER) < ?",
            (version, version),
        )

    def close(self) -> None:
        """Close the database; the write-ahead log is folded into it."""
        self.connection.close()


def _as_sql(parameters: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what SQLite takes: its texts are UTF-8, and a key may hold a name that is not."""
    if all(not isinstance(value, str) or value.isascii() for value in parameters):
        return parameters
    return tuple(quote_name(value) if isinstance(value, str) else value for value in parameters)


def _as_text(raw: bytes) -> str:
    """Return the text that `_as_sql` gave to SQLite."""
    return raw.decode() if raw.isascii() else unquote_name(raw.decode())
