"""How long does a checkpoint stop a training on a GPU? Needs torch and this package, nothing else.

    python bench/gpu_stall.py [--quick] [--folder /ckpt] [--repeats 5] [--gib 2,8,16] [--json F]

States of parameters and AdamW's moments on the GPU, in tensors of 64 MiB; matrix products as the
training. For each state and contender: how long a checkpoint stops the loop, how long steps take
while it is on its way against those without, at what speed it leaves the GPU against the best
pinned copy of the same run, and the host memory that it takes. On a host without a GPU the same
runs on the CPU with small sizes, which only shows that it runs.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from lmstorfs.torch import Checkpointer
from lmstorfs.torch.dcp import Staging, StorageWriter

GIB, MIB = 1 << 30, 1 << 20
TENSOR_BYTES = 64 * MIB
QUICK_TENSOR_BYTES = MIB
SIDE, QUICK_SIDE = 8192, 256
STEP_PRODUCTS = 40  # some 70 ms on a large GPU
STOP_GOAL_S, BANDWIDTH_GOAL, SLOWED_GOAL = 0.020, 0.9, 1.05
BUDGET_S = 420.0

Row = dict[str, Any]


class Device:
    """The GPU, or the CPU in its place."""

    def __init__(self) -> None:
        self.is_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda" if self.is_gpu else "cpu")

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def describe(self) -> Row:
        name = torch.cuda.get_device_name() if self.is_gpu else "none: the CPU in its place"
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return {
            "gpu": name,
            "host": f"{platform.machine()}, {os.cpu_count()} CPUs, {memory >> 30} GiB",
            "kernel": platform.release(),
            "torch": torch.__version__,
        }


class Loop:
    """A training of nothing but matrix products, and the state that it would have."""

    def __init__(self, device: Device, nbytes: int, quick: bool) -> None:
        size = QUICK_TENSOR_BYTES if quick else TENSOR_BYTES
        self._device = device
        count = max(3, nbytes // size)
        self.parameters = [
            torch.nn.Parameter(torch.randn(size // 4, device=device.device))
            for _ in range(count // 3)
        ]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-6)
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)  # later steps change nothing, and take no time
        self.nbytes = 3 * sum(parameter.nbytes for parameter in self.parameters)
        side = QUICK_SIDE if quick else SIDE
        kind = torch.bfloat16 if device.is_gpu else torch.float32
        self._matrix = torch.randn(side, side, device=device.device).to(kind) / side
        self._products = 2 if quick else STEP_PRODUCTS

    def step(self) -> float:
        """Compute, let the optimizer step, and return the seconds until all of it was done."""
        began = time.perf_counter()
        product = self._matrix
        for _ in range(self._products):
            product = product @ self._matrix
        self.optimizer.step()
        self._device.synchronize()
        return time.perf_counter() - began

    def state(self) -> Row:
        moments = self.optimizer.state_dict()["state"]
        return {
            "model": {str(n): p.detach() for n, p in enumerate(self.parameters)},
            "optimizer": {str(n): dict(each) for n, each in moments.items()},
        }


class Way:
    """One way to save. `save` returns when the loop may go on."""

    def save(self, loop: Loop, path: Path) -> None:
        raise NotImplementedError

    def staged(self) -> None:
        """Return when nothing of the GPU's memory is needed any more."""

    def finish(self) -> None:
        """Return when the file is whole."""

    def close(self) -> None:
        """Give everything back."""

    @property
    def host_bytes(self) -> int | None:
        """Host memory that this way holds; None where it is torch's own business."""
        return None


class CopyAndSave(Way):
    def save(self, loop: Loop, path: Path) -> None:
        copied = {
            part: {
                name: {k: v.cpu() for k, v in value.items()}
                if isinstance(value, dict)
                else value.cpu()
                for name, value in content.items()
            }
            for part, content in loop.state().items()
        }
        torch.save(copied, path.with_suffix(".pt"))


class AsyncSave(Way):
    def __init__(self, staging: Staging | None) -> None:
        self._staging = staging
        self._future: Any = None

    def save(self, loop: Loop, path: Path) -> None:
        if self._staging is None:
            self._future = dcp.async_save(loop.state(), checkpoint_id=path)
        else:
            writer = StorageWriter(path, staging=self._staging)
            self._future = dcp.async_save(loop.state(), storage_writer=writer)

    def finish(self) -> None:
        self._future.result()

    @property
    def host_bytes(self) -> int | None:
        return None if self._staging is None else self._staging.held_bytes


class Helper(Way):
    def __init__(self, loop: Loop, *, guarded: bool) -> None:
        self._checkpointer = Checkpointer(max_host_memory=loop.nbytes + 64 * MIB)
        self._checkpointer.prepare(loop.nbytes + 64 * MIB)
        self._end: Callable[[], None] = lambda: None
        if guarded:
            self._end = self._checkpointer.guard(loop.optimizer)
        self._handle: Any = None

    def save(self, loop: Loop, path: Path) -> None:
        self._handle = self._checkpointer.save(loop.state(), path.with_suffix(".pt"))

    def staged(self) -> None:
        self._handle.staged()

    def finish(self) -> None:
        self._handle.written()

    def close(self) -> None:
        self._end()
        self._checkpointer.close()

    @property
    def host_bytes(self) -> int | None:
        return self._checkpointer.held_bytes


WAYS: dict[str, Callable[[Loop], Way]] = {
    "torch.save of a CPU copy": lambda loop: CopyAndSave(),
    "dcp.async_save": lambda loop: AsyncSave(None),
    "dcp.async_save, pinned staging": lambda loop: AsyncSave(Staging(loop.nbytes + 64 * MIB)),
    "the helper": lambda loop: Helper(loop, guarded=False),
    "the helper with guard": lambda loop: Helper(loop, guarded=True),
}


def pinned_bandwidth(device: Device, quick: bool) -> float:
    """Return the speed, bytes/s, of the best copy from the GPU into pinned memory."""
    size = 16 * MIB if quick else GIB
    source = torch.empty(size, dtype=torch.uint8, device=device.device)
    target = torch.empty(size, dtype=torch.uint8, pin_memory=device.is_gpu)
    target.fill_(0)
    times = []
    for _ in range(7):
        device.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        device.synchronize()
        times.append(time.perf_counter() - began)
    return size / min(times)


def measure(way: Way, loop: Loop, folder: Path, step_s: float, device: Device) -> Row:
    """Take one checkpoint beside the loop."""
    device.synchronize()
    path = folder / "checkpoint"
    began = time.perf_counter()
    way.save(loop, path)
    stopped_s = time.perf_counter() - began
    steps = [loop.step()]
    way.staged()
    staged_s = time.perf_counter() - began
    while len(steps) < 3:
        steps.append(loop.step())
    way.finish()
    written_s = time.perf_counter() - began
    # A step that had to wait for the copy stops the loop as much as a call does.
    waited_s = max(0.0, steps[0] - step_s)
    for left in folder.iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    return {
        "stopped_s": stopped_s,
        "first_step_waited_s": waited_s,
        "steps_slowed": statistics.median(steps) / step_s,
        "staged_s": staged_s,
        "written_s": written_s,
    }


def run_size(
    gib: float, device: Device, folder: Path, repeats: int, quick: bool, until: float
) -> list[Row]:
    loop = Loop(device, 12 * MIB if quick else int(gib * GIB), quick)
    for _ in range(3):
        loop.step()
    step_s = statistics.median(loop.step() for _ in range(7))
    samples: dict[str, list[Row]] = {name: [] for name in WAYS}
    host: dict[str, int | None] = {}
    for number in range(repeats):
        for name, make in WAYS.items():  # in turns; each takes its memory before it is timed
            if time.monotonic() > until and number:
                continue
            way = make(loop)
            try:
                measure(way, loop, folder, step_s, device)  # the first touch of everything
                samples[name].append(measure(way, loop, folder, step_s, device))
                host[name] = way.host_bytes
            finally:
                way.close()
    rows = []
    for name, taken in samples.items():
        keys = taken[0] if taken else {}
        row: Row = {key: statistics.median(each[key] for each in taken) for key in keys}
        row |= {"way": name, "state_gib": loop.nbytes / GIB, "samples": len(taken)}
        row |= {"step_s": step_s, "host_bytes": host.get(name)}
        rows.append(row)
    return rows


def show(rows: list[Row], bandwidth: float) -> None:
    print(f"best pinned copy: {bandwidth / GIB:.1f} GiB/s")
    heading = ("state", "way", "stopped", "1st step waits", "steps", "copied at", "host memory")
    print("{:>9}  {:32} {:>10} {:>15} {:>8} {:>12} {:>12}".format(*heading))
    for row in rows:
        if not row["samples"]:
            print(f"{row['state_gib']:7.2f} G  {row['way']:32} not run: no time was left")
            continue
        speed = row["state_gib"] * GIB / row["staged_s"] / bandwidth
        host = "-" if row["host_bytes"] is None else f"{row['host_bytes'] / GIB:.2f} GiB"
        print(
            f"{row['state_gib']:7.2f} G  {row['way']:32} {row['stopped_s'] * 1e3:7.1f} ms"
            f" {row['first_step_waited_s'] * 1e3:12.1f} ms {row['steps_slowed']:7.2f}x"
            f" {speed:11.2f}x {host:>12}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="small sizes: only to see that it runs"
    )
    parser.add_argument("--folder", type=Path, help="where files go (default: /dev/shm)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gib", default="2,8,16", help="sizes of the state, GiB")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = Device()
    quick = arguments.quick or not device.is_gpu
    sizes = [0.01] if quick else [float(size) for size in arguments.gib.split(",")]
    about = device.describe()
    for key, value in about.items():
        print(f"{key:8} {value}")
    bandwidth = pinned_bandwidth(device, quick)
    until = time.monotonic() + BUDGET_S
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder or "/dev/shm") as folder:
        for size in sizes:
            rows += run_size(size, device, Path(folder), arguments.repeats, quick, until)
    show(rows, bandwidth)
    if quick:
        print("small sizes: these figures say nothing")
    else:
        largest = max(row["state_gib"] for row in rows)
        for row in rows:
            if row["way"] == "the helper with guard" and row["state_gib"] == largest:
                speed = row["state_gib"] * GIB / row["staged_s"] / bandwidth
                print(f"stopped under {STOP_GOAL_S * 1e3:.0f} ms: {row['stopped_s'] < STOP_GOAL_S}")
                print(f"copied at {BANDWIDTH_GOAL} of the best: {speed >= BANDWIDTH_GOAL}")
                slowed = row["steps_slowed"] < SLOWED_GOAL
                print(f"steps slowed under {SLOWED_GOAL - 1:.0%}: {slowed}")
    if arguments.json:
        document = {"machine": about, "pinned_bytes_per_s": bandwidth, "rows": rows}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
