"""The deletion guard: of what rotation deletes, the newest checkpoint that is whole stays.

A trainer that keeps one checkpoint deletes the old one before the new one is whole, or before it
has a second copy. To it the file is gone at once; but inode, tier copy, replica and object stay
until a newer whole checkpoint is at the mirror or in the store (`catalog/guarded.py` has how).

Deletions come a file at a time. At the first one it is decided whether the checkpoint is needed,
and all its files are noted: each is kept when its turn comes, also by the next daemon. What is
given up is at most: the newest whole one, the newest whole one with a second copy (whose tier
copies may be evicted), and one that a broken save left. Where a tier needs the room, those go
for which there is anything newer that is whole, whatever copies it has; the others are brought to
the store, to be evicted.
"""

import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec
import structlog
import trio

from lmstorfs.catalog.catalog import Inode
from lmstorfs.catalog.guarded import GuardedFile
from lmstorfs.catalog.sqlite import SqliteCatalog
from lmstorfs.checkpoint.checkpoints import checkpoint_of, is_temporary, names_step
from lmstorfs.checkpoint.flusher import Flusher
from lmstorfs.checkpoint.survey import Sighting, is_essential, is_passing, stands_for, when
from lmstorfs.checkpoint.surveyor import Files, Surveyor
from lmstorfs.tiers import Placement, Tier, files

log = structlog.get_logger()

_LOOK_EVERY_S = 0.2
_IDLE_S = 5.0
_WHILE_S = 5.0  # deletions of one checkpoint that come closer together are one deletion
_VERDICTS = 256
_MANY_FILES = 1000  # not looked at for every log that is rotated
_NOT_AGAIN_S = 1.0


class Verdict(msgspec.Struct):
    """A checkpoint that is not kept."""

    newest: float
    """When the newest file was closed that it speaks of."""
    files: int
    decided_at: float
    used_at: float
    lasts: bool


class GuardStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What is deleted and kept."""

    checkpoints: int
    files: int
    bytes: int


class Guard:
    """Decides what is kept, and when it may go."""

    def __init__(
        self,
        catalog: SqliteCatalog,
        placement: Placement,
        flusher: Flusher,
        surveyor: Surveyor,
        is_open: Callable[[int], bool],
        digest: Callable[[int, int], None],
        *,
        enabled: bool,
    ) -> None:
        """Take `is_open`: whether a program has an inode open, which then goes with its close.

        And `digest`, which has the digest of an inode's version computed.
        """
        self._catalog = catalog
        self._guarded = catalog.guarded
        self._placement = placement
        self._flusher = flusher
        self._surveyor = surveyor
        self._is_open = is_open
        self._digest = digest
        self._enabled = enabled
        self._verdicts: OrderedDict[str, Verdict] = OrderedDict()
        self._robbed: set[int] = set()
        self._to_drop: dict[int, str] = {}
        self._news = trio.Event()
        self._no_way_until = 0.0
        placement.spare = self._make_way

    # --- asked by the file operations --------------------------------------------------------

    def losing_name(self, inode: Inode) -> None:
        """The inode is about to lose its name, in the transaction that the caller has begun."""
        if inode.is_file and self._takes(inode):
            self._guarded.deleted(inode.ino)

    def losing_content(self, inode: Inode) -> bool:
        """A file that nobody has open is about to be truncated; True: it is empty now.

        Where somebody has it open, or mapped, all opens share the tier's file and this is not
        asked: there the content goes, as it does on a local disk.
        """
        tier = self._placement.tier(inode.tier)
        if not inode.size or (tier is not None and files.has_writers(tier.path(inode.ino))):
            return False
        try:
            with self._catalog.db.transaction():
                if inode.nlink == 0 or not self._takes(inode):
                    return False
                kept = self._guarded.split(inode.ino)
                if tier is not None:
                    tier.share(inode.ino, kept)
        except OSError as error:
            log.warning("a content could not be kept", ino=inode.ino, error=str(error))
            return False
        if tier is not None:
            tier.drop(inode.ino)  # after the commit: a crash between leaves one of two links
        if inode.digest is None:
            self._digest(kept, inode.version)
        return True

    def keeps(self, ino: int) -> bool:
        """Whether the inode, which lost its name, must stay."""
        return self._guarded.keeps(ino)

    def statistics(self) -> GuardStatistics:
        """Return what is kept."""
        rows = [row for row in self._guarded.rows() if row.deleted_at]
        inodes = [self._catalog.find(row.ino) for row in rows]
        return GuardStatistics(
            checkpoints=len({row.number for row in rows}),
            files=len(rows),
            bytes=sum(inode.version_size for inode in inodes if inode is not None),
        )

    def only_here(self) -> int:
        """Return the bytes of what is kept and is in a tier only, neither mirrored nor stored."""
        kept = [self._catalog.find(row.ino) for row in self._guarded.rows() if row.deleted_at]
        return sum(
            inode.version_size
            for inode in kept
            if inode is not None and inode.tier is not None and not self._surveyor.has_second(inode)
        )

    # --- deciding ----------------------------------------------------------------------------

    def _takes(self, inode: Inode) -> bool:
        """Whether the file is to be kept; then it has a row."""
        if not self._enabled:
            return False
        path = self._catalog.path(inode.ino)
        if path is None or is_passing(path) or not self._is_whole(inode):
            return False
        name = checkpoint_of(path)
        row = self._guarded.find(inode.ino)
        if row is not None and row.version == inode.version:
            if is_essential(path) and not self._guarded.keeps_weights(row.number):
                self._bring_up_to_date(row.number, name, path, inode)
            return True
        number = self._guarded.newest_set(name)
        if number is None or self._guarded.keeps_weights(number):
            return self._begins(name, path, inode)
        if names_step(name) or is_essential(path) or path in self._paths(number):
            self._bring_up_to_date(number, name, path, inode)
        return self._guarded.find(inode.ino) is not None

    def _paths(self, number: int) -> set[str]:
        return {row.path for row in self._guarded.rows(number)}

    def _is_whole(self, inode: Inode) -> bool:
        """Whether what can be kept is the newest version."""
        tier = self._placement.tier(inode.tier)
        if tier is None or not self._surveyor.is_closed(inode):
            return self._surveyor.is_closed(inode)
        try:
            return inode.is_version(tier.path(inode.ino).stat())
        except FileNotFoundError:
            return False

    def _bring_up_to_date(self, number: int, name: str, path: str, inode: Inode) -> None:
        """Until weights go, files of the checkpoint may be rewritten, and belong to it."""
        rows = self._guarded.rows(number)
        known = {row.ino for row in rows if not row.deleted_at}
        paths = {row.path for row in rows}
        fresh = [
            file
            for file in self._rows(name, self._surveyor.files_of(name, path, inode) or [])
            if file.ino not in known and (names_step(name) or file.weights or file.path in paths)
        ]
        self._guarded.extend(number, fresh)
        again = {file.path for file in fresh}
        self._let_go([row for row in rows if row.deleted_at and row.path in again])

    def _begins(self, name: str, path: str, inode: Inode) -> bool:
        """Decide on the checkpoint `name`, whose first file is about to go."""
        now = time.monotonic()
        if self._is_decided(name, path, inode, now):
            return False
        members = self._surveyor.files_of(name, path, inode)
        if members is None:
            self._verdicts[name] = Verdict(time.time(), _MANY_FILES + 1, now, now, False)
            return False
        mixture = self._is_mixture(members)
        if not mixture and self._is_needed(name, members):
            before = [self._guarded.find(member.ino) for _, member in members]
            self._robbed |= {row.number for row in before if row is not None}
            self._guarded.begin(self._rows(name, members))
            log.info("a checkpoint that is deleted is kept", checkpoint=name, files=len(members))
            self._news.set()
            return self._guarded.find(inode.ino) is not None
        newest = max([when(inode), *(when(member) for _, member in members)])
        self._verdicts[name] = Verdict(newest, len(members), now, now, mixture)
        self._verdicts.move_to_end(name)
        if len(self._verdicts) > _VERDICTS:
            self._verdicts.popitem(last=False)
        return False

    def _is_decided(self, name: str, path: str, inode: Inode, now: float) -> bool:
        """Whether the checkpoint is being deleted, and it was found that it may be."""
        verdict = self._verdicts.get(name)
        if verdict is None or (now - verdict.used_at > _WHILE_S and not verdict.lasts):
            return False
        verdict.used_at = now
        many = verdict.files > _MANY_FILES and now - verdict.decided_at < _NOT_AGAIN_S
        return when(inode) <= verdict.newest or (many and not is_essential(path))

    def _rows(self, name: str, members: Files) -> list[GuardedFile]:
        found = []
        for path, inode in members:
            if self._surveyor.is_closed(inode) and not is_passing(path):
                before = self._guarded.find(inode.ino)
                weights = is_essential(path) and (before is None or before.weights > 0)
                found.append(
                    GuardedFile(inode.ino, path, name, 0.0, 0, inode.version, int(weights))
                )
        return found

    def _is_mixture(self, members: Files) -> bool:
        """Whether some weights are still those that a kept set has, too: a save was broken off.

        The second time they count as weights that no save writes again.
        """
        versions = {inode.ino: inode.version for _, inode in members}
        old = [
            row
            for row in self._guarded.rows()
            if row.weights and not row.deleted_at and versions.get(row.ino) == row.version
        ]
        for row in old:
            self._guarded.set_weights(row.ino, 2 if row.weights == 1 else 0)
        return any(row.weights == 1 for row in old)

    def _is_needed(self, name: str, members: Files) -> bool:
        """Whether a checkpoint with these files must stay: no newer one can take its place."""
        mine = self._surveyor.sighting(name, members)
        if not mine.weights or not mine.closed or is_temporary(name):
            return False
        if not names_step(name) and not any(inode.closed_at for _, inode in members):
            return False  # put into the store by others, and rather a dataset
        found = self._surveyor.survey(but=name, also=[mine])
        return not any(outdoes(other, mine) for other in found)

    # --- letting go --------------------------------------------------------------------------

    async def run(self) -> None:
        """Let go of what is not needed any more, until cancelled."""
        while True:
            began = time.monotonic()
            self.look()
            took_s = time.monotonic() - began
            await trio.sleep(max(_LOOK_EVERY_S, 10 * took_s))
            if self._guarded.is_empty():
                await self._news.wait()
            elif not self._news.is_set():
                with trio.move_on_after(_IDLE_S):
                    await self._flusher.changed()
            self._news = trio.Event()

    def look(self) -> int:
        """Let go of the sets that are not needed any more; return how many those were."""
        self._drop()
        if self._guarded.is_empty():
            return 0
        found = self._surveyor.survey()
        kept = {sighting.number: sighting for sighting in found if sighting.number is not None}
        numbers = [
            number
            for number, mine in kept.items()
            if not self._enabled
            or not mine.closed
            or number in self._robbed
            or any(outdoes(other, mine) for other in found)
        ]
        for number in numbers:
            self.let_go(number)
        return len(numbers)

    def let_go(self, number: int) -> None:
        """Let go of a set: what had no name is gone, from everywhere."""
        rows = self._guarded.rows(number)
        self._robbed.discard(number)
        if rows:
            log.info("a checkpoint that was deleted goes", checkpoint=rows[0].checkpoint)
        self._let_go(rows)
        self._drop()
        self._flusher.announce()

    def _let_go(self, rows: list[GuardedFile]) -> None:
        """Forget rows, and what was kept for them; the tiers' files go with `_drop`."""
        with self._catalog.db.transaction():
            inodes = [self._catalog.find(row.ino) for row in rows if row.deleted_at]
            gone = [inode for inode in inodes if inode is not None and inode.nlink == 0]
            self._guarded.forget(rows)
            self._catalog.contents.drop_objects(
                [inode.stored_key for inode in gone if inode.stored_key is not None]
            )
            for inode in gone:
                self._flusher.cancel(inode.ino)
                self._guarded.sheltered.discard(inode.ino)
                if not self._is_open(inode.ino):  # else its last close does it
                    self._catalog.purge(inode.ino)
                    self._to_drop[inode.ino] = inode.tier or ""

    def _drop(self) -> None:
        """Free the tiers' files; after the commit, so that a crash finds rows for all files."""
        for ino, tier in self._to_drop.items():
            if self._catalog.find(ino) is None:
                self._placement.drop(ino, tier)
        self._to_drop.clear()

    def _make_way(self, tier: Tier, missing: int) -> bool:
        """A tier lacks room: let go of sets that it holds where something newer is whole.

        Returns whether that gave it what is missing, bytes. If not, nothing goes.
        """
        if self._guarded.is_empty() or time.monotonic() < self._no_way_until:
            return False
        found = self._surveyor.survey()
        going = []
        for mine in sorted(found, key=lambda sighting: sighting.closed_at):
            newer = [each for each in found if each.closed_at > mine.closed_at and each.whole]
            spared = not mine.whole or any(stands_for(each, mine) for each in newer)
            if mine.number is not None and spared and missing > 0:
                missing -= self._held(tier, mine.number)
                going.append(mine.number)
        if missing <= 0:
            for number in going:
                log.info("a deleted checkpoint makes way", tier=tier.name)
                self.let_go(number)
            return True
        self._shelter(tier)
        self._no_way_until = time.monotonic() + _NOT_AGAIN_S
        return False

    def _held(self, tier: Tier, number: int) -> int:
        """Return what a set takes of a tier that cannot be evicted, bytes."""
        inodes = [self._catalog.find(row.ino) for row in self._guarded.rows(number)]
        return sum(
            tier.held(inode.ino)
            for inode in inodes
            if inode is not None and inode.nlink == 0 and inode.dirty
        )

    def _shelter(self, tier: Tier) -> None:
        """Have what is kept in a tier brought to the store, so that it can be evicted."""
        for row in self._guarded.rows():
            if row.deleted_at and tier.held(row.ino) and row.ino not in self._guarded.sheltered:
                self._guarded.sheltered.add(row.ino)
                self._flusher.urgent(row.ino)

    def makes_way(self) -> bool:
        """Whether a tier will have more room once the store has what is kept in it."""
        found = map(self._catalog.find, self._guarded.sheltered)
        return any(inode is not None and inode.dirty and inode.nlink == 0 for inode in found)


def outdoes(other: Sighting, mine: Sighting) -> bool:
    """Whether `mine` need not be kept, since `other` is there, or is kept itself."""
    kept = other.number is not None
    newer = other.closed_at > mine.closed_at
    if kept and other.closed_at == mine.closed_at:
        newer = (other.number or 0) > (mine.number or 0)
    if other is mine or not newer:
        return False
    if kept:
        return (other.whole or not mine.whole) and (other.second or not mine.second)
    return other.whole and other.second and stands_for(other, mine)
