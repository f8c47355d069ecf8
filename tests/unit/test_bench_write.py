"""The write benchmark runs, reports what it could not run, and judges by medians."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.contenders import CannotStartError, Contender, Target, Workspace, workspace
from bench.machine import Ballast, describe, tag
from bench.report import Comparison, Goal, Results, judge, to_json
from bench.turns import measure, start_all, writing
from bench.workloads import Case, stream_case, writers_case
from lmstorfs.units import GIB, KIB, MIB

ROOT = Path(__file__).parents[2]
TMPFS = Comparison("private tmpfs", ["tmpfs"])


def contender(name, start=None):
    return Contender(name, name, start or (lambda place, stack: Target(place.folder(name), "none")))


def never_timed(_directory):
    raise AssertionError


@pytest.fixture
def results():
    case = Case("stream 1 MiB", "1 MiB", GIB, never_timed)
    return Results([case], [contender("lmstorfs"), contender("tmpfs"), contender("rclone")])


def add(results, name, *samples):
    for seconds in samples:
        results.add(results.cases[0], contender(name), seconds)


def test_the_median_of_the_samples_counts(results):
    add(results, "lmstorfs", 0.1, 0.2, 9.0)
    add(results, "tmpfs", 0.1, 0.1, 0.1)
    assert results.speed(results.cases[0], "lmstorfs") == pytest.approx(5)
    assert results.ratio(results.cases[0], TMPFS) == pytest.approx(0.5)


def test_of_several_forms_of_a_rival_the_fastest_is_compared(results):
    add(results, "lmstorfs", 1.0)
    add(results, "tmpfs", 0.5)
    add(results, "rclone", 4.0)
    forms = Comparison("either", ["rclone", "tmpfs"])
    assert results.ratio(results.cases[0], forms) == pytest.approx(0.5)


def test_a_target_that_was_not_measured_is_not_met(results):
    add(results, "lmstorfs", 0.1)
    (verdict,) = judge(results, [Goal(TMPFS, 0.9, ["stream 1 MiB"])])
    assert verdict["ratio"] is None
    assert not verdict["met"]


def test_a_target_is_met_at_its_bound(results):
    add(results, "lmstorfs", 1.0)
    add(results, "tmpfs", 0.5)
    goals = [Goal(TMPFS, 0.5, ["stream 1 MiB"]), Goal(TMPFS, 0.51, ["stream 1 MiB"])]
    assert [verdict["met"] for verdict in judge(results, goals)] == [True, False]


def test_a_failed_case_has_no_speed_though_some_turns_went_well(results):
    add(results, "tmpfs", 0.5)
    results.failures["stream 1 MiB", "tmpfs"] = "No space left on device"
    assert results.speed(results.cases[0], "tmpfs") is None
    document = to_json(results, [TMPFS], [], {})
    assert document["cases"][0]["contenders"]["tmpfs"]["failed"] == "No space left on device"


def test_a_contender_that_cannot_start_is_left_out_and_the_others_are_measured(tmp_path):
    def start(_place: Workspace, _stack: object) -> Target:
        raise CannotStartError("rclone: no such device")

    case = stream_case(4 * KIB, 1 * MIB)
    results = Results([case], [contender("tmpfs"), contender("rclone", start)])
    with workspace(tmp_path, MIB) as place, ExitStack() as stack:
        targets = start_all(results.contenders, place, stack, results)
        measure(results, writing(targets), 3, Ballast(0), quiet_timeout_s=0)
        assert list(targets["tmpfs"].directory.iterdir()) == []
    assert results.not_run == {"rclone": "rclone: no such device"}
    assert len(results.samples["stream 4 KiB", "tmpfs"]) == 3
    assert list(tmp_path.iterdir()) == []


def test_writers_at_once_each_write_their_own_file(tmp_path):
    timed = writers_case(4 * MIB).prepare(tmp_path)
    assert timed() > 0
    assert sorted(path.stat().st_size for path in tmp_path.iterdir()) == [4 * MIB] * 4


def test_a_missing_writer_is_a_failure_and_not_a_time(tmp_path):
    timed = writers_case(1 * MIB).prepare(tmp_path / "missing")
    with pytest.raises(OSError, match="writer"):
        timed()


def test_the_machine_is_described_without_its_name(tmp_path):
    host = os.uname().nodename
    described = json.dumps(describe(tmp_path))
    assert tag().startswith("linux-")
    assert len(host) < 4 or (host not in described and host not in tag())


@pytest.mark.mounted
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount tmpfs")
def test_quick_run_writes_the_keys_that_readers_rely_on(tmp_path):
    output = tmp_path / "write.json"
    command = [sys.executable, ROOT / "bench/write.py", "--quick", "--repeats", "1"]
    command += ["--contenders", "lmstorfs,lmstorfs-userspace,tmpfs,shm,disk"]
    result = subprocess.run(
        [*command, "--workdir", tmp_path, "--json", output],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    document = json.loads(output.read_text())
    keys = {"bench", "quick", "repeats", "machine", "notes", "settings", "not_run", "cases"}
    assert keys | {"targets", "turns", "noisy_turns", "ballast_bytes"} == document.keys()
    assert {"kernel", "cpu", "cores", "ram", "python", "torch"} <= document["machine"].keys()
    assert document["not_run"] == {}
    assert [case["case"] for case in document["cases"]][:2] == ["stream 4 KiB", "stream 64 KiB"]
    for case in document["cases"]:
        assert {"case", "bytes", "contenders", "ratios"} == case.keys()
        assert all(entry["gib_per_s"] > 0 for entry in case["contenders"].values())
        assert case["ratios"]["private tmpfs"] > 0
    assert {"case", "of", "over", "at_least", "ratio", "met"} == document["targets"][0].keys()
    assert list(tmp_path.iterdir()) == [output]
