"""Loads checkpoints from the fastest copy: `load`.

On a mount the file's pages are those of the RAM tier; mapped, they are copied once, by several
threads, straight to where the tensors are to be.
"""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from lmstorfs.errors import LoadError
from lmstorfs.torch.pieces import Piece
from lmstorfs.torch.pool import Pool

THREADS = 4
_SLICE_BYTES = 16 << 20
_POOL_BYTES = 256 << 20

Job = tuple[torch.Tensor, torch.Tensor]
"""From and to: uint8, one dimension, of one length."""


def load(
    path: str | os.PathLike[str],
    into: Any = None,
    *,
    device: str | torch.device = "cpu",
    threads: int = THREADS,
    weights_only: bool = True,
    max_host_memory: int = _POOL_BYTES,
) -> Any:
    """Return what `torch.load(path)` returns (for safetensors: what `load_file` does).

    `into`: a state of the same shape (a `state_dict()`), whose tensors are filled and which is
    returned. Otherwise tensors are made on `device`, those that shared memory share it again.
    Copies to a GPU go through pinned memory, at most `max_host_memory` bytes.

    Raises `LoadError` where `into` does not fit, `FileNotFoundError` and what `torch.load` raises.
    """
    name = os.fspath(path)
    jobs: list[Job] = []
    if into is not None:
        found = _mapped(name, weights_only)
        _match(found, into, "", jobs)
        result = into
    else:
        result = _mapped(name, weights_only, _taker(torch.device(device), jobs))
        if name.endswith(".safetensors"):
            result = {key: _taken(tensor, device, jobs) for key, tensor in result.items()}
    with torch.no_grad():
        _run(jobs, threads, max_host_memory)
    return result


def _mapped(name: str, weights_only: bool, taker: Callable[..., Any] | None = None) -> Any:
    if name.endswith(".safetensors"):
        return _map_safetensors(name)
    return torch.load(name, mmap=True, weights_only=weights_only, map_location=taker or "cpu")


def _map_safetensors(name: str) -> Mapping[str, torch.Tensor]:
    from safetensors import safe_open

    with safe_open(name, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no dict


def _taker(device: torch.device, jobs: list[Job]) -> Callable[[Any, str], Any]:
    """Return a map_location that gives each storage a new one, and notes the copy to be made."""

    def take(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        made = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device).untyped_storage()
        if storage.nbytes():
            whole = Piece(storage, 0, storage.nbytes())
            jobs.append((whole.tensor(), Piece(made, 0, whole.nbytes).tensor()))
        return made

    return take


def _taken(tensor: torch.Tensor, device: str | torch.device, jobs: list[Job]) -> torch.Tensor:
    made = torch.empty_like(tensor, device=device)
    if tensor.nbytes:
        jobs.append((_bytes(tensor), _bytes(made)))
    return made


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    offset = int(tensor.storage_offset()) * tensor.element_size()
    return Piece(tensor.untyped_storage(), offset, tensor.nbytes).tensor()


def _match(found: Any, into: Any, where: str, jobs: list[Job]) -> None:
    """Note the copies that make `into` what `found` is."""
    if isinstance(found, torch.Tensor):
        fits = isinstance(into, torch.Tensor) and into.shape == found.shape
        if not fits or into.dtype != found.dtype:
            told = "no tensor" if not isinstance(into, torch.Tensor) else _shown(into)
            raise LoadError(f"{where}: the file has {_shown(found)}, what is given is {told}")
        if found.is_contiguous() and into.is_contiguous():
            if found.nbytes:
                jobs.append((_bytes(found), _bytes(into.detach())))
        else:
            with torch.no_grad():
                into.copy_(found)
    elif isinstance(found, Mapping):
        if not isinstance(into, Mapping) or set(found) != set(into):
            given = set(into) if isinstance(into, Mapping) else set()
            names = ", ".join(sorted(map(str, set(found) ^ given))[:5])
            raise LoadError(f"{where or 'the state'}: not the same names: {names}")
        for key, value in found.items():
            _match(value, into[key], f"{where}.{key}".lstrip("."), jobs)
            _take_plain(value, into, key)
    elif isinstance(found, list | tuple):
        if not isinstance(into, list | tuple) or len(found) != len(into):
            raise LoadError(f"{where}: not as many as the {len(found)} of the file")
        for number, value in enumerate(found):
            _match(value, into[number], f"{where}.{number}", jobs)
            if isinstance(into, list):
                _take_plain(value, into, number)


def _take_plain(value: Any, into: Any, key: Any) -> None:
    if not isinstance(value, torch.Tensor | Mapping | list | tuple):
        into[key] = value


def _shown(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


def _run(jobs: list[Job], threads: int, memory: int) -> None:
    slices = [
        (source[start : start + _SLICE_BYTES], target[start : start + _SLICE_BYTES])
        for source, target in jobs
        for start in range(0, source.numel(), _SLICE_BYTES)
    ]
    if not slices:
        return
    pool = Pool(memory, _SLICE_BYTES)

    def copy(job: Job) -> None:
        source, target = job
        if target.device.type != "cuda":
            target.copy_(source)
            return
        chunk = pool.take(600.0)
        try:
            staged = chunk.memory[: source.numel()]
            staged.copy_(source)
            target.copy_(staged, non_blocking=True)
            torch.cuda.current_stream(target.device).synchronize()
        finally:
            pool.give_back(chunk)

    with ThreadPoolExecutor(max(1, threads)) as workers:
        for _ in workers.map(copy, slices):
            pass
