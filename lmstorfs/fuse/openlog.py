"""Which files the kernel has open, written down outside the daemon, for the one that comes after.

A file of fixed-size records in the RAM tier, appended to before the kernel hears of an open and
after all that a release does was done. So after `kill -9` it says of every open what the kernel
may know, and of an open or release whose answer got lost that it was done: the kernel asks those
again under the same number (`unique`).

A backing id that nobody remembers would keep its file's memory for ever, and one that was closed
must not be used again: ids are written down before they are closed, and closed once more.
"""

import os
import struct
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec

from lmstorfs.fuse.handle import handle_ino

_RECORD = struct.Struct("<QQii")  # unique, handle (or inode), backing id, kind
_OPENED, _RELEASED, _CLOSING = 1, 2, 3
_COMPACT_RECORDS = 1 << 16
_REMEMBERED = 1024  # uniques whose answers may have got lost: more are never under way


class Open(msgspec.Struct, frozen=True):
    """One open that was not released."""

    unique: int
    handle: int
    backing_id: int
    """0 where the file is not in passthrough."""


class Survivors(msgspec.Struct):
    """What an earlier daemon left open. Uniques are without the resend bit."""

    opens: list[Open] = []
    released: set[int] = set()
    """Uniques of releases that were done; the kernel may not know."""
    closing: list[int] = []
    """Backing ids that were about to be closed."""
    highest_backing_id: int = 0

    def by_inode(self) -> dict[int, list[Open]]:
        """Return the opens of each inode."""
        found: dict[int, list[Open]] = {}
        for opened in self.opens:
            found.setdefault(handle_ino(opened.handle), []).append(opened)
        return found

    def handle_of(self, unique: int) -> int | None:
        """Return the handle that the open numbered `unique` made."""
        return next((opened.handle for opened in self.opens if opened.unique == unique), None)


class OpenLog:
    """The log of one mount."""

    def __init__(self, path: Path, *, adopted: bool) -> None:
        """Begin the log at `path`, or go on with it (`adopted`: the kernel connection goes on)."""
        self._path = path
        self.survivors = self._read() if adopted else Survivors()
        self._live: dict[int, list[Open]] = {}
        for opened in self.survivors.opens:
            self._live.setdefault(opened.handle, []).append(opened)
        self._released = deque(self.survivors.released, maxlen=_REMEMBERED)
        self._fd = -1
        self._records = 0
        self._highest = self.survivors.highest_backing_id
        self._rewrite()

    def opened(self, unique: int, handle: int, backing_id: int) -> None:
        """The kernel is about to be told of an open."""
        self._live.setdefault(handle, []).append(Open(unique, handle, backing_id))
        self._highest = max(self._highest, backing_id)
        self._append(unique, handle, backing_id, _OPENED)

    def released(self, unique: int, handle: int) -> None:
        """All that the release of `handle` asks for was done; the kernel is about to be told."""
        same = self._live.get(handle, [])
        if same:
            same.pop(0)  # of equal ones the newest may still be without its answer
        if not same:
            self._live.pop(handle, None)
        self._released.append(unique)
        self._append(unique, handle, 0, _RELEASED)

    def opens(self, handle: int) -> int:
        """Return how many opens of this handle are not released."""
        return len(self._live.get(handle, ()))

    def closing(self, ino: int, backing_id: int) -> None:
        """A backing id is about to be closed."""
        self._append(0, ino, backing_id, _CLOSING)

    def close(self) -> None:
        """Let go of the file, which stays."""
        os.close(self._fd)

    # --- the file ----------------------------------------------------------------------------

    def _append(self, unique: int, handle: int, backing_id: int, kind: int) -> None:
        os.write(self._fd, _RECORD.pack(unique, handle, backing_id, kind))
        self._records += 1
        if self._records > _COMPACT_RECORDS and self._records > 4 * len(self._live):
            self._rewrite()

    def _rewrite(self) -> None:
        """Begin the file anew with what is open now, in one step."""
        fresh = self._path.with_suffix(".new")
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        opens = [opened for same in self._live.values() for opened in same]
        records = [_RECORD.pack(unique, 0, 0, _RELEASED) for unique in self._released]
        records += [
            _RECORD.pack(opened.unique, opened.handle, opened.backing_id, _OPENED)
            for opened in opens
        ]
        if self._highest:
            records.append(_RECORD.pack(0, 0, self._highest, _CLOSING))
        with open(fd, "wb", closefd=False) as file:
            file.writelines(records)
        fresh.replace(self._path)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._records = fd, len(records)

    def _records_there(self) -> Iterator[tuple[int, int, int, int]]:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return
        yield from _RECORD.iter_unpack(data[: len(data) // _RECORD.size * _RECORD.size])

    def _read(self) -> Survivors:
        live: dict[int, list[Open]] = {}
        released: list[int] = []
        closing: list[int] = []
        highest = 0
        for unique, handle, backing_id, kind in self._records_there():
            highest = max(highest, backing_id)
            if kind == _OPENED:
                live.setdefault(handle, []).append(Open(unique, handle, backing_id))
            elif kind == _RELEASED:
                released.append(unique)
                if live.get(handle):
                    live[handle].pop(0)
            elif kind == _CLOSING:
                closing.append(backing_id)
        return Survivors(
            opens=[opened for same in live.values() for opened in same],
            released=set(released[-_REMEMBERED:]),
            closing=closing[-_REMEMBERED:],
            highest_backing_id=highest,
        )
