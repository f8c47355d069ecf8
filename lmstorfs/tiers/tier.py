"""A tier: a directory with a budget. Its files are named by inode number.

It keeps the books of what each file holds (content or reservation, whichever is more) and never
hands out more than the budget. Which file to put where, or to evict, is `placement.py`'s.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from lmstorfs.tiers import files

BLOCK_BYTES = 512  # the unit of st_blocks


class TierStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One tier, bytes."""

    name: str
    path: str
    budget_bytes: int
    used_bytes: int
    files: int


class Tier:
    """One directory, one budget."""

    def __init__(self, name: str, directory: Path, budget_bytes: int) -> None:
        self.name = name
        self.directory = directory
        self.budget_bytes = budget_bytes
        self._held: dict[int, int] = {}
        self._used = 0

    def path(self, ino: int) -> Path:
        """Where the tier keeps the content of `ino`."""
        return self.directory / str(ino)

    @property
    def used_bytes(self) -> int:
        """What contents and reservations take of the budget."""
        return self._used

    @property
    def free_bytes(self) -> int:
        """What is left of the budget."""
        return max(0, self.budget_bytes - self._used)

    def held(self, ino: int) -> int:
        """What `ino` takes of the budget, bytes."""
        return self._held.get(ino, 0)

    def hold(self, ino: int, count: int) -> None:
        """`ino` takes `count` bytes of the budget from now on."""
        self._used += count - self._held.get(ino, 0)
        self._held[ino] = count

    def open(self, ino: int, *, create: bool = False) -> int:
        """Open the file of `ino` for reading and writing; the caller closes the descriptor."""
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        return os.open(self.path(ino), flags, 0o600)

    def reserve(self, ino: int, fd: int, end: int) -> bool:
        """Make sure that `ino` can grow to `end` bytes without asking; False: no room."""
        held = self._held.get(ino, 0)
        if end <= held:
            return True
        if end - held > self.free_bytes:
            return False
        # From where memory already is: to reserve it again costs the kernel a walk over its pages.
        start = max(held, os.fstat(fd).st_size)
        if start < end and not files.reserve(fd, start, end):
            return False
        self.hold(ino, end)
        return True

    def settle(self, ino: int, fd: int, reserved: int | None = None) -> int:
        """Nobody writes any more: give back what was reserved beyond the size; return the size.

        `reserved` is how far that may reach where the books do not know.
        """
        files.cut_reservation(fd, self.held(ino) if reserved is None else reserved)
        found = os.fstat(fd)
        self.hold(ino, _allocated(found))
        return found.st_size

    def share(self, ino: int, other: int) -> None:
        """`other` has the content of `ino` too; one of them is to be dropped. Raises `OSError`."""
        os.link(self.path(ino), self.path(other))
        self.hold(other, self.held(ino))

    def drop(self, ino: int) -> None:
        """Remove the file; its memory is free as soon as nobody has it open."""
        self.path(ino).unlink(missing_ok=True)
        self._used -= self._held.pop(ino, 0)

    def scan(self) -> Iterator[int]:
        """Take what an earlier daemon left into the books; yield the inode numbers."""
        with os.scandir(self.directory) as found:
            for entry in found:
                if entry.name.isdecimal():
                    self.hold(int(entry.name), _allocated(entry.stat()))
                    yield int(entry.name)

    def statistics(self) -> TierStatistics:
        """Return the books."""
        return TierStatistics(
            name=self.name,
            path=str(self.directory),
            budget_bytes=self.budget_bytes,
            used_bytes=self._used,
            files=len(self._held),
        )


def _allocated(status: os.stat_result) -> int:
    """Return what a file really takes: a sparse one less than its size, a reserved one more."""
    return status.st_blocks * BLOCK_BYTES
