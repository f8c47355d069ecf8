"""What the store must still be told of names: deletes and renames, in the order they happened.

An entry is written in the transaction that changes the namespace and removed when the store has
done it; every entry may be repeated, so a crash between the two is harmless. Uploads to a key
wait for the entries that touch it (`blocks`), and entries wait for uploads under way.
"""

from collections import Counter

from lmstorfs.catalog.catalog import JournalEntry
from lmstorfs.catalog.database import Database


class Journal:
    """The ordered list of what the store must still do. Kept in memory as well: it is short."""

    def __init__(self, db: Database) -> None:
        self._db = db
        rows = db.execute("SELECT seq, op, key, new_key, is_dir FROM journal ORDER BY seq")
        self._entries: dict[int, JournalEntry] = {}
        self._exact: Counter[str] = Counter()  # keys of entries: `blocks` must not scan them all
        self._above: Counter[str] = Counter()  # the directories above those keys
        for row in rows.fetchall():
            self._remember(JournalEntry(*row))

    def _remember(self, entry: JournalEntry, sign: int = 1) -> None:
        if sign > 0:
            self._entries[entry.seq] = entry
        for key in (entry.key, entry.new_key):
            if key is not None:
                self._exact[key] += sign
                for above in _ancestors(key):
                    self._above[above] += sign
                    if not self._above[above]:
                        del self._above[above]
                if not self._exact[key]:
                    del self._exact[key]

    def _add(self, op: str, key: str, new_key: str | None, is_dir: bool) -> None:
        cursor = self._db.execute(
            "INSERT INTO journal (op, key, new_key, is_dir) VALUES (?, ?, ?, ?)",
            (op, key, new_key, int(is_dir)),
        )
        seq = cursor.lastrowid
        assert seq is not None
        self._remember(JournalEntry(seq, op, key, new_key, int(is_dir)))

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
            entry = self._entries.pop(seq, None)
            if entry is not None:
                self._remember(entry, -1)

    def blocks(self, key: str) -> bool:
        """Whether an entry that touches `key` is still to be done."""
        if not self._entries:
            return False
        return (
            key in self._exact
            or key in self._above
            or any(above in self._exact for above in _ancestors(key))
        )

    def future_key(self, key: str) -> str | None:
        """Return where the object that is now at `key` will be; None when it will be gone."""
        current: str | None = key
        for entry in self._entries.values():
            if current is None:
                return None
            current = entry.moves(current)
        return current


def _ancestors(key: str) -> list[str]:
    """Return the directories above `key`, nearest first."""
    found = []
    while "/" in key:
        key = key.rpartition("/")[0]
        found.append(key)
    return found
