"""The workers as the daemon sees them: calls that can be cancelled, and outlive a dying worker.

Why processes: a digest or an upload in the daemon's own threads would take the interpreter lock
from under the file operations. Why several calls in one worker: a small file's upload is mostly
waiting, so eight of them share a process; of the long calls each worker has one of a kind at a
time, and a fetch that a reader waits for never stands behind a flush.
"""

import logging
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import TypeVar

import msgspec
import trio

from lmstorfs.errors import StoreError
from lmstorfs.store.store import StoreConfig
from lmstorfs.store.wire import Digest, Digested, Fetch, Fetched, Job, Result, Upload, Uploaded
from lmstorfs.store.worker_process import ACKNOWLEDGE_S, OnBegan, OnMoved, WorkerProcess

log = logging.getLogger(__name__)

__all__ = ["Fetch", "Fetched", "PoolStatistics", "Upload", "Uploaded", "WorkerPool"]

SMALL_BYTES = 8 << 20  # below this a call is mostly waiting for the store
_RESTART_MIN_S = 0.1  # before a worker that died is started again; doubled while it keeps dying
_RESTART_MAX_S = 5.0
_R = TypeVar("_R", Uploaded, Fetched, Digested)
_HEALTHY_AFTER_S = 10.0  # a worker that lived this long did not die of starting


class _Lane(Enum):
    """Kinds of calls, and how many of a kind one worker has under way."""

    SMALL = ("small", 8)
    UPLOAD = ("upload", 1)
    FETCH = ("fetch", 1)
    DIGEST = ("digest", 1)

    @property
    def width(self) -> int:
        return self.value[1]


class PoolStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What the pool does right now, and did so far."""

    workers: int
    """Processes that are alive."""
    busy: int
    """Calls under way."""
    queued: int
    """Calls that wait for a worker."""
    bytes_uploaded: int
    bytes_fetched: int
    restarts: int


class _Worker:
    """A process and its calls by lane."""

    def __init__(self, process: WorkerProcess) -> None:
        self.process = process
        self.load = dict.fromkeys(_Lane, 0)

    def has_room(self, lane: _Lane) -> bool:
        return self.process.alive and self.load[lane] < lane.width


class _Waiter:
    """A call that waits for a worker; None after `event` means that none will come."""

    def __init__(self) -> None:
        self.event = trio.Event()
        self.worker: _Worker | None = None


class WorkerPool:
    """A number of worker processes that serve one store."""

    def __init__(self, config: StoreConfig, workers: int) -> None:
        self._config = config
        self._count = workers
        self._workers: list[_Worker] = []
        self._waiting: dict[_Lane, deque[_Waiter]] = {lane: deque() for lane in _Lane}
        self._idle = trio.Event()
        self._closed = False
        self._bytes_uploaded = 0
        self._bytes_fetched = 0
        self._restarts = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the workers alive until cancelled; they are killed then.

        Calls that are cancelled at the same moment still get their acknowledgement first: the
        workers are shielded until no call is under way, or the time for that is over.
        """
        workers = trio.CancelScope(shield=True)
        async with trio.open_nursery() as nursery:
            await nursery.start(self._keep_workers, workers)
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self._close()
                deadline = trio.current_time() + ACKNOWLEDGE_S
                with trio.CancelScope(shield=True, deadline=deadline):
                    while self._busy():
                        self._idle = trio.Event()
                        await self._idle.wait()
                workers.cancel()

    async def digest(self, source: str, size: int) -> str:
        """Return the digest of the first `size` bytes of the file `source`."""
        lane = _Lane.SMALL if size < SMALL_BYTES else _Lane.DIGEST
        result = await self._call(lane, Digest(source=source, size=size))
        return _expect(result, Digested).digest

    async def upload(
        self,
        upload: Upload,
        *,
        on_moved: Callable[[int], None] | None = None,
        on_began: Callable[[str, str], None] | None = None,
    ) -> Uploaded:
        """Bring a version to the store.

        `on_moved` hears of bytes as they are through, `on_began` of an upload id that
        `Store.abort_upload` takes, should neither result nor acknowledgement ever come.
        """

        def moved(count: int) -> None:
            self._bytes_uploaded += count
            if on_moved is not None:
                on_moved(count)

        lane = _Lane.SMALL if upload.size < SMALL_BYTES else _Lane.UPLOAD
        return _expect(await self._call(lane, upload, moved, on_began), Uploaded)

    async def fetch(
        self, fetch: Fetch, *, on_moved: Callable[[int], None] | None = None
    ) -> Fetched:
        """Bring an object into a file. Raises `CorruptCopyError` where its digest is wrong."""

        def moved(count: int) -> None:
            self._bytes_fetched += count
            if on_moved is not None:
                on_moved(count)

        lane = _Lane.SMALL if fetch.size < SMALL_BYTES else _Lane.FETCH
        return _expect(await self._call(lane, fetch, moved), Fetched)

    def statistics(self) -> PoolStatistics:
        """Return what the pool does right now."""
        return PoolStatistics(
            workers=sum(worker.process.alive for worker in self._workers),
            busy=self._busy(),
            queued=sum(len(waiting) for waiting in self._waiting.values()),
            bytes_uploaded=self._bytes_uploaded,
            bytes_fetched=self._bytes_fetched,
            restarts=self._restarts,
        )

    def pids(self) -> list[int]:
        """Return the process numbers of the workers that are alive."""
        return [worker.process.pid for worker in self._workers if worker.process.alive]

    async def _keep_workers(
        self, scope: trio.CancelScope, *, task_status: trio.TaskStatus[None]
    ) -> None:
        with scope:
            async with trio.open_nursery() as nursery:
                for _ in range(self._count):
                    await nursery.start(self._keep_worker)
                task_status.started()

    async def _keep_worker(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Run one worker after the other; ready when the first has a process.

        What that process still has to import, it imports while calls already wait at its socket.
        """
        pause = _RESTART_MIN_S
        ready = False
        while True:
            started = trio.current_time()
            try:
                worker = _Worker(WorkerProcess(self._config))
            except OSError as error:  # no memory, no descriptors: the next try may find some
                if not ready:
                    raise
                log.error("a worker cannot be started: %s", error)
                await trio.sleep(_RESTART_MAX_S)
                continue
            self._workers.append(worker)
            self._dispatch()
            if not ready:
                task_status.started()
                ready = True
            try:
                await worker.process.run()
            finally:
                self._workers.remove(worker)
            self._restarts += 1
            if trio.current_time() - started > _HEALTHY_AFTER_S:
                pause = _RESTART_MIN_S
            await trio.sleep(pause)
            pause = min(2 * pause, _RESTART_MAX_S)

    async def _call(
        self,
        lane: _Lane,
        job: Job,
        on_moved: OnMoved | None = None,
        on_began: OnBegan | None = None,
    ) -> Result:
        worker = await self._acquire(lane)
        try:
            return await worker.process.call(job, on_moved, on_began)
        finally:
            self._release(worker, lane)

    async def _acquire(self, lane: _Lane) -> _Worker:
        """Wait for a worker with room in `lane`, first come, first served."""
        if self._closed:
            raise StoreError("the workers are stopped")
        waiter = _Waiter()
        self._waiting[lane].append(waiter)
        self._dispatch()
        try:
            await waiter.event.wait()
        except trio.Cancelled:
            if waiter.worker is not None:
                self._release(waiter.worker, lane)
            elif not self._closed:
                self._waiting[lane].remove(waiter)
            raise
        if waiter.worker is None:
            raise StoreError("the workers are stopped")
        return waiter.worker

    def _release(self, worker: _Worker, lane: _Lane) -> None:
        worker.load[lane] -= 1
        self._dispatch()
        if not self._busy():
            self._idle.set()

    def _dispatch(self) -> None:
        """Give waiting calls to workers with room, each to the least loaded."""
        for lane, waiting in self._waiting.items():
            while waiting:
                free = [worker for worker in self._workers if worker.has_room(lane)]
                if not free:
                    break
                waiter = waiting.popleft()
                waiter.worker = min(free, key=lambda w: (w.load[lane], sum(w.load.values())))
                waiter.worker.load[lane] += 1
                waiter.event.set()

    def _close(self) -> None:
        """Turn away whoever waits and whoever comes."""
        self._closed = True
        for waiting in self._waiting.values():
            while waiting:
                waiting.popleft().event.set()

    def _busy(self) -> int:
        return sum(sum(worker.load.values()) for worker in self._workers)


def _expect(result: Result, kind: type[_R]) -> _R:
    """Return `result` if it is of the kind that its job asks for."""
    if not isinstance(result, kind):
        raise StoreError(f"a worker answered {type(result).__name__}, not {kind.__name__}")
    return result
