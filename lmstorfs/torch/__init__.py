"""The torch helper: checkpoints that do not stop the training; needs `pip install lmstorfs[torch]`.

Works on any path; `handle.mirrored()` and `handle.stored()` need an lmstorfs mount there.
"""

from lmstorfs.torch.checkpointer import Checkpointer
from lmstorfs.torch.handle import SaveHandle
from lmstorfs.torch.loading import load

__all__ = ["Checkpointer", "SaveHandle", "load"]
