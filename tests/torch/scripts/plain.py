"""A plain loop, as people write it: FOLDER STEPS [RESUME]. Prints each step's loss, exactly."""

import os
import sys
from pathlib import Path

import torch
from torch import nn

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(40, 300), nn.BatchNorm1d(300), nn.Dropout(0.1), nn.Linear(300, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
step = 0
if len(sys.argv) > 3:
    state = torch.load(sys.argv[3], weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["rng"])
    step = state["step"]
while step < steps:
    step += 1
    optimizer.zero_grad()
    loss = model(torch.randn(16, 40)).square().mean()
    loss.backward()
    optimizer.step()
    scheduler.step()
    print(step, loss.item().hex())
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
        "step": step,
    }
    torch.save(state, folder / "new.tmp")
    os.replace(folder / "new.tmp", folder / f"step-{step}.pt")  # noqa: PTH105 - as it is done
