"""The torch helper: checkpoints that do not stop the training; needs `pip install lmstorfs[torch]`.

Works on any path; `handle.mirrored()` and `handle.stored()` need an lmstorfs mount there.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmstorfs.torch.checkpointer import Checkpointer
    from lmstorfs.torch.handle import SaveHandle
    from lmstorfs.torch.loading import load

__all__ = ["Checkpointer", "SaveHandle", "load"]

_PLACES = {"Checkpointer": "checkpointer", "SaveHandle": "handle", "load": "loading"}


def __getattr__(name: str) -> Any:
    """Import at the first use: what `lmstorfs run` loads comes before torch is imported."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
