"""Which of the checkpoints that there are, or were, is whole.

A trainer does not tell when it has written the last file, and one that is killed leaves a
checkpoint that lacks some, all of them closed (the kernel closes a dead program's files). So each
is compared with the one before it in its series (`step_400` with `step_300`): one that lacks files,
or whose weights are smaller, is not whole until another one has the same shape.
"""

import re
from collections.abc import Iterable

import msgspec

from lmstorfs.catalog.catalog import Inode
from lmstorfs.checkpoint.checkpoints import holds_weights, is_temporary, names_step

_DIGITS = re.compile(r"\d+")
_PASSING = re.compile(
    r"(^|[._-])(lock|in[-_.]?progress|pending|writing)([._-]|$)|\.swp$|^\.nfs", re.IGNORECASE
)
_ALIKE = 0.95  # weights that a save left off in the middle are smaller than this share, mostly
_SMALL_BYTES = 1 << 20  # weights smaller than this may be of any size


class Sighting(msgspec.Struct, kw_only=True):
    """One checkpoint by its files."""

    path: str
    number: int | None = None
    """Of the guard's set that keeps it; None for one that has its name."""
    files: int = 0
    bytes: int = 0
    weights: bool = False
    """Whether any of its files is one that weights are kept in."""
    closed: bool = True
    """Whether all files that count were closed, and some copy of each is there."""
    second: bool = True
    """Whether mirror or store have every file that counts."""
    closed_at: float = 0.0
    """When the newest file that counts was closed, seconds since the epoch."""
    shape: dict[str, list[int]] = {}
    """Sizes of its files by their names in it, with `#` for numbers; a file alone is `""`."""
    lacks: list[str] = []
    """Such names of what it has not, or not in full, and the one before it has."""

    @property
    def whole(self) -> bool:
        """Whether a training can go on from it."""
        return self.closed and self.weights and not self.lacks and not is_temporary(self.path)

    def add(self, path: str, inode: Inode, *, closed: bool, second: bool) -> None:
        """Take one of its files."""
        self.files += 1
        self.bytes += inode.version_size
        if counts(self.path, path):
            self.weights |= holds_weights(path)
            self.closed &= closed
            self.second &= second
            self.closed_at = max(self.closed_at, when(inode))
            name = _DIGITS.sub("#", path[len(self.path) :].lstrip("/"))
            self.shape.setdefault(name, []).append(inode.version_size)

    @property
    def series(self) -> str:
        """What its path has in common with those of the checkpoints before and after it."""
        return _DIGITS.sub("#", self.path)


def counts(checkpoint: str, path: str) -> bool:
    """Whether the checkpoint is not whole without this file of it.

    Beside one that is written to the same place again and again lie logs and the like.
    """
    return is_essential(path) or (names_step(checkpoint) and not is_passing(path))


def is_essential(path: str) -> bool:
    """Whether a file holds weights, or is one without which weights cannot be read."""
    return holds_weights(path) or path.rpartition("/")[2] == ".metadata"  # torch.distributed's


def is_passing(path: str) -> bool:
    """Whether a file's name says that it is there for a while only, as a lock or a marker is."""
    name = path.rpartition("/")[2]
    return is_temporary(name) or (_PASSING.search(name) is not None and not holds_weights(path))


def when(inode: Inode) -> float:
    """Return when a file's newest version was closed, here or by who put it into the store."""
    return inode.closed_at or inode.version_mtime_ns / 1e9


def lacking(one: Sighting, other: Sighting) -> list[str]:
    """Return the names of what `other` has and `one` has not, or has less of."""
    found = []
    for name, sizes in other.shape.items():
        mine = sorted(one.shape.get(name, []), reverse=True)
        theirs = sorted(sizes, reverse=True)
        less = len(mine) < len(theirs)
        if not less and (not name or holds_weights(name)):
            less = any(_is_less(own, its) for own, its in zip(mine, theirs, strict=False))
        if less:
            found.append(name or other.path.rpartition("/")[2])
    return found


def _is_less(size: int, before: int) -> bool:
    return size < before and (not size or (before > _SMALL_BYTES and size < _ALIKE * before))


def stands_for(one: Sighting, other: Sighting) -> bool:
    """Whether who has `one`, which is whole, can do without `other`."""
    return one.series == other.series or not lacking(one, other)


def judge(sightings: Iterable[Sighting]) -> None:
    """Find out what each of them lacks."""
    by_series: dict[str, list[Sighting]] = {}
    for sighting in sorted(sightings, key=lambda each: each.closed_at):
        if sighting.weights and sighting.closed and not is_temporary(sighting.path):
            by_series.setdefault(sighting.series, []).append(sighting)
    for series in by_series.values():
        before: Sighting | None = None
        for sighting in series:
            if before is not None and not sighting.lacks:
                missing = lacking(sighting, before)
                if missing and not _has_twin(sighting, before, series):
                    sighting.lacks = missing
            if not sighting.lacks:
                before = sighting


def _has_twin(one: Sighting, before: Sighting, series: list[Sighting]) -> bool:
    """Whether another one since `before` has the same shape: then that is what a save leaves."""
    return any(
        other is not one
        and other.closed_at > before.closed_at
        and not lacking(one, other)
        and not lacking(other, one)
        for other in series
    )
