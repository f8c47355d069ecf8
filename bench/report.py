"""What a benchmark found: speeds, ratios and targets, as tables for people and as JSON.

Figures of one machine mean little on another, so ratios of figures from one run come first; every
single sample is in the JSON.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.contenders import Contender
from bench.workloads import Case
from lmstorfs.units import GIB

OURS = "lmstorfs"
TABLE_WIDTH = 132


@dataclass(frozen=True)
class Comparison:
    """What ours is compared with: one contender, or the fastest of several forms of one."""

    title: str
    contenders: Sequence[str]
    ours: str = OURS
    """Which contender is ours here."""


@dataclass(frozen=True)
class Goal:
    """How many times as fast as `over` ours has to be in the named cases."""

    over: Comparison
    at_least: float
    cases: Sequence[str]


@dataclass
class Results:
    """The samples of a run, in seconds, by case and contender."""

    cases: Sequence[Case]
    contenders: Sequence[Contender]
    samples: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    parts: dict[tuple[str, str, str], list[float]] = field(default_factory=dict)
    """What the samples are made of, where that is told: by case, contender and part."""
    failures: dict[tuple[str, str], str] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    turns: int = 0
    noisy_turns: int = 0

    def add(
        self,
        case: Case,
        contender: Contender,
        seconds: float,
        parts: Mapping[str, float] | None = None,
    ) -> None:
        self.samples.setdefault((case.name, contender.name), []).append(seconds)
        for part, part_s in (parts or {}).items():
            self.parts.setdefault((case.name, contender.name, part), []).append(part_s)

    def seconds(self, case: Case, contender: str) -> float | None:
        """Return the median time, or None if there is none."""
        samples = self.samples.get((case.name, contender))
        if not samples or (case.name, contender) in self.failures:
            return None
        return statistics.median(samples)

    def part_seconds(self, case: Case, contender: str, part: str) -> float | None:
        """Return the median time of a part, or None if there is none."""
        samples = self.parts.get((case.name, contender, part))
        if not samples or (case.name, contender) in self.failures:
            return None
        return statistics.median(samples)

    def speed(self, case: Case, contender: str) -> float | None:
        """Return the median speed in GiB/s, or None if there is none."""
        seconds = self.seconds(case, contender)
        return None if seconds is None else case.total / GIB / seconds

    def ratio(self, case: Case, over: Comparison) -> float | None:
        """Return how many times as fast as the fastest of `over` ours is."""
        ours = self.seconds(case, over.ours)
        times = [self.seconds(case, name) for name in over.contenders]
        known = [seconds for seconds in times if seconds]
        return min(known) / ours if ours and known else None


@dataclass(frozen=True)
class Unit:
    """In what a table tells of a contender's median time."""

    heading: str
    pattern: str
    of: Callable[[Case, float], float]


GIB_PER_S = Unit("GiB/s", "{:.2f}", lambda case, seconds: case.total / GIB / seconds)
SECONDS = Unit("seconds", "{:.2f}", lambda case, seconds: seconds)
MILLISECONDS = Unit("milliseconds", "{:.1f}", lambda case, seconds: seconds * 1000)


def judge(results: Results, goals: Sequence[Goal]) -> list[dict[str, Any]]:
    """Hold the results against the goals; a goal that could not be measured is not met."""
    by_name = {case.name: case for case in results.cases}
    verdicts = []
    for goal in goals:
        for name in goal.cases:
            if name not in by_name:
                continue
            ratio = results.ratio(by_name[name], goal.over)
            verdicts.append(
                {
                    "case": name,
                    "of": goal.over.ours,
                    "over": goal.over.title,
                    "at_least": goal.at_least,
                    "ratio": ratio and round(ratio, 3),
                    "met": ratio is not None and ratio >= goal.at_least,
                }
            )
    return verdicts


def to_json(
    results: Results,
    comparisons: Sequence[Comparison],
    verdicts: Sequence[Mapping[str, Any]],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    cases = []
    for case in results.cases:
        measured = {}
        for contender in results.contenders:
            key = (case.name, contender.name)
            entry: dict[str, Any] = {"gib_per_s": results.speed(case, contender.name)}
            entry["median_s"] = results.seconds(case, contender.name)
            entry["seconds"] = results.samples.get(key, [])
            parts = {part: s for (*of, part), s in results.parts.items() if tuple(of) == key}
            if parts:
                entry["parts"] = parts
            if key in results.failures:
                entry["failed"] = results.failures[key]
            takes_part = entry["seconds"] or key in results.failures
            if contender.name not in results.not_run and takes_part:
                measured[contender.name] = entry
        ratios = {key_of(over): results.ratio(case, over) for over in comparisons}
        cases.append(
            {"case": case.name, "bytes": case.total, "contenders": measured, "ratios": ratios}
        )
    return {
        **about,
        "settings": results.settings,
        "not_run": results.not_run,
        "turns": results.turns,
        "noisy_turns": results.noisy_turns,
        "cases": cases,
        "targets": list(verdicts),
    }


def key_of(over: Comparison) -> str:
    """Return a comparison's name in the JSON."""
    return over.title if over.ours == OURS else f"{over.ours} / {over.title}"


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")


def label(results: Results, over: Comparison) -> str:
    """Return a comparison's name for people."""
    titles = {contender.name: contender.title for contender in results.contenders}
    return f"{titles.get(over.ours, over.ours)} / {over.title}"


def show(
    results: Results,
    comparisons: Sequence[Comparison],
    verdicts: Sequence[Mapping[str, Any]],
    about: Mapping[str, Any],
    unit: Unit = GIB_PER_S,
    unit_of_parts: Unit = SECONDS,
) -> None:
    """Print everything for people."""
    console = Console(width=TABLE_WIDTH, highlight=False)
    console.print("\n[bold]Machine[/]")
    for key, value in about["machine"].items():
        if key != "ram_bytes":
            console.print(f"  {key.replace('_', ' '):18} {value}", markup=False)
    console.print("\n[bold]Settings[/]")
    for contender in results.contenders:
        text = results.settings.get(contender.name)
        reason = results.not_run.get(contender.name)
        text = text if reason is None else f"not run: {reason}"
        console.print(f"  {contender.title}: {text}", markup=False)
    console.print("\n[bold]How[/]")
    for note in about["notes"]:
        console.print(f"  - {note}", markup=False)
    quiet = results.turns - results.noisy_turns
    console.print(f"  - {quiet} of {results.turns} turns began with idle CPUs")

    cases = results.cases
    ran = [each for each in results.contenders if each.name not in results.not_run]
    figures = [
        (each.title, [in_unit(unit, case, results.seconds(case, each.name)) for case in cases])
        for each in ran
    ]
    show_table(
        console, f"{unit.heading}, median of {about['repeats']}", cases, figures, unit.pattern
    )
    parts = [
        (
            f"{each.title}: {part}",
            [
                in_unit(unit_of_parts, case, results.part_seconds(case, each.name, part))
                for case in cases
            ],
        )
        for each in ran
        for part in dict.fromkeys(p for _, name, p in results.parts if name == each.name)
    ]
    if parts:
        heading = f"What that is made of, {unit_of_parts.heading}"
        show_table(console, heading, cases, parts, unit_of_parts.pattern)
    ratios = [
        (label(results, over), [results.ratio(case, over) for case in cases])
        for over in comparisons
    ]
    show_table(console, "How many times as fast", cases, ratios, "{:.2f}")
    for (failed, name), reason in results.failures.items():
        console.print(f"failed: {name}, {failed}: {reason}", markup=False)
    if about["quick"]:
        console.print("\nQuick sizes: these figures say nothing.")
    elif verdicts:
        show_verdicts(console, verdicts)


def in_unit(unit: Unit, case: Case, seconds: float | None) -> float | None:
    return None if seconds is None else unit.of(case, seconds)


def show_table(
    console: Console,
    title: str,
    cases: Sequence[Case],
    rows: Sequence[tuple[str, Sequence[float | None]]],
    pattern: str,
) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for case in cases:
        table.add_column(case.title, justify="right")
    for name, values in rows:
        table.add_row(name, *("-" if value is None else pattern.format(value) for value in values))
    console.print()
    console.print(table)


def show_verdicts(console: Console, verdicts: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title="Targets", title_justify="left")
    for heading in ("case", "of", "over", "at least", "ratio", ""):
        table.add_column(heading)
    for verdict in verdicts:
        ratio = verdict["ratio"]
        word = "met" if verdict["met"] else "[bold]NOT MET[/]"
        table.add_row(
            verdict["case"],
            verdict["of"],
            verdict["over"],
            f"{verdict['at_least']:g}",
            "not measured" if ratio is None else f"{ratio:.2f}",
            word,
        )
    console.print()
    console.print(table)
