"""Checkpoints: their versions, and how they come to the store."""

from lmstorfs.checkpoint.checkpoints import Checkpoint, checkpoint_of
from lmstorfs.checkpoint.digester import Digester
from lmstorfs.checkpoint.flusher import Flusher
from lmstorfs.checkpoint.namesync import NameSync
from lmstorfs.checkpoint.versions import Versions

__all__ = ["Checkpoint", "Digester", "Flusher", "NameSync", "Versions", "checkpoint_of"]
