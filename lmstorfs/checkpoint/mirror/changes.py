"""Which rows of the catalog changed since the mirror was told last.

Triggers of this one connection note table and key of whatever changes; what is sent is the row as
it is by then, so that a file that is written, renamed and deleted at once costs one message. With
all rows noted at the start of a connection the mirror gets the whole catalog the same way.

Texts travel as SQLite has them (`Database` quotes names that are not UTF-8).
"""

from typing import Any

from lmstorfs.catalog.database import Database

# Table → the column that its rows are noted and sent by.
TABLES = {
    "inodes": "ino",
    "names": "cookie",
    "xattrs": "ino",
    "journal": "seq",
    "uploads": "ino",
    "guarded": "ino",
}
Changed = tuple[str, int, list[list[Any]]]


class Changes:
    """The changes of one catalog, from now on."""

    def __init__(self, db: Database) -> None:
        self._connection = db.connection
        self._connection.execute(
            "CREATE TEMP TABLE changed (tbl TEXT, key INTEGER, PRIMARY KEY (tbl, key))"
            " WITHOUT ROWID"
        )
        for table, key in TABLES.items():
            for event, row in (("INSERT", "NEW"), ("UPDATE", "NEW"), ("DELETE", "OLD")):
                self._connection.execute(
                    f"CREATE TEMP TRIGGER {table}_{event} AFTER {event} ON main.{table} BEGIN"
                    f" INSERT OR IGNORE INTO changed VALUES ('{table}', {row}.{key}); END"
                )

    def __len__(self) -> int:
        """How many rows wait to be sent."""
        (count,) = self._connection.execute("SELECT COUNT(*) FROM changed").fetchone()
        return int(count)

    def pending(self) -> bool:
        """Whether any row waits to be sent."""
        return self._connection.execute("SELECT 1 FROM changed LIMIT 1").fetchone() is not None

    def all_again(self) -> None:
        """Note every row: the mirror is to have the whole catalog."""
        for table, key in TABLES.items():
            self._connection.execute(
                f"INSERT OR IGNORE INTO changed SELECT '{table}', {key} FROM main.{table}"
            )

    def take(self, limit: int) -> list[Changed]:
        """Return up to `limit` changes, which are not noted any more."""
        noted = self._connection.execute(
            "SELECT tbl, key FROM changed LIMIT ?", (limit,)
        ).fetchall()
        found = [(table, key, self._rows(table, key)) for table, key in noted]
        self._connection.executemany("DELETE FROM changed WHERE tbl = ? AND key = ?", noted)
        return found

    def put_back(self, changes: list[Changed]) -> None:
        """The mirror did not get these."""
        self._connection.executemany(
            "INSERT OR IGNORE INTO changed VALUES (?, ?)",
            [(table, key) for table, key, _ in changes],
        )

    def _rows(self, table: str, key: int) -> list[list[Any]]:
        factory, self._connection.text_factory = self._connection.text_factory, str
        try:
            rows = self._connection.execute(
                f"SELECT * FROM main.{table} WHERE {TABLES[table]} = ?", (key,)
            )
            return [list(row) for row in rows]
        finally:
            self._connection.text_factory = factory


def apply(db: Database, changes: list[Changed]) -> None:
    """Bring the changes into a copy of the catalog, inside the caller's transaction.

    Raises `KeyError` for a table that is none of ours, `sqlite3.Error` for rows that do not fit.
    """
    for table, key, rows in changes:
        db.connection.execute(f"DELETE FROM {table} WHERE {TABLES[table]} = ?", (key,))
        for row in rows:
            marks = ", ".join("?" * len(row))
            db.connection.execute(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", row)


def clear(db: Database) -> None:
    """Forget all rows, inside the caller's transaction."""
    for table in TABLES:
        db.connection.execute(f"DELETE FROM {table}")
