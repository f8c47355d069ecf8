"""Replaces the calls that save: of torch and of safetensors, for paths on an lmstorfs mount."""

import functools
import os
import pickle
from pathlib import Path
from types import ModuleType
from typing import Any

from lmstorfs.errors import SaveError
from lmstorfs.torch.unedited.pending import Pending

_TYPE = "fuse.lmstorfs"
_MOUNTS = "/proc/self/mountinfo"


def on_mount(path: Any) -> str | None:
    """Return `path` as text where a file there would be on an lmstorfs mount, None elsewhere."""
    if not isinstance(path, str | os.PathLike):
        return None
    name = os.fspath(path)
    if not isinstance(name, str):
        return None
    try:
        device = Path(name).resolve().parent.stat().st_dev
    except OSError:
        return None  # the stock call tells what is wrong
    found = f"{os.major(device)}:{os.minor(device)}"
    with Path(_MOUNTS).open(encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            fields, _, kind = line.partition(" - ")
            if kind.split(" ", 1)[0] == _TYPE and fields.split(" ")[2] == found:
                return name
    return None


def torch_itself(module: ModuleType, pending: Pending) -> None:
    """Replace `torch.save`, and let `torch.distributed`'s barriers wait."""
    stock = module.save

    @functools.wraps(stock)
    def save(obj: Any, f: Any, *arguments: Any, **named: Any) -> Any:
        plain = not arguments and named.get("pickle_module", pickle) is pickle
        plain &= not {*named} - {"pickle_module"}
        path = on_mount(f) if plain else None
        if path is None or not _saved(pending, obj, path, format="torch"):
            return stock(obj, f, *arguments, **named)
        return None

    module.save = save  # type: ignore[attr-defined]
    module.serialization.save = save
    if module.distributed.is_available():
        # Behind a barrier, other ranks look at the files.
        for place in (module.distributed, module.distributed.distributed_c10d):
            for name in ("barrier", "monitored_barrier"):
                _waits_first(place, name, pending)


def safetensors_save_file(module: ModuleType, pending: Pending) -> None:
    """Replace `safetensors.torch.save_file`, and let its readers wait."""
    stock = module.save_file

    @functools.wraps(stock)
    def save_file(tensors: Any, filename: Any, metadata: Any = None) -> Any:
        path = on_mount(filename)
        options = {"format": "safetensors", "metadata": metadata}
        if path is None or not _saved(pending, tensors, path, **options):
            return stock(tensors, filename, metadata=metadata)
        return None

    module.save_file = save_file  # type: ignore[attr-defined]
    for name in ("load_file", "safe_open", "load_model"):  # Rust opens files unheard
        _waits_first(module, name, pending)


def safetensors_open(module: ModuleType, pending: Pending) -> None:
    """Let `safetensors.safe_open` wait."""
    _waits_first(module, "safe_open", pending)


def _waits_first(module: ModuleType, name: str, pending: Pending) -> None:
    stock = getattr(module, name, None)
    if stock is None:
        return

    @functools.wraps(stock)
    def call(*arguments: Any, **named: Any) -> Any:
        pending.wait()
        return stock(*arguments, **named)

    setattr(module, name, call)


def _saved(pending: Pending, state: Any, path: str, **options: Any) -> bool:
    """Whether the save is under way; False where the stock call is to do it, or to refuse it."""
    pending.wait(path)
    pending.checkpointer.check()
    try:
        pending.save(state, path, **options)
    except (SaveError, ValueError):
        return False
    return True
