"""What the store must still be told of names: deletes and renames, in the order they happened.

An entry is written in the transaction that changes the namespace and removed when the store has
done it; every entry may be repeated, so a crash between the two is harmless. Uploads to a key
wait for the entries that touch it (`blocks`), and entries wait for uploads under way.
"""

from lmstorfs.catalog.catalog import JournalEntry
from lmstorfs.catalog.database import Database


class Journal:
    """The ordered list of what the store must still do. Kept in memory as well: it is short."""

    def __init__(self, db: Database) -> None:
        self._db = db
        rows = db.execute("SELECT seq, op, key, new_key, is_dir FROM journal ORDER BY seq")
        self._entries: dict[int, JournalEntry] = {row[0]: JournalEntry(*row) for row in rows}

    def _add(self, op: str, key: str, new_key: str | None, is_dir: bool) -> None:
        cursor = self._db.execute(
            "INSERT INTO journal (op, key, new_key, is_dir) VALUES (?, ?, ?, ?)",
            (op, key, new_key, int(is_dir)),
        )
        seq = cursor.lastrowid
        assert seq is not None
        self._entries[seq] = JournalEntry(seq, op, key, new_key, int(is_dir))

    def delete(self, key: str) -> None:
        """The object `key` is to go."""
        self._add("delete", key, None, False)

    def remove_directory(self, key: str) -> None:
        """The directory `key` is to go, once empty."""
        self._add("rmdir", key, None, True)

    def rename(self, old: str, new: str, *, is_dir: bool) -> None:
        """The object or directory `old` is to become `new`."""
        self._add("rename", old, new, is_dir)

    def entries(self) -> list[JournalEntry]:
        """Return what is still to be done, oldest first."""
        return list(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def done(self, seqs: list[int]) -> None:
        """The store has done these."""
        with self._db.transaction():
            for seq in seqs:
                self._db.execute("DELETE FROM journal WHERE seq = ?", (seq,))
        for seq in seqs:
            self._entries.pop(seq, None)

    def blocks(self, key: str) -> bool:
        """Whether an entry that touches `key` is still to be done."""
        return any(entry.touches(key) for entry in self._entries.values())

    def future_key(self, key: str) -> str | None:
        """Return where the object that is now at `key` will be; None when it will be gone."""
        current: str | None = key
        for entry in self._entries.values():
            if current is None:
                return None
            current = entry.moves(current)
        return current
