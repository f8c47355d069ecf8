"""The recovery ladder: a version comes back from the fastest copy that is left.

RAM and SSD are looked at first (`recovery.py`, when a daemon starts); what they lack comes from
the mirror, and from the store where the store has that very version. Version numbers decide, never
times: an older copy does not stand in for a newer one. Every copy is verified by digest before it
is served; a corrupt one is dropped and counted, and the next one is asked.

What is missing comes in the background, the newest checkpoint first; whoever opens a file waits
for that file alone.
"""

import os
import random
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import structlog
import trio

from lmstorfs.catalog import Inode, SqliteCatalog
from lmstorfs.checkpoint.mirror.messages import Replica
from lmstorfs.checkpoint.mirror.peer import PeerFencedError, UnknownReplicaError
from lmstorfs.checkpoint.mirror.source import ReplicaSource
from lmstorfs.checkpoint.passed import PassedVersions
from lmstorfs.dataset.fetcher import Fetcher
from lmstorfs.digest import digest_fd
from lmstorfs.errors import (
    CorruptCopyError,
    DeadlineError,
    LmstorfsError,
    PeerError,
    SetupError,
    StoreError,
)
from lmstorfs.tiers import Placement, Tier

log = structlog.get_logger()

_RETRY_FIRST_S = 0.2
_RETRY_MAX_S = 5.0
_AT_ONCE = 2


class LostCopyError(LmstorfsError):
    """No copy is left of a version."""


class Ladder:
    """Brings the versions of one mount back."""

    def __init__(
        self,
        catalog: SqliteCatalog,
        placement: Placement,
        fetcher: Fetcher,
        source: ReplicaSource | None,
        passed: PassedVersions,
        *,
        read_timeout_s: float,
    ) -> None:
        """Take `source`, the mirror that holds replicas of this node's files, if there is one."""
        self._catalog = catalog
        self._placement = placement
        self._fetcher = fetcher
        self._source = source
        self._passed = passed
        self._read_timeout_s = read_timeout_s
        self._under_way: dict[int, trio.Event] = {}
        self._missing: dict[int, None] = {}
        self._started: set[int] = set()
        self._suspects: dict[int, None] = {}
        self._wake = trio.Event()
        self.on_brought: Callable[[int], None] = lambda ino: None
        """Called when a missing version is there again, or was given up."""
        self.from_mirror_files = 0
        self.from_store_files = 0
        self.lost: dict[int, str] = {}
        """Inodes of which no copy is left, and their paths."""
        self.rolled_back: dict[int, str] = {}
        """Inodes of which an older version serves, since the newest was lost with its RAM."""

    @property
    def missing(self) -> int:
        """How many versions are still to come."""
        return len(self._missing)

    def coming(self) -> Collection[int]:
        """Return the inodes whose newest version is still to come."""
        return self._missing.keys()

    def mirror_may_have(self, ino: int, version: int) -> bool:
        """Whether the mirror holds this version, as far as it was asked."""
        held = self._source.held if self._source is not None else None
        return held is not None and held.get(ino) == version

    # --- one version -------------------------------------------------------------------------

    async def bring(self, inode: Inode) -> Tier | None:
        """Bring the newest version of `inode` into a tier; None where no tier has the room.

        Raises `LostCopyError` where no copy is left, `DeadlineError` where whoever has it did not
        answer in time, and what `Fetcher.fetch` raises.
        """
        while (other := self._under_way.get(inode.ino)) is not None:
            await other.wait()
            inode = self._catalog.get(inode.ino)
            if (tier := self._placement.tier(inode.tier)) is not None:
                return tier
        done = self._under_way[inode.ino] = trio.Event()
        try:
            await self._passed.look(inode.ino)
            return await self._bring(self._catalog.get(inode.ino))
        finally:
            del self._under_way[inode.ino]
            done.set()

    async def _bring(self, inode: Inode) -> Tier | None:
        in_store = not inode.dirty and inode.stored_key is not None
        tier = None
        if self._source is not None and (not in_store or self._asked_for(inode)):
            try:
                tier = await self._from_mirror(inode, patient=not in_store)
            except CorruptCopyError:
                self._fetcher.reads.corrupt_copies += 1
                log.error("corrupt copy", copy="mirror", ino=inode.ino, version=inode.version)
            except UnknownReplicaError:
                log.info("the mirror has no replica", ino=inode.ino, version=inode.version)
            except PeerError as error:
                if not in_store:
                    raise DeadlineError(f"the mirror did not answer: {error}") from error
        if tier is not None:
            self.from_mirror_files += 1
            self._fetcher.reads.mirror_bytes += inode.version_size
        elif in_store:
            tier = await self._fetcher.fetch(inode)
            self.from_store_files += int(inode.ino in self._missing)
        else:
            tier = await self._fall_back(inode)
        self.lost.pop(inode.ino, None)
        return tier

    async def _fall_back(self, inode: Inode) -> Tier | None:
        """The newest version is gone everywhere: the newest of which a copy is left serves.

        As on a local disk after a crash: what an fsync promised is there, though something newer,
        which nothing was promised of, is not. Raises `LostCopyError`.
        """
        path = self._catalog.path(inode.ino) or f"inode {inode.ino}"
        held = (self._source.held or {}).get(inode.ino, 0) if self._source is not None else 0
        tier = None
        if inode.stored_version < held < inode.version:
            tier = next((tier for tier in self._placement.tiers if self._room(tier, inode)), None)
        if tier is not None:
            await self._fetch_into(tier, inode, held)
            self.from_mirror_files += 1
        elif await self._take_stored(inode.ino):
            tier = await self._fetcher.fetch(self._catalog.get(inode.ino))
            self.from_store_files += 1
        else:
            self.lost[inode.ino] = path
            raise LostCopyError(f"{path}: no copy of its newest version is left")
        self.rolled_back[inode.ino] = path
        log.warning("an older version was taken", path=path, lost=inode.version)
        return tier

    async def _take_stored(self, ino: int) -> bool:
        try:
            return await self._passed.take_stored(ino)
        except StoreError as error:
            raise DeadlineError(f"the store did not answer: {error}") from error

    def _asked_for(self, inode: Inode) -> bool:
        """Whether the mirror is worth asking for what the store has too."""
        return inode.digest is not None and self.mirror_may_have(inode.ino, inode.version)

    async def _from_mirror(self, inode: Inode, *, patient: bool) -> Tier | None:
        """Fetch from the mirror, again until the read timeout where nobody else has it."""
        if inode.digest is None:
            raise UnknownReplicaError("it has no digest")
        tier = next((tier for tier in self._placement.tiers if self._room(tier, inode)), None)
        if tier is None:
            return None
        delay_s = _RETRY_FIRST_S
        give_up = trio.current_time() + (self._read_timeout_s or float("inf"))
        while True:
            try:
                await self._fetch_into(tier, inode, inode.version)
            except (CorruptCopyError, UnknownReplicaError, PeerFencedError):
                raise
            except PeerError:
                if not patient or trio.current_time() > give_up:
                    raise
                await trio.sleep(delay_s * random.uniform(0.5, 1.0))
                delay_s = min(2 * delay_s, _RETRY_MAX_S)
            else:
                return tier

    def _room(self, tier: Tier, inode: Inode) -> bool:
        size = inode.version_size
        return size <= tier.budget_bytes and self._placement.make_room(tier, size)

    async def _fetch_into(self, tier: Tier, inode: Inode, version: int) -> None:
        """Fetch beside the tier's file, and put it in its place where nobody wrote meanwhile."""
        assert self._source is not None
        aside = tier.path(inode.ino).with_suffix(".fetch")
        fd = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        tier.hold(-inode.ino, inode.version_size)  # a key that no inode has
        try:
            replica = await self._source.fetch(inode.ino, version, fd)
            if version == inode.version and replica.digest != inode.digest:
                raise CorruptCopyError("the mirror's replica is of another content")
            self._put_in_place(tier, inode, aside, version, replica)
        finally:
            os.close(fd)
            tier.drop(-inode.ino)
            aside.unlink(missing_ok=True)

    def _put_in_place(
        self, tier: Tier, inode: Inode, aside: Path, version: int, replica: Replica
    ) -> None:
        now = self._catalog.find(inode.ino)
        if now is None or now.version != inode.version or now.tier is not None or now.nlink == 0:
            return  # somebody has written it anew: that is newer than any replica
        os.utime(aside, ns=(now.atime_ns, now.version_mtime_ns))
        aside.replace(tier.path(inode.ino))
        tier.hold(inode.ino, replica.size)
        if version != now.version:
            self._catalog.contents.roll_back(inode.ino, version, replica.size, replica.digest)
        self._catalog.contents.set_tier(inode.ino, tier.name)
        self._placement.touched(inode.ino)

    # --- what a tier has -----------------------------------------------------------------------

    async def is_right(self, inode: Inode, tier: Tier) -> bool:
        """Whether the tier's copy is the newest version, by its digest; a wrong one is dropped.

        Only for files that nobody writes. Raises `LostCopyError` where it is wrong and the only
        copy, which then stays, for a person to look at.
        """
        if inode.digest is None:
            return True
        try:
            fd = tier.open(inode.ino)
        except FileNotFoundError:
            return False
        try:
            found = await trio.to_thread.run_sync(_digest, fd, inode.version_size)
        finally:
            os.close(fd)
        now = self._catalog.find(inode.ino)
        if found == inode.digest or now is None or now.version != inode.version or now.writing:
            return True
        self._fetcher.reads.corrupt_copies += 1
        log.error("corrupt copy", copy=tier.name, ino=inode.ino, version=inode.version)
        if inode.dirty and self._source is None:
            path = self._catalog.path(inode.ino) or f"inode {inode.ino}"
            self.lost[inode.ino] = path
            raise LostCopyError(f"{path}: its only copy is corrupt")
        self._catalog.contents.set_tier(inode.ino, None)
        self._placement.drop(inode.ino, tier.name)
        return False

    # --- in the background ---------------------------------------------------------------------

    def want(self, inodes: Iterable[int]) -> None:
        """These have lost the tier that held them."""
        rows = [row for row in map(self._catalog.find, inodes) if row is not None]
        self._passed.doubt([row.ino for row in rows if row.dirty])
        for row in sorted(rows, key=lambda row: -(row.closed_at or 0.0)):
            if self._source is None and row.dirty:
                self.lost[row.ino] = self._catalog.path(row.ino) or f"inode {row.ino}"
            else:
                self._missing[row.ino] = None

    def suspect(self, ino: int) -> None:
        """Something else than the version was read from the inode's tier file."""
        self._suspects[ino] = None
        self._wake.set()

    async def run(self) -> None:
        """Bring what is missing, the newest first, and look at suspects, until cancelled."""
        if self._source is not None:
            await self._look()
        limit = trio.CapacityLimiter(_AT_ONCE)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._passed.run)
            while True:
                self._wake = trio.Event()
                while self._suspects:
                    await self._examine(self._suspects.popitem()[0])
                for ino in [ino for ino in self._missing if ino not in self._started]:
                    await limit.acquire_on_behalf_of(ino)
                    self._started.add(ino)
                    nursery.start_soon(self._bring_one, ino, limit)
                if not self._suspects:
                    await self._wake.wait()

    async def _examine(self, ino: int) -> None:
        inode = self._catalog.find(ino)
        tier = self._placement.tier(inode.tier) if inode is not None else None
        if inode is None or tier is None or inode.writing or inode.nlink == 0:
            return
        try:
            if not await self.is_right(inode, tier):
                self._missing[ino] = None
        except LostCopyError as error:
            log.error("not to be recovered", ino=ino, error=str(error))

    async def _look(self) -> None:
        assert self._source is not None
        delay_s = _RETRY_FIRST_S
        while True:
            try:
                await self._source.look()
            except PeerFencedError:
                return
            except (PeerError, SetupError, OSError) as error:
                log.warning("the mirror does not answer", error=str(error))
                await trio.sleep(delay_s)
                delay_s = min(2 * delay_s, _RETRY_MAX_S)
            else:
                return

    async def _bring_one(self, ino: int, limit: trio.CapacityLimiter) -> None:
        try:
            while True:
                inode = self._catalog.find(ino)
                if inode is None or inode.nlink == 0 or inode.tier is not None or inode.writing:
                    return
                try:
                    await self.bring(inode)
                    return
                except DeadlineError as error:
                    log.warning("still missing", ino=ino, error=str(error))
                    await trio.sleep(_RETRY_MAX_S)
                except LmstorfsError as error:
                    log.error("not recovered", ino=ino, error=str(error))
                    return
        finally:
            self._missing.pop(ino, None)
            self._started.discard(ino)
            self.on_brought(ino)
            limit.release_on_behalf_of(ino)


def _digest(fd: int, size: int) -> str | None:
    try:
        return digest_fd(fd, size)
    except EOFError:
        return None
