"""DLRover's Flash Checkpoint as a way to save, where it is installed.

    pip install dlrover deprecated grpcio pynvml

It copies the state into shared memory while the training stands still; a process of its own then
writes the file.
"""

import importlib.util
import logging
import time
from contextlib import suppress
from pathlib import Path

from bench.training_loop import Saving, Training

_LOOK_S = 0.01
_GIVE_UP_S = 120.0


def installed() -> bool:
    """Whether DLRover and what its trainer imports are there."""
    return all(importlib.util.find_spec(name) for name in ("dlrover", "grpc"))


class FlashSave(Saving):
    """`DdpCheckpointer.save_checkpoint` to a file. One process serves all turns.

    DLRover starts it by a fork, so it is made before torch has threads.
    """

    def __init__(self, records: Path) -> None:
        """Take `records`, a directory for its notes of which step was written last."""
        from dlrover.python.common.constants import CheckpointConstant
        from dlrover.python.common.log import default_logger
        from dlrover.python.common.multi_process import clear_sock_dir
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        default_logger.setLevel(logging.WARNING)
        clear_sock_dir()  # else it speaks to the process of a run before, which is gone
        self._tracker = records / CheckpointConstant.TRACER_FILE_NAME
        self._checkpointer = DdpCheckpointer(str(records))
        self._step = 0

    def save(self, training: Training, path: Path) -> None:
        self.finish()  # a save while the one before is being written is left off in silence
        self._step += 1
        self._checkpointer.save_checkpoint(
            self._step, training.state(), str(path.with_suffix(".pt"))
        )

    def finish(self) -> None:
        # Its own wait looks every three seconds.
        give_up = time.monotonic() + _GIVE_UP_S
        while self._written() < self._step:
            if time.monotonic() > give_up:
                raise TimeoutError(f"step {self._step} was not written in {_GIVE_UP_S:.0f} s")
            time.sleep(_LOOK_S)

    def _written(self) -> int:
        with suppress(FileNotFoundError, ValueError):  # not there yet, or just being written
            return int(self._tracker.read_text())
        return 0

    def take_memory(self, training: Training) -> None:
        """Have its memory taken and touched: a first save, whose file goes."""
        first = self._tracker.with_name("first.pt")
        self.save(training, first)
        self.finish()
        first.unlink()

    def end(self) -> None:
        """End the process and free its memory."""
        engine = self._checkpointer._engine
        if engine._shm_handler.shared_memory is not None:
            engine._shm_handler.shared_memory.unlink()
        engine.close()
        engine.saver_proc.kill()
        engine.saver_proc.join()
