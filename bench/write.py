"""How fast does a program get rid of its bytes? lmstorfs beside memory, the disk and its rivals.

    .venv/bin/python bench/write.py [--quick] [--repeats 5] [--contenders lmstorfs,tmpfs] [--json F]

All contenders are up at the same time and take turns (turns.py says how); medians of all
repetitions count. What brings the bytes to a store in the background is excluded for all.

Needs root (tmpfs mounts, passthrough) and some 14 GiB of free memory.
"""

import sys
from functools import partial

from bench.contenders import Contender, start_disk, start_lmstorfs, start_shm, start_tmpfs
from bench.report import Comparison, Goal, Results, judge, show, to_json
from bench.rivals import (
    JUICEFS_TUNED,
    JUICEFS_TUNED_FORMAT,
    RCLONE_TUNED,
    start_juicefs,
    start_rclone,
)
from bench.turns import Run, choose, parse_arguments, start_all, writing
from bench.workloads import cases
from lmstorfs.units import GIB, MIB

RAM_BYTES = 4 * GIB
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


def main() -> int:
    arguments = parse_arguments(__doc__.splitlines()[0])
    run = Run("write", arguments, NOTES)
    results = Results(
        choose(cases(run.quick), arguments.cases), choose(CONTENDERS, arguments.contenders)
    )
    with run.place(QUICK_RAM_BYTES if run.quick else RAM_BYTES) as (place, stack):
        targets = start_all(results.contenders, place, stack, results)
        run.measure(results, writing(targets))
    verdicts = judge(results, GOALS)
    show(results, COMPARISONS, verdicts, run.about)
    run.write(to_json(results, COMPARISONS, verdicts, run.about))
    return 0


if __name__ == "__main__":
    sys.exit(main())
