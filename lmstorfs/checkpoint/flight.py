"""One version on its way to the store, and what is told of all of them."""

import os

import msgspec
import trio

from lmstorfs.catalog.catalog import Inode
from lmstorfs.store import Attributes


class Flight(msgspec.Struct):
    """One version on its way."""

    key: str
    version: int
    size: int
    scope: trio.CancelScope
    moved: int = 0


class FlushStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What the flusher has done and is doing."""

    in_flight: int
    in_flight_bytes: int
    in_flight_moved: int
    stored_files: int
    stored_bytes: int
    superseded: int
    cancelled: int


def attributes_of(inode: Inode, xattrs: dict[bytes, bytes]) -> Attributes:
    """Return what the store is to keep of an inode beside its content."""
    return Attributes(
        mode=inode.mode,
        uid=inode.uid,
        gid=inode.gid,
        mtime_ns=inode.version_mtime_ns if inode.is_file else inode.mtime_ns,
        digest=inode.digest,
        version=inode.version,
        xattrs={os.fsdecode(name): value for name, value in xattrs.items()},
    )
