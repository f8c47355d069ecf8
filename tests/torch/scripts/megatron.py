"""A loop that saves in Megatron-LM's layout: FOLDER STEPS [RESUME-FOLDER] [--stock].

    iter_0000002/mp_rank_00/model_optim_rng.pt
    latest_checkpointed_iteration.txt           written last: names what is whole

What is unlike Megatron's own `save_checkpoint` is marked; `--stock` does as that does. Prints each
step's loss, exactly.
"""

import argparse
from pathlib import Path

import torch
from torch import nn

from lmstorfs.torch import Checkpointer, SaveHandle

EVERY = 2
TRACKER = "latest_checkpointed_iteration.txt"

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("steps", type=int)
parser.add_argument("resume", type=Path, nargs="?")
parser.add_argument("--stock", action="store_true")
arguments = parser.parse_args()


def checkpoint_name(folder: Path, iteration: int) -> Path:
    return folder / f"iter_{iteration:07d}" / "mp_rank_00" / "model_optim_rng.pt"


def write_tracker(iteration: int) -> None:
    (arguments.folder / TRACKER).write_text(str(iteration))


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(40, 300), nn.GELU(), nn.Dropout(0.1), nn.Linear(300, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
iteration = 0
if arguments.resume is not None:
    iteration = int((arguments.resume / TRACKER).read_text())
    state = torch.load(checkpoint_name(arguments.resume, iteration), weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng_state"])

checkpointer = Checkpointer()  # ours
pending: tuple[int, SaveHandle] | None = None  # ours


def finish_pending() -> None:  # ours: the tracker names an iteration once its file is whole
    global pending
    if pending is not None:
        number, handle = pending
        handle.written()
        write_tracker(number)
        pending = None


while iteration < arguments.steps:
    iteration += 1
    optimizer.zero_grad()
    loss = model(torch.randn(16, 40)).square().mean()
    loss.backward()
    optimizer.step()
    print(iteration, loss.item().hex())
    if iteration % EVERY:
        continue
    state = {
        "iteration": iteration,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng_state": torch.get_rng_state(),
    }
    path = checkpoint_name(arguments.folder, iteration)
    path.parent.mkdir(parents=True)
    if arguments.stock:
        torch.save(state, path)
        write_tracker(iteration)
    else:
        finish_pending()
        pending = iteration, checkpointer.save(state, path)  # in place of torch.save
finish_pending()
checkpointer.close()
