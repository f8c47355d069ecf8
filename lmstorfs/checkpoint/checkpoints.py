"""Which checkpoints there are, whether each is complete, and where it has copies.

A checkpoint is a directory (or a single file) written together. Trainers do not tell; their names
do: `step_10/`, `checkpoint-500/`, `global_step100/`, `iter_0000100/`, `epoch=3-step=30.ckpt`. The
outermost part of a path that names a step is the checkpoint. Where none does, it is a directory
whose name is a number, a numbered file that holds weights, or a directory with a number in its
name; else the directory that holds the file, or the file itself at the top of the mount.
"""

import re
from collections.abc import Callable, Iterable

import msgspec

from lmstorfs.catalog.catalog import Inode

_STEP = re.compile(
    r"(^|[^a-z])((global_?)?step|checkpoint|ckpt|iter|iteration|epoch|snapshot)s?[-_=.]?\d",
    re.IGNORECASE,
)
_NUMBERED = re.compile(r"\d")
_SHARD = re.compile(r"^__\d+_\d+\.distcp$|\d+-of-\d+|rank[_-]?\d+|^rng_state|shard|part[_-]?\d+")
_WEIGHTS = (
    ".bin",
    ".ckpt",
    ".distcp",
    ".h5",
    ".msgpack",
    ".npz",
    ".pkl",
    ".pt",
    ".pth",
    ".safetensors",
    ".tar",
)
_TEMPORARY = re.compile(r"(^|[._-])(tmp|temp|partial|incomplete)([._-]|$)|~$", re.IGNORECASE)


class Copies(msgspec.Struct, kw_only=True):
    """On how many of the checkpoint's files each kind of copy exists; all of them or not."""

    ram: bool = True
    ssd: bool = True
    mirror: bool = True
    store: bool = True


class Checkpoint(msgspec.Struct, kw_only=True):
    """One checkpoint as `status` and `checkpoints` show it."""

    path: str
    files: int = 0
    bytes: int = 0
    complete: bool = True
    weights: bool = False
    """Whether any of its files is one that weights are kept in; a log's is not."""
    copies: Copies
    closed_at: float = 0.0
    """When its newest file was closed, seconds since the epoch."""
    lacks: list[str] = []
    """Names of files that the one before it had and this one has not, or not in full."""
    deleted: bool = False
    """Whether it was deleted, and the guard keeps it for `lmstorfs undelete`."""

    @property
    def word(self) -> str:
        """How safe it is: `writing`, `written`, `mirrored` or `stored`."""
        if not self.complete:
            return "writing"
        if self.copies.store:
            return "stored"
        return "mirrored" if self.copies.mirror else "written"


def holds_weights(path: str) -> bool:
    """Whether the file at `path` is of a kind that weights are kept in; a log is not."""
    return path.endswith(_WEIGHTS)


def names_step(checkpoint: str) -> bool:
    """Whether a checkpoint's name says at which step it was saved: then it is written once."""
    name = checkpoint.rpartition("/")[2]
    return name.isdecimal() or _STEP.search(name) is not None


def is_temporary(name: str) -> bool:
    """Whether a checkpoint's name says that it is not meant to be used yet."""
    return _TEMPORARY.search(name.rpartition("/")[2]) is not None


def checkpoint_of(path: str) -> str:
    """Return the path of the checkpoint that the file at `path` belongs to."""
    *folders, name = path.split("/")
    depth = _first(_STEP.search, [*folders, name])
    if depth is None:
        depth = _first(str.isdecimal, folders)
    if depth is None and name.endswith(_WEIGHTS) and _NUMBERED.search(name):
        depth = None if folders and _SHARD.search(name) else len(folders)
    if depth is None:
        depth = _first(lambda part: _NUMBERED.search(part) and not _SHARD.search(part), folders)
    if depth is not None:
        return "/".join([*folders, name][: depth + 1])
    return "/".join(folders) or path


def _first(names: Callable[[str], object], parts: list[str]) -> int | None:
    """Return the index of the outermost part that `names` says yes to."""
    return next((index for index, part in enumerate(parts) if names(part)), None)


def group(
    inodes: Iterable[Inode],
    path_of: Callable[[int], str | None],
    is_open: Callable[[int], bool],
    limit: int,
    mirror_has: Callable[[int, int], bool] = lambda ino, version: False,
) -> list[Checkpoint]:
    """Return the newest `limit` checkpoints that these files form, newest first.

    `is_open` says whether a writer has an inode open, `mirror_has` whether the mirror holds this
    version of an inode.
    """
    found: dict[str, Checkpoint] = {}
    for inode in inodes:
        path = path_of(inode.ino)
        if path is None:
            continue
        name = checkpoint_of(path)
        checkpoint = found.get(name)
        if checkpoint is None:
            if len(found) >= limit:
                continue
            checkpoint = found[name] = Checkpoint(path=name, copies=Copies())
        _add(checkpoint, inode, is_open(inode.ino), mirror_has(inode.ino, inode.version))
        checkpoint.weights |= holds_weights(path)
        if is_temporary(name):
            checkpoint.complete = False
    return sorted(found.values(), key=lambda checkpoint: -checkpoint.closed_at)


def _add(checkpoint: Checkpoint, inode: Inode, is_open: bool, mirrored: bool) -> None:
    checkpoint.files += 1
    checkpoint.bytes += inode.size
    closed = inode.version > 0 and inode.digest is not None and not inode.writing
    stored = inode.version > 0 and not inode.dirty
    if not closed or is_open or not (inode.tier or stored or mirrored):
        checkpoint.complete = False
    tier = inode.tier or ""
    checkpoint.copies.mirror &= mirrored
    checkpoint.copies.ram &= tier == "ram"
    checkpoint.copies.ssd &= tier.startswith("ssd")
    checkpoint.copies.store &= stored
    checkpoint.closed_at = max(checkpoint.closed_at, inode.closed_at or 0.0)
