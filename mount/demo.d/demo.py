"""The demo: a mount, an unmodified training loop on it, and a proof that the store has everything.

Every command that it runs is printed as a person would type it. The proof is made without lmstorfs:
after `unmount`, the last checkpoint is read from the store's directory with torch's own loaders and
compared, tensor by tensor, with the model that is still in memory. Whatever happens, nothing stays
mounted, running or on the disk.
"""

import argparse
import copy
import logging
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from train import Save, checkpoint_state, find_checkpoints, train

from lmstorfs.units import GIB, format_size

CHECKPOINT_EVERY_S = 6.0
COMMAND_TIMEOUT_S = 600
CLEANUP_TIMEOUT_S = 30


class DemoError(Exception):
    """The demo did not show what it promises; the message says what."""


def say(text: str = "") -> None:
    print(text, flush=True)


def lmstorfs(*words: object) -> None:
    """Run one lmstorfs command, printed as it would be typed."""
    texts = [str(word) for word in words]
    say(f"\n$ lmstorfs {shlex.join(texts)}")
    command = [sys.executable, "-m", "lmstorfs.cli", *texts]
    try:
        result = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=COMMAND_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise DemoError(f"lmstorfs {texts[0]} took more than {COMMAND_TIMEOUT_S} s") from error
    if result.returncode != 0:
        raise DemoError(f"lmstorfs {texts[0]} ended with exit code {result.returncode}")


def mounts_under(directory: Path) -> list[str]:
    """Return what is mounted below `directory`, the deepest first."""
    lines = Path("/proc/mounts").read_text().splitlines()
    points = [line.split()[1] for line in lines]
    return sorted((point for point in points if point.startswith(f"{directory}/")), reverse=True)


def processes_of(directory: Path) -> list[int]:
    """Return the processes that were started with `directory` in their words: our keeper's own."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(entry.name) != os.getpid() and str(directory) in (entry / "cmdline").read_text():
                found.append(int(entry.name))
    return found


def clean_up(scratch: Path, mount_point: Path) -> None:
    """Leave nothing behind, not even after a failure in the middle of it all."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    quiet = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.DEVNULL,
    }
    if str(mount_point) in mounts_under(scratch):
        unmount = [sys.executable, "-m", "lmstorfs.cli", "unmount", str(mount_point), "--no-drain"]
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(unmount, timeout=CLEANUP_TIMEOUT_S, **quiet)
    detach = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-uz"]
    for point in mounts_under(scratch):
        subprocess.run([*detach, point], timeout=CLEANUP_TIMEOUT_S, **quiet)
    for pid in processes_of(scratch):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """Give a temporary folder, and at the end take it away with all that is mounted in it."""
    scratch = Path(tempfile.mkdtemp(prefix="lmstorfs-demo-"))
    try:
        yield scratch
    finally:
        clean_up(scratch, scratch / "ckpt")


def report_saves(saves: list[Save]) -> None:
    say("\nHow long each save blocked the training (median):")
    for way in dict.fromkeys(save.way for save in saves):
        mine = [save for save in saves if save.way == way]
        seconds = statistics.median(save.seconds for save in mine)
        size = mine[-1].size
        speed = size / seconds / GIB
        say(f"  {way:12} {format_size(size):>9} in {seconds * 1000:5.0f} ms ({speed:.1f} GiB/s)")
    say("DCP calls fsync, which returns when a second copy exists: here, when the store has it.")
    say("Memory that a virtual machine touches for the first time is slow, here as anywhere.")


def leaves(state: object, name: str) -> Iterator[tuple[str, object]]:
    """Yield every value in nested dictionaries and lists, with its path as its name."""
    if isinstance(state, Mapping):
        for key, child in state.items():
            yield from leaves(child, f"{name}.{key}")
    elif isinstance(state, list | tuple):
        for index, child in enumerate(state):
            yield from leaves(child, f"{name}.{index}")
    else:
        yield name, state


def same(expected: object, actual: object) -> bool:
    if isinstance(expected, torch.Tensor) and isinstance(actual, torch.Tensor):
        return expected.dtype == actual.dtype and torch.equal(expected, actual)
    return type(expected) is type(actual) and expected == actual


def count_equal_tensors(expected: object, actual: object, name: str) -> int:
    """Return how many tensors both have; raise `DemoError` at the first difference."""
    wanted, found = dict(leaves(expected, name)), dict(leaves(actual, name))
    differing = [key for key in wanted if key not in found or not same(wanted[key], found[key])]
    differing += [key for key in found if key not in wanted]
    if differing:
        raise DemoError(f"{len(differing)} values differ, the first is {differing[0]}")
    return sum(isinstance(value, torch.Tensor) for value in wanted.values())


def load_dcp(path: Path, like: dict[str, object]) -> dict[str, object]:
    """Load a DCP checkpoint, which needs tensors of the right shapes: those of `like`, zeroed."""
    state = copy.deepcopy(like)
    for _, value in leaves(state, ""):
        if isinstance(value, torch.Tensor):
            value.zero_()
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def compare_with_store(store: Path, state: dict[str, object]) -> None:
    """Read the last checkpoint from the store's plain files and hold it against `state`."""
    checkpoints = find_checkpoints(store)
    say(f"\nThe store's directory, no mount in between: {', '.join(p.name for p in checkpoints)}")
    last = store / f"step_{state['step']}"
    if not checkpoints or checkpoints[-1] != last:
        raise DemoError(f"the store's newest checkpoint is not {last.name}")
    loaded = {
        "torch.save": (state, torch.load(last / "checkpoint.pt", weights_only=True)),
        "safetensors": (state["model"], load_file(last / "model.safetensors")),
        "DCP": (state, load_dcp(last / "dcp", state)),
    }
    for way, (expected, actual) in loaded.items():
        count = count_equal_tensors(expected, actual, f"{way}, {last.name}")
        say(f"  {way:12} {last.name}: {count} tensors, all exactly equal to the model's")


def run(scratch: Path, seconds: float, options: list[str]) -> None:
    mount_point, store = scratch / "ckpt", scratch / "store"
    mount_point.mkdir()
    store.mkdir()
    extra = [word for option in options for word in ("-o", option)]
    state_dir = scratch / "state"
    lmstorfs("mount", mount_point, "--store", store, "--ram", "4G", "--state", state_dir, *extra)

    say(f"\nTraining for {seconds:.0f} s, a checkpoint every {CHECKPOINT_EVERY_S:.0f} s:")
    model, optimizer, saves = train(mount_point, seconds, CHECKPOINT_EVERY_S)
    report_saves(saves)

    lmstorfs("status", mount_point)
    lmstorfs("checkpoints", mount_point)
    started = time.monotonic()
    lmstorfs("sync", mount_point)
    say(f"The store has all of it, {time.monotonic() - started:.1f} s after the training's end.")
    lmstorfs("unmount", mount_point)
    if mounts_under(scratch):
        raise DemoError(f"still mounted after unmount: {', '.join(mounts_under(scratch))}")
    compare_with_store(store, checkpoint_state(model, optimizer, saves[-1].step))


def main() -> int:
    parser = argparse.ArgumentParser(prog="mount/demo", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30, help="how long to train (30)")
    parser.add_argument(
        "-o", action="append", default=[], help="mount option, for example data_path=userspace"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # DCP warns at each save that there is one process only; that is what is meant here.
    warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    try:
        with scratch_directory() as scratch:
            run(scratch, arguments.seconds, arguments.o)
    except DemoError as error:
        say(f"\nFAILED: {error}")
        return 1
    except KeyboardInterrupt:
        say("\ninterrupted; everything is unmounted and removed")
        return 130
    say("\nOK: every tensor that the training saved is in the store, exactly as it was.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
