"""A training program as people have it: a plain loop that writes its checkpoints into a directory.

It stands for the user's own code, so it knows nothing of lmstorfs: a mount is a directory like any
other. The model reads Python's own sources byte by byte; its loss is there to be seen falling, and
its size (26 million parameters, 300 MiB with AdamW's state) to make a checkpoint weigh something.
"""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

KEEP_CHECKPOINTS = 3
CONTEXT = 64
BATCH = 4
WIDTH = 512
LAYERS = 8
BYTES = 256


@dataclass(frozen=True)
class Save:
    """One call that wrote a checkpoint: what the training waited for."""

    step: int
    way: str
    seconds: float
    size: int


class Model(nn.Module):
    """A causal transformer over bytes."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, 8, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.token = nn.Embedding(BYTES, WIDTH)
        self.position = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.blocks = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), False)
        self.head = nn.Linear(WIDTH, BYTES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        hidden = self.blocks(self.token(tokens) + self.position, mask=mask, is_causal=True)
        return self.head(hidden)


def read_corpus() -> torch.Tensor:
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, sources))), dtype=torch.uint8)


def checkpoint_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> dict[str, object]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}


def save_checkpoint(
    directory: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> list[Save]:
    """Write `step_N` in the three usual ways and drop the oldest; a half `step_N` is never seen."""
    state = checkpoint_state(model, optimizer, step)
    partial = directory / f"step_{step}.tmp"
    partial.mkdir(parents=True)
    ways: dict[str, Callable[[], object]] = {
        "torch.save": lambda: torch.save(state, partial / "checkpoint.pt"),
        "safetensors": lambda: save_file(model.state_dict(), partial / "model.safetensors"),
        "DCP": lambda: dcp.save(state, checkpoint_id=partial / "dcp", no_dist=True),
    }
    saves = []
    before = 0
    for way, save in ways.items():
        started = time.perf_counter()
        save()
        seconds = time.perf_counter() - started
        size = sum(file.stat().st_size for file in partial.rglob("*") if file.is_file())
        saves.append(Save(step, way, seconds, size - before))
        before = size
    partial.rename(directory / f"step_{step}")
    for old in find_checkpoints(directory)[:-KEEP_CHECKPOINTS]:
        shutil.rmtree(old)
    return saves


def find_checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints in `directory`, the oldest first."""
    found = [path for path in directory.glob("step_*") if path.suffix != ".tmp"]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def train(
    directory: Path, seconds: float, every: float
) -> tuple[nn.Module, torch.optim.Optimizer, list[Save]]:
    """Train for `seconds` with a checkpoint `every` so many, the last one at the end."""
    torch.manual_seed(7)
    corpus = read_corpus()
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    saves: list[Save] = []
    step = 0
    end = time.monotonic() + seconds
    next_save = time.monotonic() + every
    while True:
        step += 1
        starts = torch.randint(len(corpus) - CONTEXT - 1, (BATCH,))
        batch = torch.stack([corpus[start : start + CONTEXT + 1] for start in starts]).long()
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

        now = time.monotonic()
        if now < next_save and now < end:
            continue
        done = save_checkpoint(directory, step, model, optimizer)
        saves += done
        waits = ", ".join(f"{save.way} {save.seconds * 1000:.0f} ms" for save in done)
        print(f"step {step:4}  loss {loss.item():.2f}  blocked by {waits}", flush=True)
        if now >= end:
            return model, optimizer, saves
        next_save = time.monotonic() + every
        if end - next_save < every / 2:
            next_save = end
