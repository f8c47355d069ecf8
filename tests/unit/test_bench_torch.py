"""The benches of the torch helper run to their ends, and measure what was chosen."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.report import Results
from bench.stall import STOP, WHOLE, WHOLE_PART, add_whole, contenders

ROOT = Path(__file__).parents[2]


def ran(bench: str, output: Path, *options: object) -> dict[str, object]:
    command = [sys.executable, "-W", "ignore", ROOT / f"bench/{bench}.py", "--quick"]
    result = subprocess.run(
        [*command, "--repeats", "1", "--json", output, *options],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, object] = json.loads(output.read_text())
    return found


@pytest.mark.mounted
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount tmpfs")
@pytest.mark.parametrize(
    ("bench", "chosen", "cases"),
    [
        ("stall", "torch.save-disk,dcp.async_save-mount,helper-mount,guard-mount", 2),
        ("training", "store,lmstorfs", 1),
    ],
)
def test_quick_run_measures_all_that_was_chosen(
    tmp_path: Path, bench: str, chosen: str, cases: int
) -> None:
    output = tmp_path / "found.json"
    document = ran(bench, output, "--contenders", chosen, "--workdir", tmp_path)
    assert (document["bench"], document["not_run"]) == (bench, {})
    assert len(document["cases"]) == cases
    for case in document["cases"]:
        assert sorted(case["contenders"]) == sorted(chosen.split(","))
        assert not [entry for entry in case["contenders"].values() if "failed" in entry]
        assert all(entry["median_s"] > 0 for entry in case["contenders"].values())
    assert list(tmp_path.iterdir()) == [output]


def test_gpu_stall_runs_to_its_end_without_a_gpu(tmp_path: Path) -> None:
    document = ran("gpu_stall", tmp_path / "found.json", "--folder", tmp_path)
    rows = {row["way"]: row for row in document["rows"]}
    assert len(rows) == 5
    for row in rows.values():
        assert row["samples"] == 1
        assert row["written_s"] >= row["staged_s"] >= row["stopped_s"] > 0
    assert rows["the helper"]["host_bytes"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


def test_the_whole_time_becomes_a_case_of_its_own() -> None:
    chosen = contenders({})[:2]
    results = Results([STOP], chosen)
    for number, contender in enumerate(chosen):
        results.add(STOP, contender, 0.5, {WHOLE_PART: 10.0 + number})
        results.add(STOP, contender, 0.5, {WHOLE_PART: 20.0 + number})
    add_whole(results)
    assert [results.seconds(WHOLE, each.name) for each in chosen] == [15.0, 16.0]
    assert results.parts == {}
