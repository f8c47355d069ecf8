"""What a benchmark found: speeds, ratios and targets, as tables for people and as JSON.

Figures of one machine mean little on another, so ratios of figures from one run come first; every
single sample is in the JSON.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
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
    failures: dict[tuple[str, str], str] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    turns: int = 0
    noisy_turns: int = 0

    def add(self, case: Case, contender: Contender, seconds: float) -> None:
        self.samples.setdefault((case.name, contender.name), []).append(seconds)

    def speed(self, case: Case, contender: str) -> float | None:
        """Return the median speed in GiB/s, or None if there is none."""
        samples = self.samples.get((case.name, contender))
        if not samples or (case.name, contender) in self.failures:
            return None
        return case.total / GIB / statistics.median(samples)

    def ratio(self, case: Case, over: Comparison) -> float | None:
        """Return how many times as fast as the fastest of `over` ours is."""
        ours = self.speed(case, OURS)
        speeds = [self.speed(case, name) for name in over.contenders]
        known = [speed for speed in speeds if speed]
        return ours / max(known) if ours and known else None


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
            entry["seconds"] = results.samples.get(key, [])
            if key in results.failures:
                entry["failed"] = results.failures[key]
            if contender.name not in results.not_run:
                measured[contender.name] = entry
        ratios = {over.title: results.ratio(case, over) for over in comparisons}
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


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")


def show(
    results: Results,
    comparisons: Sequence[Comparison],
    verdicts: Sequence[Mapping[str, Any]],
    about: Mapping[str, Any],
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

    speeds = [
        (contender.title, [results.speed(case, contender.name) for case in results.cases])
        for contender in results.contenders
        if contender.name not in results.not_run
    ]
    show_table(console, f"GiB/s, median of {about['repeats']}", results, speeds, "{:.2f}")
    ratios = [
        (f"lmstorfs / {over.title}", [results.ratio(case, over) for case in results.cases])
        for over in comparisons
    ]
    show_table(console, "How many times as fast", results, ratios, "{:.2f}")
    for (case, name), reason in results.failures.items():
        console.print(f"failed: {name}, {case}: {reason}", markup=False)
    if about["quick"]:
        console.print("\nQuick sizes: these figures say nothing.")
    else:
        show_verdicts(console, verdicts)


def show_table(
    console: Console,
    title: str,
    results: Results,
    rows: Sequence[tuple[str, Sequence[float | None]]],
    pattern: str,
) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for case in results.cases:
        table.add_column(case.title, justify="right")
    for name, values in rows:
        table.add_row(name, *("-" if value is None else pattern.format(value) for value in values))
    console.print()
    console.print(table)


def show_verdicts(console: Console, verdicts: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title="Targets", title_justify="left")
    for heading in ("case", "over", "at least", "ratio", ""):
        table.add_column(heading)
    for verdict in verdicts:
        ratio = verdict["ratio"]
        word = "met" if verdict["met"] else "[bold]NOT MET[/]"
        table.add_row(
            verdict["case"],
            verdict["over"],
            f"{verdict['at_least']:g}",
            "not measured" if ratio is None else f"{ratio:.2f}",
            word,
        )
    console.print()
    console.print(table)
