"""The origin's side: keeps a peer's replicas as near to what is written here as the link allows.

One connection, one thing at a time, the most urgent first: changed rows of the catalog, versions
that an fsync waits for, other closed versions, and what grows just now, in slices that nothing
urgent waits for long. No writer ever waits for any of it.

A version counts as mirrored when the peer has all its blocks by digest and, before that, the rows
that give it its name.
"""

import os
import random
import time
from collections.abc import Callable

import msgspec
import structlog
import trio

from lmstorfs.catalog import Inode, SqliteCatalog
from lmstorfs.checkpoint.mirror import messages as m
from lmstorfs.checkpoint.mirror.backlog import Backlog, Transfer
from lmstorfs.checkpoint.mirror.changes import Changes
from lmstorfs.checkpoint.mirror.peer import (
    SLICE_BLOCKS,
    SLICE_BYTES,
    DiffersError,
    Identity,
    Offered,
    Peer,
    PeerAddress,
    PeerFencedError,
    PeerFullError,
    UnknownReplicaError,
)
from lmstorfs.checkpoint.mirror.streams import Growing, Streams
from lmstorfs.digest import BLOCK_BYTES, digest_blocks
from lmstorfs.errors import PeerError, SetupError
from lmstorfs.tiers import Placement

log = structlog.get_logger()

_ROWS_AT_ONCE = 500  # some milliseconds' work, then others get their turn
_GROUP_FILES = 64
_GROUP_BYTES = BLOCK_BYTES
_RETRY_FIRST_S = 0.2
_RETRY_MAX_S = 15.0
_GROWTH_LOOK_S = 0.01
_IDLE_LOOK_S = 1.0
_SIGN_OF_LIFE_S = 5.0
_FULL_PAUSE_S = 1.0


class MirrorStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The mirror as `status` tells of it."""

    peer: str
    state: str
    lag_bytes: int
    lag_s: float
    reason: str | None


class Mirror:
    """The replicas of one mount at one peer."""

    def __init__(
        self,
        catalog: SqliteCatalog,
        placement: Placement,
        where: PeerAddress,
        who: Identity,
        *,
        growing: Callable[[], list[Growing]],
        announce: Callable[[], None],
    ) -> None:
        """Take `growing`, which tells what is open for writing, and `announce`, called on news."""
        self._catalog = catalog
        self._placement = placement
        self._where = where
        self._who = who
        self._announce = announce
        self._changes = Changes(catalog.db)
        self._backlog = Backlog(catalog)
        self._streams = Streams(catalog, placement, growing, self._backlog.waits)
        self._sequence = int(catalog.db.meta("sequence") or 0)
        self._acknowledged = 0  # the last sequence that this daemon heard of; 0: none
        self._wake = trio.Event()
        self._peer: Peer | None = None
        self._problem: str | None = "not connected yet"
        self._since = time.time()
        self._full = False
        self._heard = 0.0
        self._sending_rows = False
        self._rows_noted = trio.Event()
        self.on_suspect: Callable[[int], None] = lambda ino: None
        """Called where the tier's file shows a version whose content it has not."""
        self.on_fenced: Callable[[str], None] = lambda reason: None
        """Called where the peer says that another node has taken over."""

    # --- asked by others ---------------------------------------------------------------------

    def closed(self, ino: int, version: int, blocks: bytes | None) -> None:
        """A version is whole and its digest known; `blocks` are its blocks' digests."""
        self._backlog.add(ino, version, blocks)
        self._wake.set()

    def urgent(self, ino: int) -> None:
        """An fsync waits for this inode."""
        self._backlog.urgent.add(ino)
        self._wake.set()

    def wake(self) -> None:
        """Something may be there to send."""
        self._wake.set()

    def holds(self, ino: int, version: int) -> bool:
        """Whether the peer holds this version. One that does not answer may hold nothing."""
        return self._peer is not None and self._backlog.held.get(ino) == version

    async def names(self) -> None:
        """Return when the peer has all names and attributes as they are now, or is gone."""
        pending = self._changes.pending()
        if not pending and not self._sending_rows:
            return
        target = self._sequence + int(pending)
        self._wake.set()
        while self._peer is not None and self._acknowledged < target:
            await self._rows_noted.wait()

    @property
    def connected(self) -> bool:
        """Whether the peer answers."""
        return self._peer is not None

    def status(self) -> MirrorStatus:
        """Return the state: `ok`, `lagging` (connected, behind) or `down`."""
        lag_bytes, oldest = self._backlog.lag()
        state = "down" if self._peer is None else "lagging" if self._full else "ok"
        if state == "ok" and lag_bytes > 4 * SLICE_BYTES:
            state = "lagging"
        reason = self._problem
        if reason is not None and self._peer is None:
            since = time.strftime("%H:%M:%S", time.localtime(self._since))
            reason = f"mirror {self._where.address} down since {since}: {reason}"
        return MirrorStatus(
            peer=self._where.address,
            state=state,
            lag_bytes=lag_bytes,
            lag_s=round(max(0.0, time.time() - oldest), 1) if oldest else 0.0,
            reason=reason,
        )

    # --- the connection ----------------------------------------------------------------------

    async def run(self) -> None:
        """Keep the peer up to date until cancelled."""
        wait_s = _RETRY_FIRST_S
        while True:
            began = trio.current_time()
            try:
                await self._connection()
            except PeerFencedError as error:
                self._failed(error)
                self.on_fenced(str(error))
                return
            except (PeerError, SetupError, EOFError, OSError) as error:
                self._failed(error)
            if self._heard > began:
                wait_s = _RETRY_FIRST_S
            await trio.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(2 * wait_s, _RETRY_MAX_S)

    def _failed(self, error: Exception) -> None:
        if self._problem is None:
            self._since = time.time()
        if str(error) != self._problem:
            log.warning("mirror", peer=self._where.address, problem=str(error))
        self._problem = str(error)

    async def _connection(self) -> None:
        peer = await trio.to_thread.run_sync(
            Peer.open, self._where, self._who, "replicate", abandon_on_cancel=True
        )
        try:
            self._begin(peer)
            while True:
                await self._one_step(peer)
        finally:
            self._peer = None
            self._sending_rows = False
            self._tell_rows()
            peer.close()
            self._streams.clear()
            self._backlog.disconnected()

    def _begin(self, peer: Peer) -> None:
        self._peer, self._problem, self._full = peer, None, False
        self._heard = trio.current_time()
        self._backlog.connected(peer.welcome.held, self._who.keep)
        if not self._acknowledged or peer.welcome.sequence != self._acknowledged:
            self._acknowledged = 0
            self._changes.all_again()
        log.info("mirror connected", peer=self._where.address, held=len(peer.welcome.held))
        self._announce()

    async def _one_step(self, peer: Peer) -> None:
        """Do the most urgent thing, or wait for one."""
        if self._changes.pending():
            await self._send_rows(peer)
        elif group := self._next_group():
            await self._send_group(peer, group)
        elif self._backlog.transfer is not None:
            await self._send_slice(peer, self._backlog.transfer)
        elif not await self._send_growth(peer):
            self._wake = trio.Event()
            with trio.move_on_after(_GROWTH_LOOK_S if self._streams.any_growing else _IDLE_LOOK_S):
                await self._wake.wait()
            peer.check()
            if trio.current_time() - self._heard > _SIGN_OF_LIFE_S:
                await self._rows(peer, m.Rows(sequence=self._acknowledged, rows=[]))

    async def _blocking(self, function: Callable[..., object], *args: object) -> None:
        await trio.to_thread.run_sync(function, *args, abandon_on_cancel=True)

    # --- rows --------------------------------------------------------------------------------

    async def _send_rows(self, peer: Peer) -> None:
        first = self._acknowledged == 0
        self._sending_rows = True
        while True:
            rows = self._changes.take(_ROWS_AT_ONCE)
            last = not self._changes.pending()
            self._sequence += 1
            # Noted here first: a peer that knows a higher number has seen a later catalog than
            # the one that a power cut may leave of ours.
            self._catalog.db.set_meta("sequence", str(self._sequence))
            batch = m.Rows(sequence=self._sequence, first=first, last=last, rows=rows)
            try:
                await self._rows(peer, batch)
            except BaseException:
                self._changes.put_back(rows)
                raise
            first = False
            if last:
                self._acknowledged = self._sequence
                self._sending_rows = False
                self._tell_rows()
                return

    async def _rows(self, peer: Peer, batch: m.Rows) -> None:
        dropped = await trio.to_thread.run_sync(peer.rows, batch, abandon_on_cancel=True)
        self._heard = trio.current_time()
        self._backlog.dropped(dropped)

    def _tell_rows(self) -> None:
        self._rows_noted.set()
        self._rows_noted = trio.Event()

    # --- versions ----------------------------------------------------------------------------

    def _next_group(self) -> list[Offered]:
        """Return one large version, or several small ones, with their files open."""
        group: list[Offered] = []
        for waiting in self._backlog.next(_GROUP_FILES, _GROUP_BYTES):
            inode = self._catalog.find(waiting.ino)
            offered = self._open(inode, waiting.version, waiting.blocks) if inode else None
            if offered is None:
                self._backlog.give_up(waiting.ino, waiting.version)
            else:
                group.append(offered)
        return group

    def _open(self, inode: Inode, version: int, blocks: bytes | None) -> Offered | None:
        tier = self._placement.tier(inode.tier)
        if tier is None or inode.version != version or inode.digest is None or inode.nlink == 0:
            return None
        try:
            fd = os.open(tier.path(inode.ino), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        if not inode.is_version(os.fstat(fd)):
            os.close(fd)
            return None  # a writer is at it: what it closes is a version of its own
        return Offered(
            ino=inode.ino,
            version=version,
            size=inode.version_size,
            digest=inode.digest,
            blocks=blocks or b"",
            fd=fd,
        )

    async def _send_group(self, peer: Peer, group: list[Offered]) -> None:
        try:
            for at, version in enumerate(group):
                group[at] = await self._with_blocks(version)
            rotten = [version for version in group if version.size and not version.blocks]
            group = [version for version in group if version not in rotten]
            for version in rotten:
                os.close(version.fd)
                self._backlog.give_up(version.ino, version.version)
                self.on_suspect(version.ino)
            if not group:
                return
            if self._changes.pending():  # the rows that name them
                await self._send_rows(peer)
            wanted = await trio.to_thread.run_sync(peer.offer, group, abandon_on_cancel=True)
        except PeerFullError as error:
            for version in group:
                os.close(version.fd)
            self._is_full(group, error)
            return
        except BaseException:
            for version in group:
                os.close(version.fd)
            raise
        if group[0].size > _GROUP_BYTES:  # it is alone
            self._backlog.begin(Transfer(group[0], wanted[0]))
            return
        try:
            for version, blocks in zip(group, wanted, strict=True):
                await self._blocking(peer.blocks, version, blocks)
            await self._commit(peer, group)
        finally:
            for version in group:
                os.close(version.fd)

    async def _with_blocks(self, version: Offered) -> Offered:
        if version.blocks or not version.size:
            return version
        digest, blocks = await trio.to_thread.run_sync(
            digest_blocks, version.fd, version.size, abandon_on_cancel=True
        )
        if digest != version.digest:
            return version  # the tier's copy is not the version any more
        return msgspec.structs.replace(version, blocks=blocks)

    async def _send_slice(self, peer: Peer, transfer: Transfer) -> None:
        if transfer.blocks:
            now, transfer.blocks = transfer.blocks[:SLICE_BLOCKS], transfer.blocks[SLICE_BLOCKS:]
            await self._blocking(peer.blocks, transfer.version, now)
            return
        if self._changes.pending():
            await self._send_rows(peer)
        self._backlog.finished()
        try:
            await self._commit(peer, [transfer.version])
        finally:
            os.close(transfer.version.fd)

    async def _commit(self, peer: Peer, group: list[Offered]) -> None:
        failures = await trio.to_thread.run_sync(peer.commit, group, abandon_on_cancel=True)
        for version, failure in zip(group, failures, strict=True):
            if failure is None:
                self._full = False
                self._problem = None
                self._backlog.mirrored(version.ino, version.version)
                self._streams.forget(version.ino)
            elif isinstance(failure, PeerFullError):
                self._is_full([version], failure)
            elif isinstance(failure, DiffersError):
                self._backlog.again(version.ino, version.version)
            elif isinstance(failure, UnknownReplicaError):
                self._backlog.give_up(version.ino, version.version)
            else:
                raise failure
        self._announce()

    def _is_full(self, group: list[Offered], error: PeerFullError) -> None:
        if not self._full:
            log.warning("mirror full", peer=self._where.address)
        self._full = True
        self._problem = f"mirror {self._where.address}: {error}"
        for version in reversed(group):
            self._backlog.refused(version.ino, _FULL_PAUSE_S)

    async def _send_growth(self, peer: Peer) -> bool:
        """Send what writers have added since the last look; False: nothing worth it."""
        if self._full:
            return False
        sent = False
        for piece in self._streams.slices():
            await self._blocking(peer.data, piece.ino, piece.fd, piece.start, piece.count)
            sent = True
        return sent
