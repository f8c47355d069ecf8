"""A `CheckpointIO` for Lightning: `Trainer(plugins=[MountCheckpointIO()])`."""

import shutil
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import CheckpointIO

from lmstorfs.torch.checkpointer import Checkpointer


class MountCheckpointIO(CheckpointIO):
    """Saves by a `Checkpointer`: training goes on once tensors are copied.

    What is loaded or removed waits for the saves before it, so that no checkpoint is deleted before
    a newer one is whole.
    """

    def __init__(self, **options: Any) -> None:
        """Take `Checkpointer`'s options."""
        self._checkpointer = Checkpointer(**options)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Begin to save; an earlier save's `SaveError` is raised here."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._checkpointer.save(checkpoint, path)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint."""
        self._checkpointer.wait()
        loaded: dict[str, Any] = torch.load(
            path, map_location=map_location, weights_only=weights_only
        )
        return loaded

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a file, or the directory of a sharded checkpoint."""
        self._checkpointer.wait()
        place = Path(path)
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)

    def teardown(self) -> None:
        """Return when everything is saved."""
        self._checkpointer.close()
