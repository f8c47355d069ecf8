"""How fast does a program get rid of its bytes? lmstorfs beside memory, the disk and its rivals.

    .venv/bin/python bench/write.py [--quick] [--repeats 5] [--contenders lmstorfs,tmpfs] [--json F]

All contenders are up at the same time and take turns, in another order at each repetition; medians
of all repetitions count. A turn is: wait until this contender has nothing left to do and the CPUs
idle, let go of the touched memory that was held meanwhile (machine.py says why), write, delete,
hold the memory again. What brings the bytes to a store in the background is excluded for all.

Needs root (tmpfs mounts, passthrough) and some 14 GiB of free memory.
"""

import argparse
import gc
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TypeVar

from bench import machine
from bench.contenders import (
    CannotStartError,
    Contender,
    Target,
    Workspace,
    start_disk,
    start_lmstorfs,
    start_shm,
    start_tmpfs,
    workspace,
)
from bench.report import Comparison, Goal, Results, judge, show, to_json, write_json
from bench.rivals import (
    JUICEFS_TUNED,
    JUICEFS_TUNED_FORMAT,
    RCLONE_TUNED,
    start_juicefs,
    start_rclone,
)
from bench.workloads import Case, cases
from lmstorfs.units import GIB, MIB, format_size, parse_size

RAM_BYTES = 4 * GIB
BALLAST = "8G"
QUICK_RAM_BYTES = 256 * MIB
KERNEL_CACHE = ("-o", "writeback_cache")

CONTENDERS = [
    Contender("lmstorfs", "lmstorfs", partial(start_lmstorfs, data_path="passthrough")),
    Contender(
        "lmstorfs-userspace", "lmstorfs, userspace", partial(start_lmstorfs, data_path="userspace")
    ),
    Contender("tmpfs", "private tmpfs", start_tmpfs),
    Contender("shm", "/dev/shm", start_shm),
    Contender("disk", "local disk", start_disk),
    Contender(
        "juicefs",
        "JuiceFS, plain",
        partial(start_juicefs, name="juicefs", format_options=[], mount_options=[]),
    ),
    Contender(
        "juicefs-tuned",
        "JuiceFS, tuned",
        partial(
            start_juicefs,
            name="juicefs-tuned",
            format_options=JUICEFS_TUNED_FORMAT,
            mount_options=JUICEFS_TUNED,
        ),
    ),
    Contender(
        "juicefs-kernel-cache",
        "JuiceFS, tuned, kernel cache",
        partial(
            start_juicefs,
            name="juicefs-kernel-cache",
            format_options=[],
            mount_options=[*JUICEFS_TUNED, *KERNEL_CACHE],
        ),
    ),
    Contender("rclone", "rclone, plain", partial(start_rclone, name="rclone", mount_options=[])),
    Contender(
        "rclone-kernel-cache",
        "rclone, tuned, kernel cache",
        partial(
            start_rclone,
            name="rclone-kernel-cache",
            mount_options=[*RCLONE_TUNED, "--write-back-cache"],
        ),
    ),
]

TMPFS = Comparison("private tmpfs", ["tmpfs"])
USERSPACE = Comparison("its userspace path", ["lmstorfs-userspace"])
JUICEFS_PLAIN = Comparison("JuiceFS, plain", ["juicefs"])
JUICEFS_BEST = Comparison(
    "JuiceFS, its fastest form", ["juicefs", "juicefs-tuned", "juicefs-kernel-cache"]
)
RCLONE_PLAIN = Comparison("rclone, plain", ["rclone"])
RCLONE_BEST = Comparison("rclone, its fastest form", ["rclone", "rclone-kernel-cache"])
COMPARISONS = [TMPFS, USERSPACE, JUICEFS_PLAIN, JUICEFS_BEST, RCLONE_PLAIN, RCLONE_BEST]

SMALL = ["stream 4 KiB", "stream 64 KiB"]
MEGABYTES = ["stream 1 MiB", "stream 16 MiB", "4 writers"]
LARGE = ["stream 256 KiB", *MEGABYTES]
GOALS = [
    Goal(TMPFS, 0.8, SMALL),
    Goal(TMPFS, 0.9, [*LARGE, "torch.save"]),
    Goal(USERSPACE, 5, [*SMALL, *LARGE]),
    *(
        Goal(rival, 15, MEGABYTES)
        for rival in (JUICEFS_PLAIN, JUICEFS_BEST, RCLONE_PLAIN, RCLONE_BEST)
    ),
]

NOTES = [
    "a time runs from the first open to the last close, by one monotonic clock; nothing is fsynced",
    "contenders take turns within each repetition, in another order each time",
    "bringing the bytes to a store in the background is excluded for all equally: files are "
    "deleted after each turn, and a turn starts when its contender has nothing left to do",
    "memory that was touched before is held between turns and let go just before each",
    "stores and state lie on the local disk, all caches in memory",
]


def start_all(
    contenders: Sequence[Contender], place: Workspace, stack: ExitStack, results: Results
) -> dict[str, Target]:
    """Start what can be started; the rest is reported and left out."""
    targets = {}
    for contender in contenders:
        with ExitStack() as own:
            try:
                target = contender.start(place, own)
            except (CannotStartError, OSError) as error:
                results.not_run[contender.name] = str(error)
                continue
            targets[contender.name] = target
            results.settings[contender.name] = target.settings
            stack.enter_context(own.pop_all())
    return targets


def delete_files(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_file() and path.suffix in (".bin", ".pt"):
            path.unlink()


def take_turn(
    case: Case, target: Target, ballast: machine.Ballast, quiet_timeout_s: float
) -> tuple[float, bool]:
    """Let one contender write once; return the seconds, and whether the CPUs were idle before."""
    timed = case.prepare(target.directory)
    quiet = machine.wait_until_quiet(quiet_timeout_s)
    gc.collect()
    gc.disable()
    ballast.release()
    try:
        seconds = timed()
    finally:
        gc.enable()
        delete_files(target.directory)
        ballast.hold()
        target.settle()
    return seconds, quiet


def measure(
    results: Results,
    targets: dict[str, Target],
    repeats: int,
    ballast: machine.Ballast,
    quiet_timeout_s: float = machine.QUIET_TIMEOUT_S,
) -> None:
    """Fill `results`. A first round through everything is not counted: it warms all up."""
    running = [contender for contender in results.contenders if contender.name in targets]
    largest = max(results.cases, key=lambda case: case.total)
    rounds: list[tuple[Case, int | None]] = [(largest, None)]
    rounds += [(case, number) for case in results.cases for number in range(repeats)]
    shuffled = random.Random(7)
    for case, number in rounds:
        label = "warming up" if number is None else f"{case.name}, {number + 1} of {repeats}"
        print(f"{time.strftime('%H:%M:%S')}  {label}", file=sys.stderr, flush=True)
        for contender in shuffled.sample(running, len(running)):
            if (case.name, contender.name) in results.failures:
                continue
            try:
                seconds, quiet = take_turn(case, targets[contender.name], ballast, quiet_timeout_s)
            except (OSError, CannotStartError) as error:
                results.failures[case.name, contender.name] = str(error)
                continue
            if number is not None:
                results.turns += 1
                results.noisy_turns += not quiet
                results.add(case, contender, seconds)


Named = TypeVar("Named", Case, Contender)


def choose(things: Sequence[Named], names: str | None) -> list[Named]:
    """Return those of `things` that the command line names, or all."""
    if names is None:
        return list(things)
    wanted = [name.strip() for name in names.split(",")]
    known = [thing.name for thing in things]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise SystemExit(f"no {', '.join(unknown)} here; there are: {', '.join(known)}")
    return [thing for thing in things if thing.name in wanted]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="how many turns each takes (5)")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes: only to see that it runs"
    )
    parser.add_argument("--contenders", metavar="NAMES", help="only these, with commas between")
    parser.add_argument("--cases", metavar="NAMES", help="only these, with commas between")
    parser.add_argument("--ballast", default=BALLAST, help=f"memory held touched ({BALLAST})")
    parser.add_argument("--workdir", type=Path, default=Path("/var/tmp"), help="on the local disk")
    parser.add_argument("--json", type=Path, help="where the JSON goes")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if os.geteuid() != 0:
        print("bench/write.py needs root: it mounts tmpfs", file=sys.stderr)
        return 1
    quick = arguments.quick
    ballast = machine.Ballast(0 if quick else parse_size(arguments.ballast))
    results = Results(
        choose(cases(quick), arguments.cases), choose(CONTENDERS, arguments.contenders)
    )
    about = {
        "bench": "write",
        "quick": quick,
        "repeats": arguments.repeats,
        "ballast_bytes": ballast.size,
        "machine": machine.describe(arguments.workdir),
        "notes": [*NOTES, f"{format_size(ballast.size)} of memory are held"],
    }
    ram_bytes = QUICK_RAM_BYTES if quick else RAM_BYTES
    with workspace(arguments.workdir, ram_bytes) as place, ExitStack() as stack:
        targets = start_all(results.contenders, place, stack, results)
        ballast.hold()
        quiet_timeout_s = 0 if quick else machine.QUIET_TIMEOUT_S
        measure(results, targets, arguments.repeats, ballast, quiet_timeout_s)
        ballast.release()
    verdicts = judge(results, GOALS)
    show(results, COMPARISONS, verdicts, about)
    path = arguments.json or Path(__file__).parent / "results" / f"write-{machine.tag()}.json"
    write_json(path, to_json(results, COMPARISONS, verdicts, about))
    print(f"\nwritten to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
