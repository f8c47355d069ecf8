"""How fast does a second copy come to be, and what does the writer pay for it?

    .venv/bin/python bench/mirror.py [--quick] [--repeats 5] [--json F]

Two hosts (network namespaces of this machine, so sender, receiver and writer share its cores): one
writes to lmstorfs mounts, one with a mirror and one without; the other keeps the replicas. Beside
them the kernel alone, bare.py, moves as many bytes between the same hosts.

Needs root and some 16 GiB of free memory.
"""

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.contenders import COMMAND_TIMEOUT_S, Contender, Target, Workspace, mount_tmpfs
from bench.nodes import (
    STORE_LATER,
    node,
    peer_options,
    start_mirror,
    start_node,
    status,
    wait_for_copies,
    wait_until_connected,
    wait_until_freed,
    wait_until_mirrored,
)
from bench.report import Comparison, Goal, Results, judge, show, to_json
from bench.turns import Run, Turn, choose, delete_files, parse_arguments, start_all
from bench.workloads import Case, no_case, stream_case
from bench.writer import write_stream
from lmstorfs.units import GIB, MIB, format_size
from tests.mounting import Mount
from tests.namespaces import Host, network
from tests.nodes import MirrorNode

RAM_BYTES = 4 * GIB
QUICK_RAM_BYTES = 512 * MIB
WRITE_BYTES = 16 * MIB
MOMENTS = ("as written", "afterwards")
PROGRAM = Path(__file__).parent / "bare.py"


@dataclass(frozen=True)
class Content:
    """What is replicated: files of one size."""

    files: int
    each: int

    def write(self, directory: Path) -> None:
        """Write them one after the other, as a program saves its shards."""
        buffer = memoryview(os.urandom(min(WRITE_BYTES, self.each)))
        for path in self.paths(directory):
            write_stream(str(path), self.each, buffer)

    def paths(self, directory: Path) -> list[Path]:
        return [directory / f"{number}.bin" for number in range(self.files)]


# --- lmstorfs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mirrored:
    """A mount whose mirror is on another host."""

    mount: Mount
    mirror: MirrorNode

    def clean_up(self) -> None:
        delete_files(self.mount.path)
        wait_until_freed(self.mount.state, self.mirror.state)

    def settle(self) -> None:
        wait_until_mirrored(self.mount)

    def as_written(self, content: Content) -> Turn:
        """Time from the first write until the mirror has everything."""

        def timed() -> float:
            started = time.monotonic()
            content.write(self.mount.path)
            turn.parts["until the last close"] = time.monotonic() - started
            wait_for_copies(self.mount, self.mount.path, "mirror")
            ended = time.monotonic()
            self._check(content)
            return ended - started

        turn = Turn(timed, self.clean_up, self.settle)
        return turn

    def _check(self, content: Content) -> None:
        """The store's copy would have done for `wait` as well: it must not have been first."""
        if status(self.mount)["store"]["pending_files"] < content.files:
            raise OSError("the store has files, and was not to be waited for")

    def afterwards(self, content: Content) -> Turn:
        """Time the replication alone: the mirror comes once everything is written."""
        self.mirror.kill()

        def timed() -> float:
            content.write(self.mount.path)
            known = len(self.mirror.log.read_text())
            self.mirror.start()
            connected = wait_until_connected(self.mount, self.mirror, known)
            wait_for_copies(self.mount, self.mount.path, "mirror")
            ended = time.time()
            self._check(content)
            return ended - connected

        return Turn(timed, self.clean_up, self.settle)

    def writing(self, case: Case) -> Turn:
        return Turn(case.prepare(self.mount.path), self.clean_up, self.settle)


@dataclass(frozen=True)
class Alone:
    """A mount without a mirror."""

    mount: Mount

    def writing(self, case: Case) -> Turn:
        def clean_up() -> None:
            delete_files(self.mount.path)
            wait_until_freed(self.mount.state)

        return Turn(case.prepare(self.mount.path), clean_up)


# --- the kernel alone ------------------------------------------------------------------------


@dataclass(frozen=True)
class Bare:
    """A file system in memory on each host, and bare.py between them."""

    source: list[Path]
    target: Path
    sender: Host
    receiver: Host
    how: str

    def transfer(self, content: Content) -> Turn:
        """Time the transfer of as many bytes, which are there, into as many files."""
        words = ["receive", self.receiver.address, self.target]
        receiver = self._start(self.receiver, *words, content.files, content.each, self.how)
        port = self._word(receiver)
        sender = self._start(self.sender, "send", self.receiver.address, port, *self.source)
        self._word(sender)

        def timed() -> float:
            said, _ = sender.communicate("go\n", timeout=COMMAND_TIMEOUT_S)
            ended, _ = receiver.communicate(timeout=COMMAND_TIMEOUT_S)
            if sender.returncode or receiver.returncode:
                raise OSError("bare.py failed")
            return float(ended) - float(said)

        return Turn(timed, lambda: delete_files(self.target))

    def _start(self, host: Host, *words: object) -> "subprocess.Popen[str]":
        command = [*host.prefix, sys.executable, PROGRAM, *words]
        return subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _word(self, process: "subprocess.Popen[str]") -> str:
        assert process.stdout is not None
        said = process.stdout.readline().split()
        if not said or said[0] != "ready":
            raise OSError("bare.py did not start")
        return said[-1]


# --- what is measured ------------------------------------------------------------------------

Way = Mirrored | Alone | Bare


class Site:
    """The two hosts, and what was started on them."""

    def __init__(self, hosts: dict[str, Host], quick: bool) -> None:
        self._hosts = hosts
        self.contents = contents(quick)
        self._source: list[Path] = []  # what the kernel alone sends, again and again
        self.ways: dict[str, Way] = {}

    def start_mirrored(self, place: Workspace, stack: ExitStack) -> Target:
        base = place.folder("mirrored")
        mirror = start_mirror(base, self._hosts["b"], place.ram_bytes, stack)
        mount = self._mount(base / "node", place, stack, *peer_options(mirror))
        self.ways["lmstorfs"] = way = Mirrored(mount, mirror)
        way.settle()
        size = format_size(place.ram_bytes)
        return Target(mount.path, f"--ram {size}, --mirror on the other host, --ram {size} there")

    def start_alone(self, place: Workspace, stack: ExitStack) -> Target:
        mount = self._mount(place.folder("alone"), place, stack)
        self.ways["alone"] = Alone(mount)
        return Target(mount.path, f"--ram {format_size(place.ram_bytes)}")

    def _mount(self, folder: Path, place: Workspace, stack: ExitStack, *options: object) -> Mount:
        ram = ("--ram", f"{place.ram_bytes // MIB}M")
        mount = node(folder, stack, *ram, *STORE_LATER, *options, host=self._hosts["a"])
        start_node(mount)
        return mount

    def start_bare(self, place: Workspace, stack: ExitStack, how: str) -> Target:
        if not self._source:
            directory = place.folder("source")
            mount_tmpfs(directory, place.ram_bytes, stack)
            content = self.contents["8 files"]
            content.write(directory)
            self._source = content.paths(directory)
        target = place.folder(f"target-{how}")
        kind = mount_tmpfs(target, place.ram_bytes, stack)
        hosts = self._hosts["a"], self._hosts["b"]
        self.ways[f"bare-{how}"] = Bare(self._source, target, *hosts, how)
        return Target(target, f"from and to a {kind}, one connection")

    def contenders(self) -> list[Contender]:
        return [
            Contender("lmstorfs", "lmstorfs with a mirror", self.start_mirrored),
            Contender("alone", "lmstorfs without one", self.start_alone),
            Contender("bare-map", "sendfile, recv_into a map", partial(self.start_bare, how="map")),
            Contender("bare-splice", "sendfile, splice", partial(self.start_bare, how="splice")),
        ]


def contents(quick: bool) -> dict[str, Content]:
    total = 64 * MIB if quick else 2 * GIB
    return {"one file": Content(1, total), "8 files": Content(8, total // 8)}


def cases(quick: bool) -> list[Case]:
    found = []
    for name, content in contents(quick).items():
        size = content.files * content.each
        found += [Case(f"{name} {when}", f"{name} {when}", size, no_case) for when in MOMENTS]
    for size in (1 * MIB, 16 * MIB):
        stream = stream_case(size, 64 * MIB if quick else 2 * GIB)
        name = f"write {stream.title}"
        found.append(Case(name, name, stream.total, stream.prepare))
    return found


def prepare(site: Site, case: Case, contender: Contender) -> Turn | None:
    """Return what a contender does at a case; None: nothing."""
    way = site.ways[contender.name]
    when = next((moment for moment in MOMENTS if case.name.endswith(moment)), None)
    if when is None:
        return None if isinstance(way, Bare) else way.writing(case)
    content = site.contents[case.name.removesuffix(f" {when}")]
    if isinstance(way, Bare):
        return way.transfer(content)
    if isinstance(way, Mirrored):
        return way.as_written(content) if when == "as written" else way.afterwards(content)
    return None


MAPPED = Comparison("sendfile, recv_into a map", ["bare-map"])
FASTEST = Comparison("bare, its fastest form", ["bare-map", "bare-splice"])
ALONE = Comparison("lmstorfs without a mirror", ["alone"])
COMPARISONS = [MAPPED, FASTEST, ALONE]
REPLICATIONS = [f"{name} {when}" for when in MOMENTS for name in contents(quick=True)]
WRITES = ["write 1 MiB", "write 16 MiB"]
GOALS = [
    Goal(MAPPED, 0.8, REPLICATIONS),
    Goal(FASTEST, 0.8, REPLICATIONS),
    Goal(ALONE, 0.7, WRITES),
]
NOTES = [
    "one file of 2 GiB, or 8 files of 256 MiB; "
    "'as written' runs from the first open to the moment when the mirror has every version, whole "
    "and by digest; the files are written meanwhile, in writes of 16 MiB",
    "'afterwards' is the replication alone: the mirror starts when all is written and closed, and "
    "the time runs from its origin's connection",
    "the bare transfers are of as many bytes that are there, into as many files, with the mirror's "
    "buffers, and with neither digests nor names",
    "'write' runs from the open to the close; the mirror takes the bytes meanwhile",
    "writer, sender and receiver share this machine's cores: what the digests at both ends take, "
    "which the bare transfers do without, is missing in the transfer",
    "contenders take turns within each repetition, in another order each time",
    "nothing is brought to a store meanwhile; files are deleted after each turn, and the next one "
    "starts when both hosts have their memory back",
    "memory that was touched before is held between turns and let go just before each",
]


def main() -> int:
    arguments = parse_arguments(__doc__.splitlines()[0])
    run = Run("mirror", arguments, NOTES)
    with run.place(QUICK_RAM_BYTES if run.quick else RAM_BYTES) as (place, stack):
        site = Site(stack.enter_context(network("a", "b")), run.quick)
        results = Results(
            choose(cases(run.quick), arguments.cases),
            choose(site.contenders(), arguments.contenders),
        )
        start_all(results.contenders, place, stack, results)
        run.measure(results, partial(prepare, site), warm_up=results.cases)
    verdicts = judge(results, GOALS)
    show(results, COMPARISONS, verdicts, run.about)
    run.write(to_json(results, COMPARISONS, verdicts, run.about))
    return 0


if __name__ == "__main__":
    sys.exit(main())
