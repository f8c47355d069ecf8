"""Which tier takes a file, how much room to reserve ahead of its writer, and what to evict.

Dirty data cannot be evicted by construction: the candidates are asked of the catalog, which
knows only stored versions as such, and the kernel is asked whether anybody still writes.
"""

import re
from collections import OrderedDict
from collections.abc import Callable

from lmstorfs.catalog.catalog import Inode
from lmstorfs.catalog.sqlite import SqliteCatalog
from lmstorfs.tiers import files
from lmstorfs.tiers.tier import Tier
from lmstorfs.units import MIB

# A writer at 8 GiB/s covers this in 30 ms, longer than the daemon ever takes to look again.
RESERVE_AHEAD_BYTES = 256 * MIB
# The least that is worth a reservation.
MIN_RESERVE_BYTES = 4 * MIB
# A file of unknown size gets passthrough only where this share of the budget is free: once its
# writer writes past the daemon, nothing can make it wait for room any more.
_UNKNOWN_SHARE = 4
# One file's first reservation takes at most this share of what is free, so that many writers
# that open at once all get something.
_FIRST_SHARE = 4
_KINDS_REMEMBERED = 4096
_DIGITS = re.compile(rb"\d+")


class Placement:
    """The tiers of one mount, fastest first."""

    def __init__(
        self, tiers: list[Tier], catalog: SqliteCatalog, is_open: Callable[[int], bool]
    ) -> None:
        self.tiers = tiers
        self._by_name = {tier.name: tier for tier in tiers}
        self._catalog = catalog
        self._is_open = is_open
        self._used: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._kinds: OrderedDict[bytes, int] = OrderedDict()
        self.spare: Callable[[Tier, int], bool] = lambda tier, missing: False
        """Called where a tier lacks so many bytes; returns whether what was kept made way."""

    def tier(self, name: str | None) -> Tier | None:
        """Return the tier called `name`."""
        return None if name is None else self._by_name.get(name)

    # --- use ---------------------------------------------------------------------------------

    def touched(self, ino: int) -> None:
        """`ino` was just used."""
        self._used[ino] = None
        self._used.move_to_end(ino)

    def learn(self, name: bytes, size: int) -> None:
        """A file of this name ended at `size` bytes: the next of its kind will be alike."""
        kind = _DIGITS.sub(b"#", name)
        self._kinds[kind] = size
        self._kinds.move_to_end(kind)
        if len(self._kinds) > _KINDS_REMEMBERED:
            self._kinds.popitem(last=False)

    def expect(self, name: bytes) -> int | None:
        """Return the size that a file of this name will probably have; None for a new kind."""
        size = self._kinds.get(_DIGITS.sub(b"#", name))
        return None if size is None else size + size // 16 + MIB // 16

    # --- room --------------------------------------------------------------------------------

    def place(self, name: bytes) -> tuple[Tier, int] | None:
        """Return where to put a new file and what to reserve for it; None: wait for room."""
        expected = self.expect(name)
        for tier in self.tiers:
            needed = expected or tier.budget_bytes // _UNKNOWN_SHARE
            if self.make_room(tier, needed, urgent=expected is not None):
                ahead = min(RESERVE_AHEAD_BYTES, tier.free_bytes // _FIRST_SHARE)
                return tier, expected or max(ahead, MIN_RESERVE_BYTES)
        return None

    def admission(self, tier: Tier, name: bytes) -> int:
        """Return what must fit before a file of this name that had to wait may begin, bytes."""
        unknown = min(RESERVE_AHEAD_BYTES, tier.budget_bytes // _UNKNOWN_SHARE)
        return min(self.expect(name) or unknown, tier.budget_bytes)

    def reserve(self, tier: Tier, ino: int, fd: int, end: int, *, urgent: bool = True) -> bool:
        """Make sure that `ino` can grow to `end`, evicting where needed; False: no room."""
        missing = end - tier.held(ino)
        return missing <= 0 or (
            self.make_room(tier, missing, urgent=urgent) and tier.reserve(ino, fd, end)
        )

    def make_room(self, tier: Tier, wanted: int, *, urgent: bool = True) -> bool:
        """Evict stored versions until `wanted` bytes are free; False where that is not enough.

        Nothing is evicted where it would not be enough. `urgent`: it is for bytes that will
        come, and not just may; for those also what was deleted and is kept has to make way.
        """
        if tier.free_bytes >= wanted:
            return True
        victims: list[Inode] = []
        room = tier.free_bytes
        for inode in self._candidates(tier):
            if room >= wanted:
                break
            victims.append(inode)
            room += tier.held(inode.ino)
        if room < wanted:
            return urgent and self.spare(tier, wanted - room) and self.make_room(tier, wanted)
        for inode in victims:
            self.evict(tier, inode.ino)
        return tier.free_bytes >= wanted

    def _candidates(self, tier: Tier) -> list[Inode]:
        """Return what may be evicted: what was deleted and is kept, then the least recently used.

        Newest checkpoints come last.
        """
        stored = self._catalog.db.inodes(
            "WHERE tier = ? AND version = stored_version AND NOT writing ORDER BY closed_at",
            (tier.name,),
        )
        rank = {ino: position for position, ino in enumerate(self._used)}
        free = [inode for inode in stored if self._is_free(inode)]
        return sorted(free, key=lambda inode: (inode.nlink > 0, rank.get(inode.ino, -1)))

    def _is_free(self, inode: Inode) -> bool:
        has_row = inode.nlink > 0 or self._catalog.guarded.keeps(inode.ino)
        return has_row and not self._is_open(inode.ino)

    def evict(self, tier: Tier, ino: int) -> bool:
        """Drop a stored version from its tier; False where somebody still writes to it."""
        if files.has_writers(tier.path(ino)):
            return False
        self._catalog.contents.set_tier(ino, None)  # before the file: a crash between loses a copy
        tier.drop(ino)
        self._used.pop(ino, None)
        return True

    def drop(self, ino: int, tier_name: str | None) -> None:
        """The content is not needed any more: unlinked, or replaced at the store."""
        tier = self.tier(tier_name)
        if tier is not None:
            tier.drop(ino)
        self._used.pop(ino, None)
