"""How long does a checkpoint stop the training? A transformer of 100 M parameters, AdamW, the CPU.

    .venv/bin/python bench/stall.py [--quick] [--repeats 5] [--contenders …] [--json F]

A checkpoint every ten steps, all state of model and optimizer in it (1.2 GB). What counts is how
long the loop stood still for each, and how long the whole training took until its last file was
whole; with two cores, what is written in the background takes its time from the steps.

Needs root and some 16 GiB of free memory.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from bench import flash_checkpoint
from bench.contenders import Contender, Target, Workspace, start_disk, start_lmstorfs
from bench.flash_checkpoint import FlashSave
from bench.report import SECONDS, Comparison, Goal, Results, judge, show, to_json
from bench.rivals import start_juicefs
from bench.training_loop import AsyncSave, Helper, Saving, TorchSave, Training, training_turn
from bench.turns import Run, Turn, choose, parse_arguments, start_all
from bench.workloads import Case, no_case
from lmstorfs.units import GIB, MIB

RAM_BYTES = 8 * GIB
QUICK_RAM_BYTES = 512 * MIB
STEPS, EVERY = 30, 10
QUICK_STEPS, QUICK_EVERY = 4, 2
WHOLE_PART = "whole training"

STOP = Case("stop", "stopped per checkpoint", 0, no_case)
WHOLE = Case("whole", WHOLE_PART, 0, no_case)

SAVINGS = ["torch.save", "dcp.async_save"]
FLASH = "flash"
FLASH_PLACES = ["disk", "mount"]
PLACES = ["disk", "juicefs", "mount"]


def start_place(name: str, place: Workspace, stack: ExitStack) -> Target:
    if name == "disk":
        return start_disk(place, stack)
    if name == "juicefs":
        return start_juicefs(place, stack, "juicefs", [], [])
    return start_lmstorfs(place, stack, "passthrough")


def contenders(started: dict[str, Target]) -> list[Contender]:
    """Return all ways on all places; what is started once serves all ways."""

    def on(name: str, place: Workspace, stack: ExitStack) -> Target:
        if name not in started:
            started[name] = start_place(name, place, stack)
        return started[name]

    titles = {"disk": "local disk", "juicefs": "JuiceFS --writeback", "mount": "the mount"}
    found = [
        Contender(f"{saving}-{name}", f"{saving} to {titles[name]}", partial(on, name))
        for saving in SAVINGS
        for name in PLACES
    ]
    if flash_checkpoint.installed():
        found += [
            Contender(f"{FLASH}-{name}", f"DLRover to {titles[name]}", partial(on, name))
            for name in FLASH_PLACES
        ]
    found.append(Contender("helper-mount", "the helper to the mount", partial(on, "mount")))
    found.append(Contender("guard-mount", "the helper with guard", partial(on, "mount")))
    return found


def saving_of(name: str, training: Training, flash: FlashSave | None) -> Saving:
    way = name.rpartition("-")[0]
    if way == "torch.save":
        return TorchSave()
    if way == "dcp.async_save":
        return AsyncSave()
    if way == FLASH:
        assert flash is not None
        return flash
    return Helper(training, guarded=way == "guard")


def stopping(stood: int) -> Callable[[float, float, dict[str, float]], float]:
    """Return what makes a turn's time that of one of `stood` checkpoints."""

    def told(whole_s: float, stood_s: float, parts: dict[str, float]) -> float:
        parts[WHOLE_PART] = whole_s
        return stood_s / stood

    return told


def add_whole(results: Results) -> None:
    """Make the whole time a case of its own."""
    for (case, contender, part), samples in results.parts.items():
        if case == STOP.name and part == WHOLE_PART:
            results.samples[WHOLE.name, contender] = list(samples)
    results.parts.clear()
    results.cases = [STOP, WHOLE]


OTHERS = [f"{saving}-{place}" for saving in SAVINGS for place in PLACES]
OTHERS += [f"{FLASH}-{place}" for place in FLASH_PLACES]
DCP = Comparison(
    "dcp.async_save, its fastest", [f"dcp.async_save-{place}" for place in PLACES], "helper-mount"
)
REST = Comparison("the fastest of all others", OTHERS, "helper-mount")
# With guard, a copy hides beside kernels; here the training itself needs all processors.
COMPARISONS = [
    DCP,
    REST,
    Comparison(DCP.title, DCP.contenders, "guard-mount"),
    Comparison(REST.title, REST.contenders, "guard-mount"),
]
GOALS = [Goal(DCP, 2.0, ["stop"]), Goal(REST, 1.0, ["stop", "whole"])]
NOTES = [
    f"{STEPS} steps, a checkpoint every {EVERY}; a turn ends when the last file is whole",
    "stopped: the call itself, and what the optimizer's step then waits for",
    "contenders take turns within each repetition, in another order each time; files are deleted "
    "after each turn, and a turn starts when its contender has nothing left to do",
    "the memory of the helper and of DLRover is taken and touched before their turns, as at the "
    "start of a training; DLRover is among them where it is installed",
    "memory that was touched before is held between turns and let go just before each",
]


def main() -> int:
    arguments = parse_arguments(__doc__.splitlines()[0], ballast="6G")
    run = Run("stall", arguments, NOTES)
    with run.place(QUICK_RAM_BYTES if run.quick else RAM_BYTES) as (place, stack):
        results = Results([STOP], choose(contenders({}), arguments.contenders))
        targets = start_all(results.contenders, place, stack, results)
        flash = None
        if any(each.name.startswith(FLASH) for each in results.contenders):
            flash = FlashSave(place.folder("flash"))
            stack.callback(flash.end)
        training = Training(run.quick)
        if flash is not None:
            flash.take_memory(training)
        steps, every = (QUICK_STEPS, QUICK_EVERY) if run.quick else (STEPS, EVERY)

        def prepare(case: Case, contender: Contender) -> Turn:
            # One at a time: the memory that one holds must not be another's to miss.
            target = targets[contender.name]
            folder = target.directory / contender.name
            saving = saving_of(contender.name, training, flash)
            told = stopping(steps // every)
            return training_turn(training, saving, target, folder, told, steps=steps, every=every)

        run.measure(results, prepare)
    add_whole(results)
    verdicts = [] if run.quick else judge(results, GOALS)
    show(results, COMPARISONS, verdicts, run.about, SECONDS, SECONDS)
    run.write(to_json(results, COMPARISONS, verdicts, run.about))
    return 0


if __name__ == "__main__":
    sys.exit(main())
