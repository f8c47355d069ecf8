"""Contenders take turns: within each repetition all of them, in another order each time.

A turn is: get ready, wait until the CPUs idle, let go of the touched memory that was held meanwhile
(machine.py says why), do what is timed, give its memory back, hold the memory again, and wait until
this contender has nothing left to do.
"""

import argparse
import gc
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from bench import machine
from bench.contenders import CannotStartError, Contender, Target, Workspace, workspace
from bench.report import Results, write_json
from bench.workloads import Case
from lmstorfs.errors import LmstorfsError
from lmstorfs.units import format_size, parse_size

BALLAST = "8G"
FAILURES = (OSError, CannotStartError, LmstorfsError)


def nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Turn:
    """What one contender does at one case."""

    timed: Callable[[], float]
    clean_up: Callable[[], None] = nothing
    """Give the memory back; what comes after has to find it free."""
    settle: Callable[[], None] = nothing
    """Return when nothing goes on in the background any more."""
    parts: dict[str, float] = field(default_factory=dict)
    """Filled by `timed`: seconds of what its time is made of, by name."""


Prepare = Callable[[Case, Contender], Turn | None]
"""Gets a turn ready; None where the contender has no part in the case."""


def start_all(
    contenders: Sequence[Contender], place: Workspace, stack: ExitStack, results: Results
) -> dict[str, Target]:
    """Start what can be started; the rest is reported and left out."""
    targets = {}
    for contender in contenders:
        with ExitStack() as own:
            try:
                target = contender.start(place, own)
            except FAILURES as error:
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


def writing(targets: Mapping[str, Target]) -> Prepare:
    """Return what has each contender write to its directory, as the case says."""

    def prepare(case: Case, contender: Contender) -> Turn:
        target = targets[contender.name]
        return Turn(
            case.prepare(target.directory),
            clean_up=lambda: delete_files(target.directory),
            settle=target.settle,
        )

    return prepare


def take_turn(turn: Turn, ballast: machine.Ballast, quiet_timeout_s: float) -> tuple[float, bool]:
    """Take one turn; return the seconds, and whether the CPUs were idle before."""
    quiet = machine.wait_until_quiet(quiet_timeout_s)
    gc.collect()
    gc.disable()
    ballast.release()
    try:
        seconds = turn.timed()
    finally:
        gc.enable()
        turn.clean_up()
        ballast.hold()
        turn.settle()
    return seconds, quiet


def measure(
    results: Results,
    prepare: Prepare,
    repeats: int,
    ballast: machine.Ballast,
    quiet_timeout_s: float = machine.QUIET_TIMEOUT_S,
    warm_up: Sequence[Case] | None = None,
) -> None:
    """Fill `results`. A first round, of the largest case, is not counted: it warms all up."""
    running = [each for each in results.contenders if each.name not in results.not_run]
    if warm_up is None:
        warm_up = [max(results.cases, key=lambda case: case.total)]
    rounds: list[tuple[Case, int | None]] = [(case, None) for case in warm_up]
    rounds += [(case, number) for case in results.cases for number in range(repeats)]
    shuffled = random.Random(7)
    for case, number in rounds:
        label = "warming up" if number is None else f"{case.name}, {number + 1} of {repeats}"
        print(f"{time.strftime('%H:%M:%S')}  {label}", file=sys.stderr, flush=True)
        for contender in shuffled.sample(running, len(running)):
            if (case.name, contender.name) in results.failures:
                continue
            try:
                turn = prepare(case, contender)
                if turn is None:
                    continue
                seconds, quiet = take_turn(turn, ballast, quiet_timeout_s)
            except FAILURES as error:
                results.failures[case.name, contender.name] = str(error)
                continue
            if number is not None:
                results.turns += 1
                results.noisy_turns += not quiet
                results.add(case, contender, seconds, turn.parts)


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


# --- a whole run -----------------------------------------------------------------------------


def parse_arguments(description: str, ballast: str = BALLAST) -> argparse.Namespace:
    """Return what every bench may be told."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--repeats", type=int, default=5, help="how many turns each takes (5)")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes: only to see that it runs"
    )
    parser.add_argument("--contenders", metavar="NAMES", help="only these, with commas between")
    parser.add_argument("--cases", metavar="NAMES", help="only these, with commas between")
    parser.add_argument("--ballast", default=ballast, help=f"memory held touched ({ballast})")
    parser.add_argument("--workdir", type=Path, default=Path("/var/tmp"), help="on the local disk")
    parser.add_argument("--json", type=Path, help="where the JSON goes")
    return parser.parse_args()


class Run:
    """One run of a bench: its arguments, the memory it holds, and what is said about it."""

    def __init__(self, name: str, arguments: argparse.Namespace, notes: Sequence[str]) -> None:
        self.name = name
        self.quick: bool = arguments.quick
        self.repeats: int = arguments.repeats
        self.ballast = machine.Ballast(0 if self.quick else parse_size(arguments.ballast))
        self.quiet_timeout_s = 0 if self.quick else machine.QUIET_TIMEOUT_S
        self._workdir: Path = arguments.workdir
        self._json: Path | None = arguments.json
        self.about: dict[str, Any] = {
            "bench": name,
            "quick": self.quick,
            "repeats": self.repeats,
            "ballast_bytes": self.ballast.size,
            "machine": machine.describe(arguments.workdir),
            "notes": [*notes, f"{format_size(self.ballast.size)} of memory are held"],
        }

    @contextmanager
    def place(self, ram_bytes: int) -> Iterator[tuple[Workspace, ExitStack]]:
        """Give a folder and a stack for what is started; the memory is held from here on."""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        if os.geteuid() != 0:
            raise SystemExit(f"bench/{self.name}.py needs root: it mounts tmpfs")
        with workspace(self._workdir, ram_bytes) as place, ExitStack() as stack:
            yield place, stack
            self.ballast.release()

    def measure(
        self, results: Results, prepare: Prepare, warm_up: Sequence[Case] | None = None
    ) -> None:
        """Let all contenders take their turns."""
        self.ballast.hold()
        measure(results, prepare, self.repeats, self.ballast, self.quiet_timeout_s, warm_up)

    def write(self, document: Mapping[str, Any]) -> None:
        """Write the JSON where it belongs."""
        file = f"{self.name}-{machine.tag()}.json"
        path = self._json or Path(__file__).parent / "results" / file
        write_json(path, document)
        print(f"\nwritten to {path}")
