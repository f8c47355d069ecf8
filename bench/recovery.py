"""How soon does training go on after something died? lmstorfs beside a copy from the store.

    .venv/bin/python bench/recovery.py [--quick] [--repeats 5] [--json F]

A fresh process, which has imported torch, is told to `torch.load` the newest checkpoint: from RAM,
after the daemon's death, from the mirror on a new node, from the store on a new node, and the
traditional way: `rclone copy` from the store to the local disk, then `torch.load`. The store is an
S3 server behind a link that the kernel slows down, for everybody alike.

Needs root and some 18 GiB of free memory.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from bench.contenders import Contender, Target, Workspace
from bench.ladder import LOAD, MAPPED, MOUNT, Site, make_checkpoint
from bench.report import SECONDS, Comparison, Goal, Results, judge, show, to_json
from bench.turns import Run, Turn, choose, parse_arguments, start_all
from bench.workloads import Case, no_case
from lmstorfs.units import GIB, MIB, format_size
from tests.namespaces import network
from tests.s3servers import rclone_s3

CHECKPOINT_BYTES = 2 * GIB
QUICK_CHECKPOINT_BYTES = 64 * MIB
LINK_BYTES_PER_S = 200 * MIB
BALLAST = "6G"
KEYS = ("lmstorfs-bench", "lmstorfs-bench-secret")
RCLONE_TUNED = [
    *("--transfers", "16", "--multi-thread-streams", "16", "--multi-thread-cutoff", "16M"),
    *("--buffer-size", "64M", "--no-traverse", "--no-check-dest"),
]
RCLONE_UNVERIFIED = [*RCLONE_TUNED, "--ignore-checksum"]

Way = Callable[[Case, Target], Turn]
WITH_MOUNT = {"mirror": "mirror-mount", "store": "store-mount"}
"""Contenders whose time is another's and its `lmstorfs mount`."""
RCLONE = {
    "rclone": ("rclone copy, plain", list[str]()),
    "rclone-tuned": ("rclone copy, tuned", RCLONE_TUNED),
    "rclone-unverified": ("rclone copy, tuned, unverified", RCLONE_UNVERIFIED),
}


def start_nothing(_place: Workspace, _stack: ExitStack) -> Target:
    return Target(Path("/"), "the row above and its `lmstorfs mount`")


def contenders(site: Site) -> dict[Contender, Way | None]:
    """Return who takes part, and how each gets its turn ready; None: it has no turns of its own."""
    found: dict[Contender, Way | None] = {
        Contender("ram", "from RAM", site.start_ladder): site.from_ram,
        Contender("killed", "daemon killed", site.start_ladder): site.after_kill,
        Contender("mirror", "from the mirror", site.start_ladder): site.from_mirror,
        Contender("mirror-mount", "from the mirror, with mount", start_nothing): None,
        Contender("store", "from the store", site.start_new): site.from_store,
        Contender("store-mount", "from the store, with mount", start_nothing): None,
    }
    for name, (title, options) in RCLONE.items():
        start = partial(site.start_rclone, name=name, options=options)
        found[Contender(name, title, start)] = partial(site.by_rclone, options=options)
    found[Contender("tmpfs", "torch.load from a tmpfs", site.start_tmpfs)] = site.from_tmpfs
    return found


def add_with_mount(results: Results) -> None:
    """Fill the rows that are sums, sample by sample."""
    for case in results.cases:
        for name, total in WITH_MOUNT.items():
            if (case.name, name) in results.failures:
                continue
            samples = results.samples.get((case.name, name), [])
            mounts = results.parts.get((case.name, name, MOUNT), [])
            sums = [load + mount for load, mount in zip(samples, mounts, strict=True)]
            if sums:
                results.samples[case.name, total] = sums


TRADITIONAL = "rclone copy, its fastest form"
COMPARISONS = [
    *(
        Comparison(TRADITIONAL, list(RCLONE), ours)
        for ours in ("ram", "killed", "mirror", "mirror-mount", "store", "store-mount")
    ),
    *(Comparison("rclone copy, plain", ["rclone"], ours) for ours in ("ram", "mirror", "store")),
    Comparison("torch.load from a tmpfs", ["tmpfs"], "ram"),
    Comparison(TRADITIONAL, list(RCLONE), "tmpfs"),
]
CASES = [LOAD, MAPPED]
GOALS = [
    Goal(Comparison(TRADITIONAL, list(RCLONE), "ram"), 24, CASES),
    Goal(Comparison(TRADITIONAL, list(RCLONE), "mirror"), 4, CASES),
    Goal(Comparison(TRADITIONAL, list(RCLONE), "store"), 1.0, CASES),
]
NOTES = [
    f"the checkpoint is one file of torch.save, {format_size(CHECKPOINT_BYTES)} of tensors; each "
    "process that loads it is fresh, has imported torch, and proves its content afterwards",
    f"the store is `rclone serve s3` behind a link of {format_size(LINK_BYTES_PER_S)} a second, "
    "headers included, with the object in its page cache",
    "'from RAM': the training process died; 'daemon killed': SIGKILL just before the load, and the "
    "keeper brings another, which verifies the copy by digest",
    "'from the mirror', 'from the store': a new, empty node; the time runs from the moment when "
    "`lmstorfs mount` has returned. The rows below have the mount in them",
    "'rclone copy' runs from its start to the end of torch.load from the page cache of the disk; "
    "'unverified' is without its comparison of checksums, all others verify what they bring",
    "'torch.load' copies everything into fresh memory of the process; 'torch.load mmap' maps it, "
    "and has it when every byte was read once",
    "torch.load from a tmpfs with huge pages, where the file just lies, bounds all of them",
    "the mirror's link is as fast as this machine's two cores make it",
    "contenders take turns within each repetition, in another order each time",
    "memory that was touched before is held between turns and let go just before each",
]


def main() -> int:
    arguments = parse_arguments(__doc__.splitlines()[0], BALLAST)
    run = Run("recovery", arguments, NOTES)
    size = QUICK_CHECKPOINT_BYTES if run.quick else CHECKPOINT_BYTES
    with run.place(2 * size) as (place, stack):
        hosts = stack.enter_context(network("node", "mirror", outside=True))
        address = hosts["node"].outside_address
        server = stack.enter_context(
            rclone_s3(place.folder("s3") / "buckets", keys=KEYS, address=address)
        )
        site = Site(hosts, server, make_checkpoint(place, stack, size))
        ways = contenders(site)
        results = Results(
            choose([Case(name, name, size, no_case) for name in CASES], arguments.cases),
            choose(list(ways), arguments.contenders),
        )
        targets = start_all(results.contenders, place, stack, results)
        hosts["node"].outside_link.slow(LINK_BYTES_PER_S)

        def prepare(case: Case, contender: Contender) -> Turn | None:
            way = ways[contender]
            return None if way is None else way(case, targets[contender.name])

        run.measure(results, prepare)
    add_with_mount(results)
    verdicts = judge(results, GOALS)
    show(results, COMPARISONS, verdicts, run.about, SECONDS)
    run.write(to_json(results, COMPARISONS, verdicts, run.about))
    return 0


if __name__ == "__main__":
    sys.exit(main())
