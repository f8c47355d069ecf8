"""The daemon of one mount: composes catalog, tiers, store, flusher and FUSE in one trio nursery.

It ends when the kernel is done with the mount (`umount`, `lmstorfs unmount`, a signal): then
what is dirty is brought to the store, and only with nothing left its exit code lets the keeper
give the RAM tier back.
"""

import argparse
import json
import os
import resource
import signal
import socket
import sys
from pathlib import Path

import pyfuse3
import structlog
import trio

from lmstorfs import mounts
from lmstorfs.catalog import Merger
from lmstorfs.checkpoint import Digester, Flusher, NameSync, Versions
from lmstorfs.checkpoint.fence import Fence
from lmstorfs.checkpoint.guard import Guard
from lmstorfs.checkpoint.ladder import Ladder
from lmstorfs.checkpoint.mirror.client import Mirror
from lmstorfs.checkpoint.mirror.streams import Growing
from lmstorfs.checkpoint.passed import PassedVersions
from lmstorfs.checkpoint.recovery import adopt, note_closed
from lmstorfs.checkpoint.seals import Seals
from lmstorfs.checkpoint.surveyor import Surveyor
from lmstorfs.checkpoint.undelete import Undeleter
from lmstorfs.config import PARTS, MountConfig, read_config
from lmstorfs.control import ControlServer
from lmstorfs.dataset import Fetcher
from lmstorfs.draining import Drainer, nobody
from lmstorfs.equipment import (
    identity,
    open_catalog,
    peer_address,
    replica_source,
    replicas_kept,
    tiers_of,
)
from lmstorfs.errors import LmstorfsError
from lmstorfs.fuse.channel import Channel
from lmstorfs.fuse.choosing import why_userspace
from lmstorfs.fuse.data import DataPath
from lmstorfs.fuse.handle import handle_writable
from lmstorfs.fuse.handles import OpenFiles
from lmstorfs.fuse.mounting import unmount_fuse
from lmstorfs.fuse.openlog import OpenLog
from lmstorfs.fuse.operations import Operations
from lmstorfs.fuse.refresh import Refresher
from lmstorfs.fuse.space import SpaceReport
from lmstorfs.logs import configure
from lmstorfs.operations import ControlOperations
from lmstorfs.report import Report
from lmstorfs.searching import StoreSearch
from lmstorfs.store import open_store
from lmstorfs.store.pool import WorkerPool
from lmstorfs.tiers import Placement

log = structlog.get_logger()

EXIT_NOTHING_LEFT = 0
EXIT_FAILED = 1
EXIT_DIRTY_LEFT = 3
# An fsync that waits for the store holds one of pyfuse3's tasks; nobody else may wait for it.
_FUSE_TASKS_MAX = 4096
_OPEN_FILES_MAX = 1 << 20
_REPLY_SENT_S = 5.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Daemon:
    """All parts of one mount, made and wired in one place."""

    def __init__(self, config: MountConfig, device_fd: int, restarts: int) -> None:
        """Take `restarts`: how many daemons have served this mount before and died."""
        self.config = config
        self.takeover = restarts > 0
        self.catalog = open_catalog(config)
        self.store = open_store(config.store)
        self.pool = WorkerPool(config.store, config.workers)
        self.placement = Placement(tiers_of(config), self.catalog, self._is_open)
        self.fence = Fence(
            self.store,
            self.catalog.db,
            enabled=config.mirror is not None and not config.read_only,
            label=f"{socket.gethostname()}:{config.mountpoint}",
        )
        self.flusher = Flusher(
            self.catalog,
            self.placement,
            self.store,
            self.pool,
            self.fence,
            delay_s=config.flush_delay_s,
        )
        self.fence.on_fenced = self.flusher.announce
        self.names = NameSync(self.catalog, self.store, self.flusher)
        self.digester = Digester(
            self.catalog, self.placement, self.flusher, delay_s=config.flush_delay_s
        )
        self.mirror = self._mirror()
        self.versions = Versions(
            self.catalog,
            self.placement,
            self.flusher,
            self.digester,
            mirror=self.mirror,
            fsync=config.fsync,
            fsync_timeout_s=config.fsync_timeout_s,
        )
        self.fetcher = Fetcher(
            self.catalog,
            self.placement,
            self.store,
            self.pool,
            read_timeout_s=config.read_timeout_s,
        )
        merger = Merger(self.catalog, self._is_open, empty_shown=self.store.lists_empty_directories)
        self.ladder = Ladder(
            self.catalog,
            self.placement,
            self.fetcher,
            replica_source(config, self.catalog),
            PassedVersions(self.catalog, merger, self.placement, self.store, self.flusher),
            read_timeout_s=config.read_timeout_s,
        )
        self.fetcher.names_changed = self.flusher.changed
        self.ladder.on_brought = self.flusher.look_again
        self.flusher.on_suspect = self.ladder.suspect
        if self.mirror is not None:
            self.mirror.on_suspect = self.ladder.suspect
        mirror_holds = self.mirror.holds if self.mirror is not None else lambda ino, version: False
        self.surveyor = Surveyor(self.catalog, self.flusher, mirror_holds)
        self.guard = Guard(
            self.catalog,
            self.placement,
            self.flusher,
            self.surveyor,
            self._is_open,
            self.digester.add,
            enabled=config.guard,
        )
        self.opened = OpenFiles(
            self.catalog,
            self.placement,
            self.versions,
            self.flusher,
            self.digester,
            self.fetcher,
            self.ladder,
            self.guard,
        )
        self.replicas = replicas_kept(config)
        self.refresher = Refresher(
            self.catalog,
            merger,
            self.placement,
            self.store,
            self.flusher.health,
            attr_timeout_s=config.attr_timeout_s,
            read_timeout_s=config.read_timeout_s,
        )
        wanted = config.data_path == "auto" and os.geteuid() == 0
        self.openlog = OpenLog(config.state / PARTS["ram"] / "opens", adopted=self.takeover)
        self.channel = Channel(device_fd, DataPath(self.opened), self.openlog, passthrough=wanted)
        self.opened.close_backing = self.channel.forget_backing
        self.drainer = Drainer(self.catalog, self.flusher, self.ladder.coming)
        self.drainer.let_go = self.guard.look
        self.seals = Seals(self.catalog, self.flusher)
        self.drainer.seal = self.seals.look
        self.report = Report(
            config,
            self.catalog,
            self.placement,
            self.flusher,
            self.fetcher,
            self.opened,
            self.ladder,
            self.mirror,
            self.replicas,
            self.guard,
            self.surveyor,
        )
        self.report.restarts = restarts
        self.control = ControlOperations(
            config,
            self.catalog,
            self.flusher,
            self.mirror,
            self.drainer,
            self.report,
            StoreSearch(self.catalog, self.refresher),
            self.guard,
            Undeleter(
                self.catalog,
                self.placement,
                self.guard,
                self.surveyor,
                self.ladder,
                self.flusher,
                self.digester,
                self.mirror,
                self.refresher.made_here,
            ),
        )
        self._signals = 0

    def _mirror(self) -> Mirror | None:
        if self.config.mirror is None:
            return None
        mirror = Mirror(
            self.catalog,
            self.placement,
            peer_address(self.config, self.config.mirror),
            identity(self.config, self.catalog),
            growing=self._growing,
            announce=self.flusher.announce,
        )
        mirror.on_fenced = self.fence.fence
        self.digester.on_digest = mirror.closed
        self.catalog.db.on_change = mirror.wake
        return mirror

    def _growing(self) -> list[Growing]:
        """Return what is open for writing, for the mirror to send while it grows."""
        return [
            Growing(file.ino, os.fstat(file.fd).st_size, file.anew)
            for file in self.opened.writers()
            if file.fd is not None
        ]

    def _is_open(self, ino: int) -> bool:
        return self.opened.is_open(ino)

    # --- life --------------------------------------------------------------------------------

    async def run(self, ready_fd: int) -> int:
        """Serve the mount until it is gone; return the exit code."""
        self._adopt()
        async with trio.open_nursery() as nursery:
            await nursery.start(self.pool.run)
            for part in (
                self.fence,
                self.flusher,
                self.names,
                self.digester,
                self.versions,
                self.refresher,
                self.guard,
            ):
                nursery.start_soon(part.run)
            nursery.start_soon(self.opened.watch_growth)
            nursery.start_soon(self.ladder.run)
            nursery.start_soon(self.seals.run)
            for peer in (self.mirror, self.replicas):
                if peer is not None:
                    nursery.start_soon(peer.run)
            await nursery.start(self._watch_signals)
            served = trio.Event()
            nursery.start_soon(self._serve_kernel, served)
            await self.channel.initialised.wait()
            self._settle_data_path()
            server = ControlServer(self.config.state / PARTS["socket"], self.control.handlers())
            await nursery.start(server.run)
            mounts.register(self.config, os.getpid())
            self._say_ready(ready_fd)
            await served.wait()
            left = await self._finish()
            with trio.move_on_after(_REPLY_SENT_S):  # whoever asked for the unmount is told
                await server.idle()
            nursery.cancel_scope.cancel()
        mounts.unregister(self.config)
        self.catalog.close()
        self.store.close()
        kept = self.replicas is not None and self.replicas.held > 0
        return EXIT_DIRTY_LEFT if left or kept else EXIT_NOTHING_LEFT

    def _adopt(self) -> None:
        """Take over what an earlier daemon left, and with the mount itself what is open on it."""
        survivors = self.openlog.survivors
        opens = survivors.by_inode()
        if not self.takeover:
            self.catalog.db.forget_done()
            ram = self.placement.tiers[0]
            note_closed(self.catalog, ram, self.config.state / PARTS["closed"])
        self.report.adopted = adopt(
            self.catalog,
            self.placement,
            self.digester,
            opened=opens.keys(),
            written={ino for ino in opens if any(handle_writable(o.handle) for o in opens[ino])},
            takeover=self.takeover,
        )
        self.opened.take_over(survivors)
        self.ladder.want(self.report.adopted.missing)

    async def _serve_kernel(self, served: trio.Event) -> None:
        operations = Operations(
            self.catalog,
            self.opened,
            self.refresher,
            SpaceReport(self.store),
            resent=self.channel.resent,
            attr_timeout_s=self.config.attr_timeout_s,
            read_only=self.config.read_only,
        )
        pyfuse3.init(operations, self.channel.mountpoint, set())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pyfuse3.main, 1, _FUSE_TASKS_MAX)
            await self.channel.run(adopted=self.takeover)
            nursery.cancel_scope.cancel()
        pyfuse3.close(unmount=False)
        self.channel.close()
        served.set()

    def _settle_data_path(self) -> None:
        ram = self.placement.tiers[0].directory
        reason = why_userspace(self.config.data_path, self.channel, ram)
        self.opened.passthrough = self.channel.passthrough = reason is None
        self.report.data_path = "userspace" if reason else "passthrough"
        self.report.data_path_reason = reason

    def _say_ready(self, ready_fd: int) -> None:
        answer = {
            "ready": True,
            "data_path": self.report.data_path,
            "reason": self.report.data_path_reason,
        }
        os.write(ready_fd, json.dumps(answer).encode() + b"\n")
        os.close(ready_fd)
        log.info("mounted", mountpoint=self.config.mountpoint, data_path=self.report.data_path)

    async def _finish(self) -> bool:
        """Bring what is dirty to the store, if that is wanted; return whether anything is left."""
        self.report.state = "draining"
        self.flusher.hurry = True
        self.flusher.wake()
        self.guard.look()
        while self.control.drain_at_end and self._left() and self.fence.reason is None:
            await self.drainer.drain([], nobody)
        torn = self.report.torn()
        if torn:
            log.warning("never closed, and not in the store", files=torn)
        left, kept = self._left(), self.guard.only_here()
        log.info("unmounted", left=left, kept_bytes=kept)
        return left + kept > 0

    def _left(self) -> int:
        return self.catalog.contents.pending().files + len(self.catalog.journal)

    # --- signals -----------------------------------------------------------------------------

    async def _watch_signals(
        self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        with trio.open_signal_receiver(*_SIGNALS) as signals:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)  # the keeper has blocked them
            task_status.started()
            async for number in signals:
                self._signals += 1
                log.info("signal", number=number)
                if self._signals > 1:  # asked twice: the dirty data waits in the tiers
                    self.control.drain_at_end = False
                    self.flusher.announce()
                await self._drain_and_unmount(drain=self._signals == 1)

    async def _drain_and_unmount(self, *, drain: bool) -> None:
        self.report.state = "draining"
        if drain:
            await self.drainer.drain([], nobody)
        await trio.to_thread.run_sync(unmount_fuse, self.config.mountpoint, abandon_on_cancel=True)


def main() -> int:
    """Run the daemon that the keeper asked for."""
    parser = argparse.ArgumentParser(prog="lmstorfs-daemon")
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--device-fd", type=int, required=True)
    parser.add_argument("--ready-fd", type=int, required=True)
    parser.add_argument("--restarts", type=int, default=0)
    args = parser.parse_args()
    for fd in (args.device_fd, args.ready_fd):
        os.set_inheritable(fd, False)
    config = read_config(args.state)
    configure(config.log_level)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = min(limit, _OPEN_FILES_MAX) if limit != resource.RLIM_INFINITY else _OPEN_FILES_MAX
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limit))
    try:
        return trio.run(Daemon(config, args.device_fd, args.restarts).run, args.ready_fd)
    except LmstorfsError as error:
        os.write(args.ready_fd, json.dumps({"error": str(error), "exit_code": 1}).encode() + b"\n")
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
