"""A training of a transformer on the CPU, and the ways to save it that the benches compare."""

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from bench.contenders import Target
from bench.turns import Turn
from lmstorfs.torch import Checkpointer

VOCABULARY, WIDTH, LAYERS, HEADS = 20_000, 768, 12, 12  # some 100 M parameters
QUICK_VOCABULARY, QUICK_WIDTH, QUICK_LAYERS = 100, 64, 2
SEQUENCE = 32


class Transformer(nn.Module):
    """Predicts the next token."""

    def __init__(self, quick: bool) -> None:
        super().__init__()
        vocabulary = QUICK_VOCABULARY if quick else VOCABULARY
        width, layers = (QUICK_WIDTH, QUICK_LAYERS) if quick else (WIDTH, LAYERS)
        heads = width // 64
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True)
        self.vocabulary = vocabulary
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.embedding(tokens))
        return hidden @ self.embedding.weight.t()


class Training:
    """One training; each turn goes on with it."""

    def __init__(self, quick: bool) -> None:
        torch.manual_seed(1)
        self.model = Transformer(quick)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.tokens = torch.randint(0, self.model.vocabulary, (1, SEQUENCE + 1))
        self.step()  # makes the optimizer's state

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        logits = self.model(self.tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def nbytes(self) -> int:
        count = sum(parameter.numel() for parameter in self.model.parameters())
        return count * 4 * 3  # and AdamW's two moments


class Saving:
    """One way to save: a checkpoint takes what `save` takes, and what the steps then wait."""

    def save(self, training: Training, path: Path) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """Return when all files are whole."""

    def close(self) -> None:
        """Give everything back."""

    @property
    def waited_s(self) -> float:
        """Seconds that steps have waited for this way so far."""
        return 0.0


class TorchSave(Saving):
    """`torch.save`, as everybody has it."""

    def save(self, training: Training, path: Path) -> None:
        torch.save(training.state(), path.with_suffix(".pt"))


class AsyncSave(Saving):
    """`dcp.async_save`, which copies to the host and writes in a thread."""

    def __init__(self) -> None:
        self._future: Future[Any] | None = None

    def save(self, training: Training, path: Path) -> None:
        self.finish()  # one at a time, as its documentation asks for
        self._future = dcp.async_save(training.state(), checkpoint_id=path)

    def finish(self) -> None:
        if self._future is not None:
            self._future.result()
            self._future = None


class Helper(Saving):
    """`lmstorfs.torch.Checkpointer`."""

    def __init__(self, training: Training, *, guarded: bool) -> None:
        self._checkpointer = Checkpointer(max_host_memory=training.nbytes() * 5 // 4)
        self._waited_s = 0.0
        self._ends: list[Callable[[], None]] = []
        if guarded:
            # Hooks run in their order: the time between these two is what the guard's took.
            optimizer = training.optimizer
            before = optimizer.register_step_pre_hook(self._begins)
            self._ends.append(self._checkpointer.guard(optimizer))
            after = optimizer.register_step_pre_hook(self._ended)
            self._ends += [before.remove, after.remove]
        else:
            self._checkpointer.prepare(training.nbytes() * 5 // 4)

    def _begins(self, *_: object) -> None:
        self._began = time.monotonic()

    def _ended(self, *_: object) -> None:
        self._waited_s += time.monotonic() - self._began

    def save(self, training: Training, path: Path) -> None:
        self._checkpointer.save(training.state(), path.with_suffix(".pt"))

    def finish(self) -> None:
        self._checkpointer.wait()

    def close(self) -> None:
        for end in self._ends:
            end()
        self._checkpointer.close()

    @property
    def waited_s(self) -> float:
        return self._waited_s


def train(
    training: Training, saving: Saving, folder: Path, *, steps: int, every: int
) -> tuple[float, float]:
    """Train, and save each `every` steps; return the whole time and the time it stood still."""
    began, stood_s = time.monotonic(), -saving.waited_s
    for number in range(1, steps + 1):
        training.step()
        if number % every == 0:
            asked = time.monotonic()
            saving.save(training, folder / f"step-{number}")
            stood_s += time.monotonic() - asked
    saving.finish()
    return time.monotonic() - began, stood_s + saving.waited_s


def training_turn(
    training: Training,
    saving: Saving,
    target: Target,
    folder: Path,
    told: Callable[[float, float, dict[str, float]], float],
    *,
    steps: int,
    every: int,
) -> Turn:
    """Return a turn that trains and saves to `folder`, which is made now.

    `told` takes the whole time, the time that it stood still and the turn's parts, and returns the
    turn's own time.
    """
    folder.mkdir()

    def timed() -> float:
        whole_s, stood_s = train(training, saving, folder, steps=steps, every=every)
        return told(whole_s, stood_s, turn.parts)

    def clean_up() -> None:
        saving.close()
        shutil.rmtree(folder)

    turn = Turn(timed, clean_up, target.settle)
    return turn
