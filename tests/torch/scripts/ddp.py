"""Data parallel on two CPU ranks: FOLDER STEPS [RESUME]. Rank 0 saves and prints the losses."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(40, 300), nn.ReLU(), nn.Linear(300, 3)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
step = 0
if len(sys.argv) > 3:
    state = torch.load(sys.argv[3], weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
while step < steps:
    step += 1
    torch.manual_seed(100 * step + rank)
    optimizer.zero_grad()
    loss = model(torch.randn(16, 40)).square().mean()
    loss.backward()
    optimizer.step()
    dist.all_reduce(loss)
    if rank == 0:
        print(step, loss.item().hex())
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, folder / f"step-{step}.pt")
    dist.barrier()
    assert torch.load(folder / f"step-{step}.pt", weights_only=True)["step"] == step
dist.destroy_process_group()
