"""What does checkpointing add to a whole training? The paper's table, as ratios, on this machine.

    .venv/bin/python bench/training.py [--quick] [--repeats 5] [--contenders …] [--json F]

A checkpoint every second step, as at the paper's high frequency: saved to the store itself before
the training goes on; to a caching filesystem (JuiceFS in Alluxio's place); asynchronously (DCP)
onto that; and by lmstorfs with its helper. The store to save to is an S3 server on loopback.

Needs root and some 16 GiB of free memory.
"""

import io
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.contenders import Contender, Target, Workspace, start_lmstorfs
from bench.report import SECONDS, Comparison, Goal, Results, judge, show, to_json
from bench.rivals import start_juicefs
from bench.training_loop import AsyncSave, Helper, Saving, TorchSave, Training, training_turn
from bench.turns import Run, Turn, choose, nothing, parse_arguments, start_all
from bench.workloads import Case, no_case
from lmstorfs.units import GIB, MIB
from tests.s3servers import S3Server, rclone_s3

RAM_BYTES = 8 * GIB
QUICK_RAM_BYTES = 512 * MIB
STEPS, EVERY = 12, 2
QUICK_STEPS = 4
STOPPED = "stopped in it"

WHOLE = Case("whole", "whole training", 0, no_case)


class ToStore(Saving):
    """`torch.save` into memory, and that to S3, before the training goes on."""

    def __init__(self, server: S3Server) -> None:
        self._server = server
        self._client: Any = server.client()

    def save(self, training: Training, path: Path) -> None:
        buffer = io.BytesIO()
        torch.save(training.state(), buffer)
        buffer.seek(0)
        self._client.upload_fileobj(buffer, self._server.bucket, f"{path.name}.pt")


def start_store(place: Workspace, stack: ExitStack, servers: list[S3Server]) -> Target:
    servers.append(stack.enter_context(rclone_s3(place.folder("s3") / "buckets")))
    return Target(place.folder("store"), "`rclone serve s3` on loopback", nothing)


def start_cache(
    place: Workspace, stack: ExitStack, name: str, started: dict[str, Target]
) -> Target:
    if name not in started:
        started[name] = (
            start_juicefs(place, stack, "juicefs", [], [])
            if name == "juicefs"
            else start_lmstorfs(place, stack, "passthrough")
        )
    return started[name]


def contenders(servers: list[S3Server]) -> list[Contender]:
    started: dict[str, Target] = {}
    cache = partial(start_cache, name="juicefs", started=started)
    mount = partial(start_cache, name="lmstorfs", started=started)
    return [
        Contender("store", "saved to the store", partial(start_store, servers=servers)),
        Contender("cache", "saved to a caching filesystem", cache),
        Contender("async", "DCP onto that", cache),
        Contender("lmstorfs", "lmstorfs with the helper", mount),
    ]


def saving_of(name: str, training: Training, servers: list[S3Server]) -> Saving:
    if name == "store":
        return ToStore(servers[0])
    if name == "cache":
        return TorchSave()
    if name == "async":
        return AsyncSave()
    return Helper(training, guarded=True)


# The paper's Table: shares of the whole time that it saves.
STORE = Comparison("saved to the store", ["store"])
CACHE = Comparison("saved to a caching filesystem", ["cache"])
ASYNC = Comparison("DCP onto that", ["async"])
COMPARISONS = [STORE, CACHE, ASYNC]
GOALS = [
    Goal(STORE, 1 / (1 - 0.399), [WHOLE.name]),
    Goal(CACHE, 1 / (1 - 0.207), [WHOLE.name]),
    Goal(ASYNC, 1 / (1 - 0.051), [WHOLE.name]),
]
NOTES = [
    f"{STEPS} steps, a checkpoint every {EVERY}; a turn ends when the last file is whole",
    "the paper's shares: 39.9 %, 20.7 % and 5.1 % less time than the three others",
    "contenders take turns within each repetition, in another order each time; files are deleted "
    "after each turn, and a turn starts when its contender has nothing left to do",
    "memory that was touched before is held between turns and let go just before each",
]


def main() -> int:
    arguments = parse_arguments(__doc__.splitlines()[0], ballast="6G")
    run = Run("training", arguments, NOTES)
    servers: list[S3Server] = []
    steps = QUICK_STEPS if run.quick else STEPS
    with run.place(QUICK_RAM_BYTES if run.quick else RAM_BYTES) as (place, stack):
        results = Results([WHOLE], choose(contenders(servers), arguments.contenders))
        targets = start_all(results.contenders, place, stack, results)
        training = Training(run.quick)

        def told(whole_s: float, stood_s: float, parts: dict[str, float]) -> float:
            parts[STOPPED] = stood_s
            return whole_s

        def prepare(case: Case, contender: Contender) -> Turn:
            saving = saving_of(contender.name, training, servers)
            target = targets[contender.name]
            folder = target.directory / contender.name
            return training_turn(training, saving, target, folder, told, steps=steps, every=EVERY)

        run.measure(results, prepare)
    verdicts = [] if run.quick else judge(results, GOALS)
    show(results, COMPARISONS, verdicts, run.about, SECONDS, SECONDS)
    run.write(to_json(results, COMPARISONS, verdicts, run.about))
    return 0


if __name__ == "__main__":
    sys.exit(main())
