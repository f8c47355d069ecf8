"""What a person sees: tables that fit 80 columns, progress bars, one line for an error.

Everything is made from the dictionaries that the control socket returns, so that `--json` and the
tables never disagree. Piped output has no colour and no bars, and no word of it is lost: long
names fold.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from lmstorfs.units import format_duration, format_size

if TYPE_CHECKING:
    from lmstorfs.doctor import Finding

NEWEST_SHOWN = 5
BAR_CELLS = 24
STATE_STYLES = {"ready": "green", "degraded": "red", "draining": "yellow", "recovering": "yellow"}
WORD_STYLES = {
    "stored": "green",
    "mirrored": "cyan",
    "written": "yellow",
    "being written": "dim",
    "lacks files": "red",
    "deleted, kept": "dim",
}
LEVEL_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}
COPIES = ("ram", "ssd", "mirror", "store")

Json = Mapping[str, Any]


def output() -> Console:
    """Return the console for results."""
    return Console(highlight=False, emoji=False, markup=False)


def note(line: str) -> None:
    """Tell the person at the terminal one line that is no result."""
    sys.stderr.write(f"lmstorfs: {_printable(line)}\n")
    sys.stderr.flush()


def say_path(path: str) -> None:
    """Print a path for programs: its bytes as they are, also where they are not UTF-8."""
    sys.stdout.flush()
    sys.stdout.buffer.write(os.fsencode(path) + b"\n")
    sys.stdout.buffer.flush()


def say(line: str) -> None:
    """Print one line of result."""
    sys.stdout.write(f"{_printable(line)}\n")
    sys.stdout.flush()


def files(count: int) -> str:
    """Return a number of files as people say it."""
    return "1 file" if count == 1 else f"{count} files"


def show_help(text: str) -> None:
    """Print a help text."""
    sys.stdout.write(f"{text}\n")


def show_json(value: Any) -> None:
    """Print `value` as JSON for programs; names that are not UTF-8 as escaped surrogates."""
    sys.stdout.write(json.dumps(msgspec.to_builtins(value), indent=2) + "\n")
    sys.stdout.flush()


def _printable(text: str) -> str:
    """Return `text` on one line, with what a terminal cannot or must not show as escapes."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


# --- checkpoints -----------------------------------------------------------------------------


def has_copy(checkpoint: Json, place: str) -> bool:
    """Whether `place` holds all of the checkpoint; copies are told as truth or as a file count."""
    count = checkpoint["copies"].get(place)
    if isinstance(count, bool) or not count:
        return bool(count)
    return int(count) >= max(1, int(checkpoint["files"]))


def safety(checkpoint: Json) -> str:
    """Return how safe a checkpoint is, in one word: being written, written, mirrored, stored.

    Or that it is deleted and kept, or lacks files that the one before it had.
    """
    if checkpoint.get("deleted"):
        return "deleted, kept"
    if checkpoint.get("lacks"):
        return "lacks files"
    if not checkpoint["complete"]:
        return "being written"
    if has_copy(checkpoint, "store"):
        return "stored"
    return "mirrored" if has_copy(checkpoint, "mirror") else "written"


def headline(status: Json) -> Text:
    """Return the answer to the question that brings people here: is my newest checkpoint safe?"""
    if not status["checkpoints"]:
        return Text("no checkpoint has been written yet")
    newest = status["checkpoints"][0]
    word = safety(newest)
    meaning = {
        "stored": "the store has it",
        "mirrored": "a second node has it, the store not yet",
        "written": "only this node has it; `lmstorfs sync` waits until the store has it too",
        "being written": "not complete; the one before it counts",
        "lacks files": f"not complete; {_some(newest.get('lacks', []))} missing or not whole",
        "deleted, kept": "`lmstorfs undelete` brings it back until a newer one is safe",
    }[word]
    line = Text("newest checkpoint ")
    line.append(_printable(str(newest["path"])), style="bold")
    return line.append(" is ").append(word, style=WORD_STYLES[word]).append(f": {meaning}")


def _some(names: list[str]) -> str:
    shown = ", ".join(_printable(name) for name in names[:2])
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return f"{shown}{more} {'is' if len(names) == 1 else 'are'}"


def kept_table(kept: list[dict[str, Any]], mountpoint: str) -> RenderableType:
    """Return the checkpoints that were deleted and can be brought back."""
    if not kept:
        return Text("nothing that was deleted is kept")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("DELETED, KEPT", overflow="fold", ratio=1)
    for name in ("FILES", "SIZE", "CLOSED", "DELETED"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in kept:
        table.add_row(
            Text(_printable(f"{mountpoint.rstrip('/')}/{each['path']}")),
            str(each["files"]),
            format_size(each["bytes"]),
            _age(each["closed_at"]),
            _age(each["deleted_at"]),
        )
    return table


def checkpoint_table(checkpoints: list[dict[str, Any]]) -> RenderableType:
    """Return the checkpoints, newest first as they come."""
    if not checkpoints:
        return Text("no checkpoint has been written yet")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("CHECKPOINT", overflow="fold", ratio=1)
    table.add_column("FILES", justify="right", no_wrap=True)
    table.add_column("SIZE", justify="right", no_wrap=True)
    table.add_column("CLOSED", justify="right", no_wrap=True)
    table.add_column("STATE", no_wrap=True)
    table.add_column("COPIES", overflow="fold")
    for checkpoint in checkpoints:
        word = safety(checkpoint)
        table.add_row(
            Text(_printable(str(checkpoint["path"]))),
            str(checkpoint["files"]),
            format_size(checkpoint["bytes"]),
            _age(checkpoint["closed_at"]),
            Text(word, style=WORD_STYLES[word]),
            _copies(checkpoint),
        )
    return table


def restorable(newest: Json) -> RenderableType:
    """Return which checkpoint each place could give back, should all faster ones be lost."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for place in COPIES:
        path = newest.get(place)
        if path is not None:
            table.add_row(f"newest in {place}:", _printable(str(path)))
    if not table.rows:
        table.add_row("no place holds a complete checkpoint")
    return Group(Text(), table)


def _age(closed_at: Any) -> str:
    if closed_at is None:
        return "-"
    if not isinstance(closed_at, int | float):
        return str(closed_at)
    seconds = max(0.0, time.time() - closed_at)
    if seconds < 86_400:
        return f"{format_duration(seconds)} ago"
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(closed_at))


def _copies(checkpoint: Json) -> Text:
    """Return the places with a copy; one that has only some of the files says how many."""
    words = []
    for place in COPIES:
        count = checkpoint["copies"].get(place)
        if has_copy(checkpoint, place):
            words.append(place)
        elif count:
            words.append(f"{place} {count}/{checkpoint['files']}")
    return Text(", ".join(words) or "none")


# --- status ----------------------------------------------------------------------------------


def status_view(status: Json, *, unicode: bool = True) -> RenderableType:
    """Return the whole status: first whether the newest checkpoint is safe, then why."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True, style="bold")
    facts.add_column(overflow="fold")
    for name, value in _facts(status):
        facts.add_row(name, value)
    for tier in status["tiers"]:
        facts.add_row(tier["name"].upper(), _tier(tier, unicode=unicode))
    newest = status["checkpoints"][:NEWEST_SHOWN]
    parts: list[RenderableType] = [headline(status), Text(), facts]
    return Group(*parts, Text(), checkpoint_table(newest)) if newest else Group(*parts)


def _facts(status: Json) -> Iterator[tuple[str, Text]]:
    state = Text(f"{_printable(status['mountpoint'])}: ")
    state.append(status["state"], style=STATE_STYLES.get(status["state"], ""))
    state.append(
        f", pid {status['pid']}, up {format_duration(status['uptime_s'])}", style="default"
    )
    state.append(f", fsync waits for: {_fsync(status['fsync'])}", style="default")
    yield "mount", state
    for reason in status["reasons"]:
        yield "", Text(_printable(reason), style="yellow")
    path = status["data_path"]
    why = status.get("data_path_reason")
    yield "data path", Text(path if path == "passthrough" or not why else f"{path}: {why}")
    yield from _store_facts(status["store"])
    mirror = status.get("mirror") or {"state": "off"}
    if mirror["state"] != "off":
        lag = f"{format_size(mirror['lag_bytes'])}, {format_duration(mirror['lag_s'])} behind"
        yield "mirror", Text(f"{mirror['peer']}: {mirror['state']}, {lag}")
    replicas = status.get("replicas") or {"files": 0}
    if replicas["files"]:
        kept = f"{files(replicas['files'])}, {format_size(replicas['bytes'])}"
        nodes = "1 node" if replicas["origins"] == 1 else f"{replicas['origins']} nodes"
        yield "replicas", Text(f"{kept} kept for {nodes}")
    missing = status.get("recovery", {}).get("missing_files", 0)
    if missing:
        yield "recovering", Text(f"{files(missing)} still to come", style="yellow")
    guarded = status.get("guarded") or {"files": 0}
    if guarded["files"]:
        size = format_size(guarded["bytes"])
        yield "kept", Text(f"{files(guarded['files'])} of deleted checkpoints, {size}")
    corrupt = status.get("recovery", {}).get("corrupt_copies", 0)
    if corrupt:
        yield "corrupt", Text(f"{corrupt} copies were found corrupt and dropped", style="red")


def _fsync(policy: str) -> str:
    return {"copy": "a second copy", "store": "the store", "ram": "nothing"}.get(policy, policy)


def _store_facts(store: Json) -> Iterator[tuple[str, Text]]:
    style = "green" if store["state"] == "ok" else "red"
    yield "store", Text(f"{_printable(store['url'])}: ").append(store["state"], style=style)
    if store["pending_files"]:
        oldest = store["oldest_pending_s"]
        since = f", oldest {format_duration(oldest)}" if oldest is not None else ""
        pending = f"{files(store['pending_files'])}, {format_size(store['pending_bytes'])}{since}"
        yield "pending", Text(pending, style="yellow")
    else:
        yield "pending", Text("nothing")
    retries = f", {store['retries']} retries" if store["retries"] else ""
    yield "stored", Text(f"{format_size(store['stored_bytes'])}{retries}")
    if store["last_error"]:
        yield "last error", Text(_printable(str(store["last_error"])), style="red")


def _tier(tier: Json, *, unicode: bool) -> Text:
    """Return a tier's bar: dirty, then the rest of what is used, then what is free."""
    budget, used, dirty = tier["budget_bytes"], tier["used_bytes"], tier["dirty_bytes"]
    full, half, free = ("█", "▒", "░") if unicode else ("#", "=", ".")
    used_cells = _cells(used, budget)
    dirty_cells = min(used_cells, _cells(dirty, budget))
    bar = Text(full * dirty_cells, style="yellow")
    bar.append(half * (used_cells - dirty_cells), style="green")
    bar.append(free * (BAR_CELLS - used_cells), style="dim")
    words = f" {format_size(used)} of {format_size(budget)}, {format_size(dirty)} dirty"
    return bar.append(words, style="default")


def _cells(count: int, budget: int) -> int:
    """Return how much of a bar `count` fills: never none for something, never all for less."""
    if count <= 0 or budget <= 0:
        return 0
    return max(1, min(BAR_CELLS, count * BAR_CELLS // budget))


def speaks_unicode(console: Console) -> bool:
    """Whether bars may be drawn with block characters."""
    return console.encoding.lower().startswith("utf")


# --- doctor ---------------------------------------------------------------------------------


def findings(checks: Sequence["Finding"]) -> RenderableType:
    """Return what the doctor found: a word, the fact, and below it what to do."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold", ratio=1)
    for check in checks:
        text = Text(_printable(check.text))
        if check.advice:
            text.append(f"\n{_printable(check.advice)}", style="yellow")
        table.add_row(Text(check.level, style=LEVEL_STYLES[check.level]), check.name, text)
    return table


# --- progress --------------------------------------------------------------------------------


@contextmanager
def transfer_progress(label: str) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield what takes the daemon's progress; draws a bar on a terminal, nothing elsewhere."""
    console = Console(stderr=True, highlight=False, markup=False)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, expand=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(label, total=None)

        def update(state: dict[str, Any]) -> None:
            bar.update(
                task,
                completed=state.get("done_bytes", 0),
                total=state.get("total_bytes"),
                description=_progress_words(label, state),
            )

        yield update


def _progress_words(label: str, state: dict[str, Any]) -> str:
    words = label
    if state.get("total_files"):
        words += f" {state.get('done_files', 0)}/{state['total_files']}"
    detail = state.get("reason") or state.get("current")
    return f"{words} {_printable(str(detail))[-40:]}" if detail else words
