"""`torch.distributed.checkpoint` through the staging pool.

    writer = StorageWriter("/ckpt/step-100")
    future = dcp.async_save(state, storage_writer=writer)

`async_save` then copies into memory that was taken once, and not into new memory at each save.
Keep one `Staging` for all steps: `StorageWriter(path, staging=staging)`.
"""

import os
import threading
import weakref
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lmstorfs.errors import PoolFullError
from lmstorfs.torch.pool import host_buffer, host_memory

_ALIGNMENT = 64
_WAIT_S = 600.0


class Staging:
    """Host memory for one staged state at a time, at most `max_host_memory` bytes of it.

    Pinned where there is a GPU; taken at the first save and kept.
    """

    def __init__(self, max_host_memory: int) -> None:
        self._limit = max_host_memory
        self._memory: torch.Tensor | None = None
        self._used = 0
        self._free = threading.Semaphore(1)

    @property
    def held_bytes(self) -> int:
        """Memory that was taken so far."""
        return 0 if self._memory is None else self._memory.numel()

    def stage(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of `state` that later changes do not reach.

        Waits for the save before, whose copy lies in the same memory. Raises `PoolFullError` where
        the state is larger than the bound.
        """
        if not self._free.acquire(timeout=_WAIT_S):
            raise PoolFullError(f"the save before this one did not end within {_WAIT_S:.0f} s")
        try:
            found: list[torch.Tensor] = []
            _walk(state, found.append)
            wanted = sum(_rounded(_local(tensor).nbytes) for tensor in found)
            self._hold(wanted)
            self._used = 0
            staged = _walk(state, self._copy)
        except BaseException:
            self.release()
            raise
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return staged  # type: ignore[no-any-return]

    def release(self) -> None:
        """The staged state was written: the next one may have its memory."""
        self._free.release()

    def _hold(self, wanted: int) -> None:
        if wanted > self._limit:
            raise PoolFullError(
                f"the state has {wanted >> 20} MiB, max_host_memory is {self._limit >> 20} MiB"
            )
        if self._memory is None or self._memory.numel() < wanted:
            self._memory = None  # not both at once
            self._memory = host_buffer(wanted)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self._memory is not None
        local = _local(tensor).detach()
        room = self._memory[self._used : self._used + local.nbytes]
        self._used += _rounded(local.nbytes)
        made = room.view(local.dtype).view(local.shape) if local.nbytes else local.clone()
        made.copy_(local, non_blocking=True)
        return _like(tensor, made)


class StorageWriter(FileSystemWriter):
    """Writes as `FileSystemWriter` does, and is the stager of `async_save`.

    Files are not fsynced one by one: a mount brings them to its mirror and its store on its own,
    and `lmstorfs wait` tells when they are there. Pass `sync_files=True` for other filesystems.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        staging: Staging | None = None,
        max_host_memory: int | None = None,
        sync_files: bool = False,
        **options: Any,
    ) -> None:
        """Take `FileSystemWriter`'s options; `max_host_memory` bounds a staging of its own."""
        super().__init__(path, sync_files=sync_files, **options)
        if staging is None:
            staging = Staging(max_host_memory or host_memory() // 2)
        self._staging = staging
        self._let_go: weakref.finalize[..., StorageWriter] | None = None

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the state into the staging's memory."""
        self.per_thread_copy_ahead = 0  # all is on the host already
        staged = self._staging.stage(state_dict)
        # A save that fails in its planning never comes to `write_data`.
        self._let_go = weakref.finalize(self, self._staging.release)
        return staged

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write, and let go of the staged copy."""
        try:
            future = super().write_data(plan, planner)
            future.wait()
            return future
        finally:
            if self._let_go is not None:
                self._let_go()  # does something once only


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _walk(value: Any, change: Any) -> Any:
    """Return `value` with each tensor in it changed; containers are new ones."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _walk(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [_walk(inner, change) for inner in value]
    if type(value) is tuple:
        return tuple(_walk(inner, change) for inner in value)
    return value


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a DTensor; any other tensor is its own."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    if getattr(tensor, "to_local", None) is None:
        return local
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False,
        shape=tensor.shape, stride=tensor.stride(),
    )  # fmt: skip
