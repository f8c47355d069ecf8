"""What the store must still be told of names: deletes and renames, in the order they happened.

An entry is written in the transaction that changes the namespace and removed when the store has
done it; every entry may be repeated, so a crash between the two is harmless. Uploads to a key
wait for the entries that touch it (`blocks`), and entries wait for uploads under way.
"""

from collections import Counter
from collections.abc import Callable

from lmstorfs.catalog.catalog import JournalEntry
from lmstorfs.catalog.database import Database


class Journal:
    """The ordered list of what the store must still do. Kept in memory as well: it is short."""

    def __init__(self, db: Database) -> None:
        self._db = db
        rows = db.execute("SELECT seq, op, key, new_key, is_dir FROM journal ORDER BY seq")
        self.on_added: Callable[[], None] = lambda: None
        """Called when something was added; the transaction may still be open."""
        self._entries: dict[int, JournalEntry] = {}
        self._exact: Counter[str] = Counter()  # keys of entries: `blocks` must not scan them all
        self._above: Counter[str] = Counter()  # the directories above those keys
        for row in rows.fetchall():
            self._remember(JournalEntry(*row))

    def _remember(self, entry: JournalEntry, sign: int = 1) -> None:
        if sign > 0:
            self._entries[entry.seq] = entry
        for key in entry.keys:
            self._exact[key] += sign
            for above in ancestors(key):
                self._above[above] += sign
                if not self._above[above]:
                    del self._above[above]
            if not self._exact[key]:
                del self._exact[key]

    def _add(
        self, op: str, key: str, new_key: str | None, *, is_dir: bool, ahead: bool = False
    ) -> None:
        first = min(self._entries, default=None)
        cursor = self._db.execute(
            "INSERT INTO journal (seq, op, key, new_key, is_dir) VALUES (?, ?, ?, ?, ?)",
            (first - 1 if ahead and first is not None else None, op, key, new_key, int(is_dir)),
        )
        seq = cursor.lastrowid
        assert seq is not None
        self._remember(JournalEntry(seq, op, key, new_key, int(is_dir)))
        if ahead:
            self._entries = dict(sorted(self._entries.items()))
        self.on_added()

    def delete(self, key: str, *, ahead: bool = False) -> None:
        """The object `key` is to go; `ahead`: before all that waits already."""
        self._add("delete", key, None, is_dir=False, ahead=ahead)

    def remove_directory(self, key: str, *, ahead: bool = False) -> None:
        """The directory `key` is to go, where it is empty."""
        self._add("rmdir", key, None, is_dir=True, ahead=ahead)

    def abort(self, key: str, upload_id: str) -> None:
        """The multipart upload `upload_id` to `key`, or its temporary file, is to go."""
        self._add("abort", key, upload_id, is_dir=False)

    def rename(self, old: str, new: str, *, is_dir: bool) -> None:
        """The object or directory `old` is to become `new`."""
        self._add("rename", old, new, is_dir=is_dir)

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
            or any(above in self._exact for above in ancestors(key))
        )

    def future_key(self, key: str) -> str | None:
        """Return where the object that is now at `key` will be; None when it will be gone."""
        return self._follow(key)[0]

    def in_the_way(self, key: str) -> bool:
        """Whether a directory is to be moved to where nobody knew of the object at `key`."""
        return self._follow(key)[1]

    def _follow(self, key: str) -> tuple[str | None, bool]:
        current: str | None = key
        for entry in self._entries.values():
            if entry.op == "rename" and entry.is_dir and key.startswith(f"{entry.new_key}/"):
                return None, True
            current = entry.moves(key)
            if current is None:
                return None, False
            key = current
        return key, False


def ancestors(key: str) -> list[str]:
    """Return the directories above `key`, nearest first."""
    found = []
    while "/" in key:
        key = key.rpartition("/")[0]
        found.append(key)
    return found
