"""Adopting: taking over what an earlier daemon left in the tiers and the catalog.

After a crash the catalog says which contents some close or fsync made a version of (with size and
mtime), and the tiers show what is really there. Where both agree the content is whole and is
flushed; where they do not, somebody was in the middle of a write: the file stays readable as it
is, as on a local disk, and never goes to the store.

Every step may be repeated: a crash while adopting is adopted again.
"""

import os
from collections.abc import Collection
from pathlib import Path

import msgspec
import structlog

from lmstorfs.catalog import Inode, SqliteCatalog
from lmstorfs.checkpoint.digester import Digester
from lmstorfs.tiers import Placement, Tier

log = structlog.get_logger()

_BEYOND_BYTES = 1 << 40  # further than any reservation reaches
_SLACK_BYTES = 2 << 20  # a huge page: what a file may take beyond its size all the same


class Adopted(msgspec.Struct, kw_only=True):
    """What was found."""

    files: int = 0
    """Files whose content is in a tier and whole."""
    dropped: int = 0
    """Tier files that nobody needs any more."""
    torn: list[str] = []
    """Paths of files that were being written when the daemon died."""
    missing: list[int] = []
    """Inodes of versions that only a tier held, and that tier has lost."""


def adopt(
    catalog: SqliteCatalog,
    placement: Placement,
    digester: Digester,
    *,
    opened: Collection[int] = (),
    written: Collection[int] = (),
    takeover: bool = False,
) -> Adopted:
    """Bring catalog and tiers to agree; start the digests of what will be flushed.

    `takeover`: only the daemon died. `opened` are inodes that programs still have open, `written`
    those of them that are open for writing.
    """
    result = Adopted()
    catalog.contents.recover_uploads()
    for ino in catalog.orphans():
        if ino not in opened:
            catalog.purge(ino)
    for inode in catalog.db.inodes(
        "WHERE tier IS NOT NULL OR (tier IS NULL AND NOT writing AND"
        " version != stored_version AND nlink > 0)"
    ):
        if placement.tier(inode.tier) is None and inode.is_file:  # another node's, or long lost
            _without_copy(catalog, inode, result, lost=True)
    for tier in placement.tiers:
        _adopt_tier(catalog, tier, result, takeover=takeover)
    for inode in catalog.contents.torn():
        if inode.ino not in written:
            _adopt_writing(catalog, placement, inode, result)
    for inode in catalog.db.inodes("WHERE version != stored_version AND digest IS NULL"):
        if inode.is_file and inode.tier is not None and not inode.torn:
            digester.add(inode.ino, inode.version)
    log.info(
        "adopted", files=result.files, dropped=result.dropped, torn=len(result.torn),
        missing=len(result.missing),
    )  # fmt: skip
    return result


def note_closed(catalog: SqliteCatalog, tier: Tier, closed: Path) -> None:
    """Make versions of what was closed while no daemon was there; `closed` is the keeper's list.

    Each line is an inode, size and mtime (ns); what the tier shows now must still be that.
    """
    try:
        lines = closed.read_text().split("\n")[:-1]  # the last is whole, or was never answered for
    except FileNotFoundError:
        return
    for line in lines:
        ino, size, mtime_ns = map(int, line.split())
        inode = catalog.find(ino)
        if inode is None or not inode.writing or not tier.path(ino).exists():
            continue
        found = tier.path(ino).stat()
        if (found.st_size, found.st_mtime_ns) == (size, mtime_ns) and not inode.is_version(found):
            catalog.contents.close_version(ino, size, mtime_ns, writing=True)
    closed.unlink()


def _adopt_tier(catalog: SqliteCatalog, tier: Tier, result: Adopted, *, takeover: bool) -> None:
    found = set(tier.scan())
    claimed = catalog.db.inodes("WHERE tier = ?", (tier.name,))
    known = {inode.ino for inode in claimed}
    for ino in found - known:
        tier.drop(ino)
        result.dropped += 1
    for inode in claimed:
        if inode.ino not in found:
            just_made = takeover and not inode.version  # the daemon died before it made the file
            _without_copy(catalog, inode, result, lost=not just_made)
            continue
        result.files += 1
        if not inode.writing:
            _settle(tier, inode)


def _settle(tier: Tier, inode: Inode) -> None:
    """Finish what a daemon died of while it gave back the room of a file that was closed.

    Nobody had the file open for writing, so the catalog's time is the right one.
    """
    path = tier.path(inode.ino)
    found = path.stat()
    if tier.held(inode.ino) > found.st_size + _SLACK_BYTES:
        _cut(tier, inode)
    if found.st_size == inode.version_size and found.st_mtime_ns != inode.version_mtime_ns:
        os.utime(path, ns=(inode.atime_ns, inode.version_mtime_ns))


def _cut(tier: Tier, inode: Inode) -> os.stat_result:
    """Give back what a dead daemon reserved for the file; return what the tier then shows."""
    fd = tier.open(inode.ino)
    try:
        tier.settle(inode.ino, fd, os.fstat(fd).st_size + _BEYOND_BYTES)
        return os.fstat(fd)
    finally:
        os.close(fd)


def _without_copy(catalog: SqliteCatalog, inode: Inode, result: Adopted, *, lost: bool) -> None:
    """The tier lost the file: what the store has of it serves, or another copy must be found."""
    catalog.contents.set_tier(inode.ino, None)
    if inode.writing:
        catalog.contents.end_writing(inode.ino)
    if not lost or (inode.version and not inode.dirty) or inode.nlink == 0:
        return
    result.missing.append(inode.ino)


def _adopt_writing(
    catalog: SqliteCatalog,
    placement: Placement,
    inode: Inode,
    result: Adopted,
) -> None:
    tier = placement.tier(inode.tier)
    if tier is None:
        return
    if inode.is_version(_cut(tier, inode)):
        catalog.contents.end_writing(inode.ino)
    else:
        catalog.contents.doubt(inode.ino)
        if inode.nlink:
            result.torn.append(catalog.path(inode.ino) or f"inode {inode.ino}")
