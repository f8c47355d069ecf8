"""A checkpoint engine for DeepSpeed: `engine.checkpoint_engine = MountCheckpointEngine({})`."""

import os
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from lmstorfs.torch.checkpointer import Checkpointer


class MountCheckpointEngine(CheckpointEngine):
    """Saves by a `Checkpointer`; DeepSpeed's `commit`, after which `latest` is written, waits."""

    def __init__(self, config_params: Any, **options: Any) -> None:
        """Take `Checkpointer`'s options."""
        super().__init__(config_params)
        self._checkpointer = Checkpointer(**options)

    def create(self, info: Any) -> None:
        """Begin a checkpoint: nothing is to be done."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a directory."""
        os.makedirs(path, exist_ok=exist_ok)  # noqa: PTH103 - it may be relative to a mode of umask

    def save(self, state_dict: Any, path: str) -> None:
        """Begin to save."""
        self._checkpointer.save(state_dict, path)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return the state."""
        self._checkpointer.wait()
        return torch.load(path, map_location=map_location, weights_only=False)

    def commit(self, tag: str) -> bool:
        """Return when all of the checkpoint is whole."""
        self._checkpointer.wait()
        return True
