"""Saves checkpoints beside the training: `Checkpointer`.

Method: the first stage of the paper's fully asynchronous hierarchical checkpointing, a
non-blocking copy from the GPU to pinned host memory, written to the mount by a thread; `guard` is
the lazy scheme of DataStates-LLM (Maurya et al., HPDC 2024): parameters do not change in the
forward and the backward pass, so the copy may take until the optimizer's step.
"""

import atexit
import os
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import util
from pathlib import Path
from typing import Any, Self

import torch

from lmstorfs.errors import SaveError
from lmstorfs.torch.archive import Archive
from lmstorfs.torch.handle import SaveHandle, failure
from lmstorfs.torch.pieces import Late, Layout, Piece
from lmstorfs.torch.pool import CHUNK_BYTES, Pool, host_memory
from lmstorfs.torch.safetensors_file import SafetensorsFile
from lmstorfs.torch.staging import SMALL_BYTES, Stager, Streams, events_now, order_after
from lmstorfs.torch.writing import FileWriter

FORMATS = ("torch", "safetensors")
POOL_TIMEOUT_S = 600.0
_MEMORY_SHARE = 4


class Checkpointer:
    """Saves states of a training without stopping it.

    One thread writes the files, in the order of the `save`s; a second `save` to a path whose first
    one is still on its way comes after that. Not for use by several threads at once.

        with Checkpointer() as checkpointer:
            for step, batch in enumerate(loader):
                ...
                optimizer.step()
                if step % 100 == 0:
                    checkpointer.save(model.state_dict(), f"/ckpt/step-{step}.pt")

    A forked process has a checkpointer of its own, with nothing on its way.
    """

    def __init__(
        self,
        *,
        max_host_memory: int | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        pool_timeout_s: float = POOL_TIMEOUT_S,
        checksums: bool = False,
    ) -> None:
        """Bound the staging memory to `max_host_memory` bytes (a quarter of the host's by default).

        It is taken as it is needed and then kept. With less than a checkpoint's size, `save` (or,
        with `guard`, the step) waits until the rest of it is written, at the mount's speed.
        With `checksums` the files are `torch.save`'s own to the last bit; else tensors' records
        lack the CRC-32, which `torch.load` never reads and which costs more than all the rest.
        """
        self._checksums = checksums
        self._limit = max_host_memory or host_memory() // _MEMORY_SHARE
        self._chunk_bytes = chunk_bytes
        self._timeout_s = pool_timeout_s
        self._optimizers: list[Any] = []
        self._begin()
        atexit.register(self.close)

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._pool = Pool(self._limit, self._chunk_bytes)
        self._stager = Stager(self._pool, Streams(), timeout_s=self._timeout_s)
        self._saves: list[SaveHandle] = []
        self._number = 0
        self._writes: queue.SimpleQueue[FileWriter | None] = queue.SimpleQueue()
        self._lazy: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._finalizer: util.Finalize | None = None

    # --- saving ------------------------------------------------------------------------------

    def save(
        self,
        state: Any,
        path: str | os.PathLike[str],
        *,
        format: str | None = None,
        metadata: Mapping[str, str] | None = None,
        in_place: bool = False,
    ) -> SaveHandle:
        """Save `state`, as it is now, to `path`; return at once what tells how far it is.

        The file is what `torch.load(path, weights_only=True)` reads, or safetensors with
        `format="safetensors"` (the default where `path` ends so; `metadata` goes into it). It gets
        its name when it is whole. What is no tensor is pickled before this returns.

        Without `guard`, tensors may change as soon as this returns: memory of the host is copied
        (this waits for it, at the speed of memory); copies from a GPU are ordered before any later
        kernel of its current stream, which begins that much later, while the host goes on. With
        `guard`, this waits for nothing and the optimizer's step does. With `in_place` the caller
        promises not to change tensors on the host until `handle.staged()`: they are written from
        where they are.

        Raises `SaveError` (an earlier save's, or that `path` cannot be written to) and what pickle
        raises.
        """
        self.check()
        name = os.fspath(path)
        layout = self._layout(state, name, format, metadata)
        pieces = list(layout.pieces())
        handle = SaveHandle(name, self._forget)
        self._number += 1
        try:
            writer = FileWriter(name, handle, self._pool, self._number)
        except OSError as error:
            raise failure(name, error) from error
        self._start_threads()
        self._saves.append(handle)
        self._writes.put(writer)
        guarded = self._guarded()
        if guarded:
            self._stage_later(writer, pieces, guarded)
        else:
            self._stage_now(writer, pieces, in_place=in_place)
        return handle

    def guard(self, *optimizers: torch.optim.Optimizer) -> Callable[[], None]:
        """Let later `save`s stage while the training goes on, and `step()` wait for that.

        For states that only these optimizers change: their parameters and their own state. All
        else in a `save` (buffers as batch norm's, which the forward pass changes) is copied at the
        call. Costs nothing where forward and backward take longer than the copy; what is left of
        the copy then is waited for in `step()`. Tensors on the host are not copied at all: the
        thread writes them from where they are. Who changes parameters without these optimizers
        (loading a state, averaging weights) must wait for `handle.staged()` first.

        Returns a function that ends it.
        """
        hooks = [each.register_step_pre_hook(self._before_step) for each in optimizers]
        self._optimizers.extend(optimizers)

        def end() -> None:
            self._before_step()
            for hook, optimizer in zip(hooks, optimizers, strict=True):
                hook.remove()
                self._optimizers.remove(optimizer)

        return end

    def prepare(self, nbytes: int) -> None:
        """Take the staging memory for checkpoints of `nbytes` now, and not at the first save."""
        self._follow_fork()
        self._pool.prepare(nbytes)

    # --- waiting -----------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the `SaveError` of a save that failed meanwhile, if there is one."""
        self._follow_fork()
        self._raise_failures()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all files are whole under their names; raises the first failure's `SaveError`.

        `TimeoutError` after `timeout_s` seconds for one file.
        """
        self._follow_fork()
        for handle in list(self._saves):
            handle.written(timeout_s)
        self._raise_failures()

    def close(self) -> None:
        """Wait for all, and give the memory back; raises as `wait` does. A later save begins anew.

        Called at the interpreter's end, too.
        """
        atexit.unregister(self.close)
        self._follow_fork()
        try:
            self.wait()
        finally:
            threads, self._threads = self._threads, []
            if self._finalizer is not None:
                self._finalizer.cancel()
            if threads:
                self._lazy.put(None)
                self._writes.put(None)
            for thread in threads:
                thread.join()
            self._begin()

    @property
    def held_bytes(self) -> int:
        """Host memory that the pool has taken."""
        return self._pool.held_bytes

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close."""
        self.close()

    def _layout(
        self, state: Any, path: str, format: str | None, metadata: Mapping[str, str] | None
    ) -> Layout:
        chosen = format or ("safetensors" if path.endswith(".safetensors") else "torch")
        if chosen == "safetensors":
            return SafetensorsFile(state, metadata)
        if chosen == "torch":
            if metadata is not None:
                raise ValueError("metadata is a part of safetensors files; put it into the state")
            return Archive(state, Path(path).stem, checksums=self._checksums)
        raise ValueError(f"format={format!r}: it is one of {', '.join(FORMATS)}")

    # --- staging -----------------------------------------------------------------------------

    def _stage_now(
        self, writer: FileWriter, pieces: list[bytes | Piece | Late], in_place: bool
    ) -> None:
        try:
            self._wait_enqueued()
            events = self._stager.stage(pieces, writer.put, in_place=in_place, starved=writer.start)
        except BaseException as error:
            writer.end(error)
            self._forget(writer.handle)
            writer.handle.enqueued()
            if isinstance(error, SaveError | TimeoutError | RuntimeError):
                raise failure(writer.handle.path, error) from error
            raise
        order_after(events)
        writer.handle.events = events
        writer.handle.enqueued()
        writer.end()

    def _stage_later(
        self, writer: FileWriter, pieces: list[bytes | Piece | Late], guarded: set[int]
    ) -> None:
        mine = [_own(piece, guarded) for piece in pieces]
        devices = {
            piece.storage.device
            for piece in mine
            if isinstance(piece, Piece) and piece.storage.device.type == "cuda"
        }
        after = events_now(devices)

        def stage() -> None:
            try:
                writer.handle.events = self._stager.stage(
                    mine, writer.put, in_place=True, after=after, starved=writer.start
                )
            except (SaveError, RuntimeError) as error:
                writer.end(error)
            else:
                writer.end()
            writer.handle.enqueued()

        self._lazy.put(stage)

    def _guarded(self) -> set[int]:
        """Return the storages that only guarded optimizers change."""
        found: set[int] = set()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    found.update(_storages([parameter, *optimizer.state[parameter].values()]))
        return found

    def _before_step(self, *_: object) -> None:
        self._follow_fork()
        for handle in self._saves:
            if not handle.done:
                handle.wait_enqueued(self._timeout_s)
                order_after(handle.events)

    def _wait_enqueued(self) -> None:
        for handle in self._saves[:-1]:
            handle.wait_enqueued(self._timeout_s)

    # --- housekeeping ------------------------------------------------------------------------

    def _start_threads(self) -> None:
        if not self._threads:
            # What multiprocessing starts ends without `atexit`.
            self._finalizer = util.Finalize(None, self.close, exitpriority=1)
            for work in (_write_all, _stage_all):
                taken: Any = self._writes if work is _write_all else self._lazy
                thread = threading.Thread(
                    target=work, args=(taken,), name=f"lmstorfs{work.__name__}", daemon=True
                )
                thread.start()
                self._threads.append(thread)

    def _follow_fork(self) -> None:
        """In a forked process, begin anew: the threads and what they were at are the parent's."""
        if os.getpid() != self._pid:
            self._begin()

    def _forget(self, handle: SaveHandle) -> None:
        if handle in self._saves:
            self._saves.remove(handle)

    def _raise_failures(self) -> None:
        self._saves = [each for each in self._saves if not each.done or each.error is not None]
        for handle in self._saves:
            if handle.error is not None:
                self._forget(handle)
                raise handle.error


def _write_all(writes: "queue.SimpleQueue[FileWriter | None]") -> None:
    while (writer := writes.get()) is not None:
        writer.run()


def _stage_all(lazy: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (stage := lazy.get()) is not None:
        stage()


def _own(piece: bytes | Piece | Late, guarded: set[int]) -> bytes | Piece | Late:
    """Return the piece, or a copy of it where the training may change it before the next step."""
    if not isinstance(piece, Piece):
        return piece
    is_guarded = piece.storage._cdata in guarded
    if is_guarded and not (piece.is_local and piece.nbytes < SMALL_BYTES):
        return piece
    # What is small is gathered as text when its turn comes, and that may be after the step.
    return Piece(piece.tensor().clone().untyped_storage(), 0, piece.nbytes, piece.seen)


def _storages(values: Iterable[Any]) -> Iterable[int]:
    for value in values:
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            yield value.untyped_storage()._cdata
