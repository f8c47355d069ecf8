"""A callback for Hugging Face's `Trainer`: `Trainer(..., callbacks=[BackgroundSaves()])`."""

from typing import Any

from transformers import TrainerCallback

from lmstorfs.torch.unedited.install import activate
from lmstorfs.torch.unedited.pending import Pending


class BackgroundSaves(TrainerCallback):
    """What the Trainer saves to an lmstorfs mount is written while the training goes on.

    The files are the Trainer's own. From the first training on this holds for the whole process, as
    under `lmstorfs run`, whose rules for waiting are the same.
    """

    def __init__(self) -> None:
        """Change nothing yet."""
        self._pending: Pending | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Have saves go on in the background from here on."""
        self._pending = activate()

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Return when everything is saved; raises `SaveError`."""
        if self._pending is not None:
            self._pending.wait()
