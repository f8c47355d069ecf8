"""How long does a checkpoint take until it is safe? `torch.save` and `os.fsync`, by size.

    .venv/bin/python bench/fsync.py [--quick] [--repeats 5] [--contenders …] [--json F]

An fsync on lmstorfs returns when a second copy exists: in another host's RAM (a network namespace
of this machine), in a directory of the local disk, or in S3. What the rivals' fsync promises is
another thing each, and said beside the figures; so there are ratios, and no goals.

Needs root and some 16 GiB of free memory.
"""

import os
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from bench.contenders import Contender, Target, Workspace, start_disk, wait_for
from bench.nodes import (
    STORE_LATER,
    node,
    peer_options,
    start_mirror,
    start_node,
    status,
    wait_until_freed,
    wait_until_mirrored,
)
from bench.report import MILLISECONDS, Comparison, Results, show, to_json
from bench.rivals import JUICEFS_TUNED, JUICEFS_TUNED_FORMAT, start_juicefs
from bench.turns import Run, Turn, choose, delete_files, parse_arguments, start_all
from bench.workloads import Case, no_case, state_dict
from lmstorfs.units import GIB, KIB, MIB, format_size
from tests.mounting import Mount
from tests.namespaces import Host, network
from tests.s3servers import BUCKET, rclone_s3

RAM_BYTES = 4 * GIB
QUICK_RAM_BYTES = 256 * MIB
SIZES = [4 * KIB, 1 * MIB, 64 * MIB, 1 * GIB]
QUICK_SIZES = [4 * KIB, 1 * MIB, 16 * MIB]
SEVERAL = 10
SEVERAL_UP_TO_BYTES = 1 * MIB
FSYNC = "os.fsync alone"


# --- what is timed ---------------------------------------------------------------------------


def save(state: dict[str, object], path: Path) -> tuple[float, float]:
    """Save and fsync; return the seconds from open to close, and those of the fsync."""
    started = time.monotonic()
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        saved = time.monotonic()
        os.fsync(file.fileno())
        synced = time.monotonic()
    return time.monotonic() - started, synced - saved


def saving(case: Case, target: Target) -> Turn:
    """Save once, or a small state several times, each to a file of its own."""
    state = state_dict(case.total)
    count = SEVERAL if case.total <= SEVERAL_UP_TO_BYTES else 1

    def timed() -> float:
        times = [save(state, target.directory / f"{number}.pt") for number in range(count)]
        turn.parts[FSYNC] = sum(fsync for _, fsync in times) / count
        return sum(total for total, _ in times) / count

    turn = Turn(timed, lambda: delete_files(target.directory), target.settle)
    return turn


# --- who takes part --------------------------------------------------------------------------


def words_for(place: Workspace) -> tuple[object, ...]:
    return ("--ram", f"{place.ram_bytes // MIB}M")


def wait_until_stored(mount: Mount) -> None:
    """Wait until deleted files are gone here and in the store."""
    wait_until_freed(mount.state)
    wait_for(lambda: status(mount)["store"]["pending_files"] == 0, "lmstorfs's flush")


def start_mirrored(place: Workspace, stack: ExitStack, hosts: dict[str, Host]) -> Target:
    base = place.folder("mirrored")
    mirror = start_mirror(base, hosts["b"], place.ram_bytes, stack)
    options = [*words_for(place), *STORE_LATER, *peer_options(mirror)]
    mount = node(base / "node", stack, *options, host=hosts["a"])
    start_node(mount)
    wait_until_mirrored(mount)

    def settle() -> None:
        wait_until_freed(mount.state, mirror.state)

    return Target(mount.path, "returns when another host's RAM has it too", settle)


def start_directory(place: Workspace, stack: ExitStack) -> Target:
    mount = node(place.folder("directory"), stack, *words_for(place))
    start_node(mount)
    promise = "returns when the store has it too: a directory on the local disk, fsynced"
    return Target(mount.path, promise, partial(wait_until_stored, mount))


def start_s3(place: Workspace, stack: ExitStack) -> Target:
    server = stack.enter_context(rclone_s3(place.folder("s3-server") / "buckets"))
    options = ("--store", f"s3://{BUCKET}/fsync", "-o", f"endpoint={server.endpoint}")
    environment = server.environment
    words = (*words_for(place), *options)
    mount = node(place.folder("s3"), stack, *words, environment=environment)
    start_node(mount)
    promise = "returns when the store has it too: `rclone serve s3` on loopback"
    return Target(mount.path, promise, partial(wait_until_stored, mount))


def start_synced_disk(place: Workspace, stack: ExitStack) -> Target:
    found = start_disk(place, stack)
    return Target(found.directory, "returns when this machine's disk has it", found.settle)


def start_staged(
    place: Workspace,
    stack: ExitStack,
    name: str,
    format_options: list[str],
    mount_options: list[str],
) -> Target:
    found = start_juicefs(place, stack, name, format_options, mount_options)
    promise = "returns when its cache has it: one copy, in this machine's memory"
    return Target(found.directory, f"{promise}; {found.settings}", found.settle)


def contenders(hosts: dict[str, Host]) -> list[Contender]:
    plain = partial(start_staged, name="juicefs", format_options=[], mount_options=[])
    tuned = partial(
        start_staged,
        name="juicefs-tuned",
        format_options=JUICEFS_TUNED_FORMAT,
        mount_options=JUICEFS_TUNED,
    )
    mirrored = partial(start_mirrored, hosts=hosts)
    return [
        Contender("lmstorfs", "lmstorfs, mirror", mirrored),
        Contender("directory", "lmstorfs, store a directory", start_directory),
        Contender("s3", "lmstorfs, store S3", start_s3),
        Contender("disk", "local disk", start_synced_disk),
        Contender("juicefs", "JuiceFS --writeback", plain),
        Contender("juicefs-tuned", "JuiceFS --writeback, tuned", tuned),
    ]


def cases(quick: bool) -> list[Case]:
    sizes = QUICK_SIZES if quick else SIZES
    return [Case(f"save {format_size(s)}", format_size(s), s, no_case) for s in sizes]


DISK = Comparison("local disk", ["disk"])
JUICEFS = Comparison("JuiceFS --writeback, its fastest form", ["juicefs", "juicefs-tuned"])
COMPARISONS = [
    DISK,
    JUICEFS,
    Comparison("lmstorfs, store a directory", ["directory"]),
    Comparison("lmstorfs, store S3", ["s3"]),
    Comparison(DISK.title, DISK.contenders, "directory"),
    Comparison(DISK.title, DISK.contenders, "s3"),
]
NOTES = [
    "a time runs from the open through torch.save, flush and os.fsync to the close",
    f"of files up to {format_size(SEVERAL_UP_TO_BYTES)} a turn writes {SEVERAL}; their mean counts",
    "what an fsync promises differs: see the settings. JuiceFS with --writeback stages blocks in "
    "its cache without an fsync of its own, and the cache is in memory here: no second copy",
    "lmstorfs with a mirror, and JuiceFS tuned, put the store off; for the others it is the copy "
    "that the fsync waits for",
    "contenders take turns within each repetition, in another order each time; files are deleted "
    "after each turn, and a turn starts when its contender has nothing left to do",
    "memory that was touched before is held between turns and let go just before each",
]


def main() -> int:
    arguments = parse_arguments(__doc__.splitlines()[0])
    run = Run("fsync", arguments, NOTES)
    with run.place(QUICK_RAM_BYTES if run.quick else RAM_BYTES) as (place, stack):
        hosts = stack.enter_context(network("a", "b"))
        results = Results(
            choose(cases(run.quick), arguments.cases),
            choose(contenders(hosts), arguments.contenders),
        )
        targets = start_all(results.contenders, place, stack, results)

        def prepare(case: Case, contender: Contender) -> Turn:
            return saving(case, targets[contender.name])

        run.measure(results, prepare)
    show(results, COMPARISONS, [], run.about, MILLISECONDS, MILLISECONDS)
    run.write(to_json(results, COMPARISONS, [], run.about))
    return 0


if __name__ == "__main__":
    sys.exit(main())
