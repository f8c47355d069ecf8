"""One worker process from the daemon's side: started, spoken with, and reaped.

Started by `subprocess` in the calling thread and not by trio: trio starts processes in a thread
of its cache, and the kernel sends the parent's death signal (see `worker`) when that *thread*
ends, which would kill an idle worker ten seconds later.
"""

import logging
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import trio

from lmstorfs.errors import LmstorfsError, StoreError
from lmstorfs.store import wire
from lmstorfs.store.store import StoreConfig

log = logging.getLogger(__name__)

ACKNOWLEDGE_S = 5.0  # for this long a cancelled call waits until nothing of it is left
_REAP_S = 5.0  # a process killed inside a dead NFS mount may not go away; then it is left alone
_RECEIVE_BYTES = 1 << 16

OnMoved = Callable[[int], None]
OnBegan = Callable[[str, str], None]


class _Pending:
    """A call that waits for its answer: a result, an error, or None for stopped."""

    def __init__(self, on_moved: OnMoved | None, on_began: OnBegan | None) -> None:
        self.on_moved = on_moved
        self.on_began = on_began
        self.answered = trio.Event()
        self.answer: wire.Result | LmstorfsError | None = None

    def set(self, answer: wire.Result | LmstorfsError | None) -> None:
        self.answer = answer
        self.answered.set()


class WorkerProcess:
    """A process from its start in `run` to its end; any number of calls meanwhile."""

    def __init__(self, config: StoreConfig) -> None:
        self._pending: dict[int, _Pending] = {}
        self._next_number = 0
        self._outbox, self._to_send = trio.open_memory_channel[wire.ToWorker](math.inf)
        self._sock, self._process = _start()
        self._pidfd = os.pidfd_open(self._process.pid)
        self.alive = True
        self._outbox.send_nowait(wire.Start(config))

    @property
    def pid(self) -> int:
        """The process number, for logs and tests."""
        return self._process.pid

    async def run(self) -> None:
        """Carry messages until the process ends or is killed; its calls fail then."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send_all)
                await self._receive_all()
                nursery.cancel_scope.cancel()
        finally:
            self.kill()
            self._sock.close()
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _REAP_S):
                await trio.lowlevel.wait_readable(self._pidfd)
                self._process.wait()
            os.close(self._pidfd)
            for pending in self._pending.values():
                if not pending.answered.is_set():
                    pending.set(self._death())

    def _death(self) -> StoreError:
        return StoreError(f"the worker process {self.pid} died")

    def kill(self) -> None:
        """End the process; `run` then returns, and the calls under way fail."""
        self.alive = False
        if self._process.returncode is None:
            self._process.kill()

    async def call(
        self, job: wire.Job, on_moved: OnMoved | None, on_began: OnBegan | None
    ) -> wire.Result:
        """Have `job` done. A cancellation goes on only when nothing of the job is left.

        A job that was complete before the cancellation reached it returns its result instead:
        what it published is there, and the caller must know.
        """
        if not self.alive:
            raise self._death()
        number, self._next_number = self._next_number, self._next_number + 1
        pending = self._pending[number] = _Pending(on_moved, on_began)
        self._outbox.send_nowait(wire.Call(number, job))
        try:
            await pending.answered.wait()
        except trio.Cancelled:
            await self._give_up(number, pending)
            if not isinstance(pending.answer, wire.Result):
                raise
        finally:
            del self._pending[number]
        match pending.answer:
            case None:
                raise StoreError("the worker gave a call up that nobody cancelled")
            case LmstorfsError():
                raise pending.answer
            case result:
                return result

    async def _give_up(self, number: int, pending: _Pending) -> None:
        """Cancel a call at the worker and wait for its answer; a deaf worker is killed."""
        self._outbox.send_nowait(wire.Cancel(number))
        deadline = trio.current_time() + ACKNOWLEDGE_S
        with trio.CancelScope(shield=True, deadline=deadline) as scope:
            await pending.answered.wait()
        if scope.cancelled_caught:
            self.kill()

    async def _send_all(self) -> None:
        async for message in self._to_send:
            frame = memoryview(wire.encode(message))
            try:
                while frame:
                    frame = frame[await self._sock.send(frame) :]
            except OSError:
                return  # the process is gone: the receiver sees it too, and ends everything

    async def _receive_all(self) -> None:
        buffer = bytearray()
        while True:
            try:
                data = await self._sock.recv(_RECEIVE_BYTES)
            except OSError:
                return
            if not data:
                return
            buffer += data
            try:
                while body := _take_frame(buffer):
                    self._handle(wire.decode_from_worker(body))
            except msgspec.MsgspecError as error:
                log.error("worker %d talks nonsense and is replaced: %s", self.pid, error)
                return

    def _handle(self, message: wire.FromWorker) -> None:
        pending = self._pending.get(message.number)
        if pending is None:
            return  # of a call that nobody waits for any more
        match message:
            case wire.Moved(_, count):
                if pending.on_moved is not None:
                    pending.on_moved(count)
            case wire.Began(_, key, upload_id):
                if pending.on_began is not None:
                    pending.on_began(key, upload_id)
            case wire.Done(_, result):
                pending.set(result)
            case wire.Failed():
                pending.set(wire.error_of(message))
            case wire.Stopped():
                pending.set(None)


def _take_frame(buffer: bytearray) -> bytes | None:
    """Remove the first whole frame from `buffer` and return its body."""
    head = wire.LENGTH_BYTES
    end = head + int.from_bytes(buffer[:head], "big")
    if end > wire.MAX_FRAME_BYTES:
        raise msgspec.DecodeError(f"a frame of {end} bytes")
    if len(buffer) < max(end, head):
        return None
    body = bytes(buffer[head:end])
    del buffer[:end]
    return body


def _start() -> tuple[trio.socket.SocketType, subprocess.Popen[bytes]]:
    """Start a worker that has the other end of the returned socket and no other descriptor."""
    ours, theirs = socket.socketpair()
    try:
        process = subprocess.Popen(
            # -P: a worker must not import from whatever directory the daemon was started in
            [sys.executable, "-P", "-m", "lmstorfs.store.worker", *_arguments(theirs)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": _python_path()},
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return trio.socket.from_stdlib_socket(ours), process


def _arguments(theirs: socket.socket) -> list[str]:
    return [str(theirs.fileno()), str(os.getpid())]


def _python_path() -> str:
    """Return a `PYTHONPATH` that finds this very package, installed or not."""
    here = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
