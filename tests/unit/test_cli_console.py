"""The tables fit 80 columns, lose nothing, and answer first what people come for."""

import io
import time
from typing import Any

import pytest
from rich.console import Console, RenderableType

from lmstorfs import console
from lmstorfs.units import GIB, MIB


def checkpoint(path: str, **changes: Any) -> dict[str, Any]:
    copies = {"ram": True, "ssd": False, "mirror": False, "store": True}
    base = {"path": path, "files": 9, "bytes": 14 * GIB, "complete": True, "copies": copies}
    return {**base, "closed_at": time.time() - 185, **changes}


def sample_status(**changes: Any) -> dict[str, Any]:
    store = {
        "url": "s3://a-bucket-with-a-long-name/experiments/2026/llama-405b/run-0007",
        "state": "unreachable",
        "pending_files": 1234,
        "pending_bytes": 900 * GIB,
        "stored_bytes": 3000 * GIB,
        "oldest_pending_s": 4000.0,
        "retries": 88,
        "last_error": "Could not connect to the endpoint URL: " + "http://store.internal/" * 4,
    }
    tier = {"name": "ram", "path": "/x", "budget_bytes": 64 * GIB}
    tiers = [
        {**tier, "used_bytes": 60 * GIB, "dirty_bytes": 20 * GIB},
        {**tier, "name": "ssd", "used_bytes": 0, "dirty_bytes": 0},
    ]
    base = {
        "mountpoint": "/mnt/very/deep/" + "checkpoints" * 3,
        "state": "degraded",
        "reasons": ["the store cannot be reached since 10:32; writes go on, retrying " * 2],
        "data_path": "userspace",
        "data_path_reason": "kernel 6.1 is older than 6.9, which brought FUSE passthrough " * 2,
        "pid": 4321,
        "uptime_s": 200_000.0,
        "fsync": "copy",
        "store": store,
        "tiers": tiers,
        "mirror": {"peer": "10.0.0.2:7001", "state": "lagging", "lag_bytes": MIB, "lag_s": 2.0},
        "recovery": {"corrupt_copies": 2},
        "checkpoints": [
            checkpoint("llama-405b/" + "global_step-" * 8 + f"{step}") for step in range(9)
        ],
    }
    return {**base, **changes}


def rendered(view: RenderableType, width: int = 80, encoding: str = "utf-8") -> str:
    buffer = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    target = Console(file=buffer, width=width, highlight=False, markup=False)
    target.print(view)
    buffer.flush()
    return buffer.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]


def test_the_status_fits_80_columns_and_loses_no_word() -> None:
    status = sample_status()
    text = rendered(console.status_view(status))
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    squeezed = "".join(text.split())
    for word in (status["mountpoint"], status["store"]["url"], status["store"]["last_error"]):
        assert "".join(word.split()) in squeezed
    for word in ("degraded", "unreachable", "1234 files", "88 retries", "20 GiB dirty", "lagging"):
        assert word in text
    assert text.count("3 min 5 s ago") == console.NEWEST_SHOWN


def test_the_status_of_an_idle_mount() -> None:
    store = {**sample_status()["store"], "state": "ok", "pending_files": 0, "last_error": None}
    view = console.status_view(
        sample_status(
            state="ready", reasons=[], store=store, checkpoints=[], data_path="passthrough"
        )
    )
    lines = rendered(view).splitlines()
    assert lines[0] == "no checkpoint has been written yet"
    assert "data path" in rendered(view)
    assert "kernel 6.1" not in rendered(view)


@pytest.mark.parametrize(
    ("changes", "word", "meaning"),
    [
        ({}, "stored", "the store has it"),
        (
            {"copies": {"ram": True, "mirror": True, "store": False}},
            "mirrored",
            "a second node has it, the store not yet",
        ),
        ({"copies": {"ram": 9, "store": 8}}, "written", "only this node has it"),
        ({"copies": {"ram": 9, "store": 9}}, "stored", "the store has it"),
        ({"complete": False}, "being written", "not complete"),
    ],
)
def test_the_first_line_says_how_safe_the_newest_checkpoint_is(
    changes: dict[str, Any], word: str, meaning: str
) -> None:
    newest = checkpoint("run/step-3", **changes)
    assert console.safety(newest) == word
    first = console.headline(sample_status(checkpoints=[newest])).plain
    assert first.startswith(f"newest checkpoint run/step-3 is {word}: {meaning}")


def test_copies_that_are_not_whole_are_counted() -> None:
    table = rendered(
        console.checkpoint_table([checkpoint("a", copies={"ram": 9, "ssd": 0, "store": 4})]), 100
    )
    assert "ram, store 4/9" in table


def test_checkpoints_fit_80_columns() -> None:
    text = rendered(console.checkpoint_table(sample_status()["checkpoints"]))
    assert max(map(len, text.splitlines())) <= 80
    assert text.splitlines()[0].split() == [
        "CHECKPOINT", "FILES", "SIZE", "CLOSED", "STATE", "COPIES",
    ]  # fmt: skip


def test_names_are_never_taken_for_markup_or_colours() -> None:
    path = "run/[bold]:smile:/step"
    view = console.status_view(sample_status(checkpoints=[checkpoint(path)]))
    assert path in rendered(view, 120)
    assert rendered(view, 120).splitlines()[0].startswith(f"newest checkpoint {path} is stored")


def test_names_that_are_not_utf8_are_shown() -> None:
    table = console.checkpoint_table([checkpoint("run\udcff")])
    assert "run\\udcff" in rendered(table, 120)
    assert console.headline({"checkpoints": [checkpoint("run\udcff")]}).plain.isprintable()


def test_bars_show_dirty_used_and_free() -> None:
    tier = {"name": "ram", "budget_bytes": 24, "used_bytes": 12, "dirty_bytes": 6}
    bar = console._tier(tier, unicode=False).plain.split()[0]
    assert bar == "#" * 6 + "=" * 6 + "." * 12
    over = {**tier, "used_bytes": 999, "dirty_bytes": 999}
    assert console._tier(over, unicode=False).plain.split()[0] == "#" * 24
    little = {**tier, "budget_bytes": 10**9, "used_bytes": 2, "dirty_bytes": 1}
    assert console._tier(little, unicode=False).plain.startswith("#.")


def test_a_terminal_without_unicode_gets_plain_bars() -> None:
    view = console.status_view(sample_status(), unicode=False)
    assert "#" in rendered(view, encoding="ascii")


def test_progress_off_a_terminal_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with console.transfer_progress("storing") as update:
        update({"done_bytes": 1, "total_bytes": 2, "done_files": 0, "total_files": 1})
        update({"reason": "the store cannot be reached"})
    assert capfd.readouterr() == ("", "")


def test_what_each_place_could_give_back_is_told() -> None:
    text = rendered(console.restorable({"ram": "run/step-30", "ssd": None, "store": "run/step-20"}))
    assert text.split("\n")[1:3] == [
        "newest in ram:    run/step-30",
        "newest in store:  run/step-20",
    ]
    assert "no place holds a complete checkpoint" in rendered(console.restorable({"ram": None}))
