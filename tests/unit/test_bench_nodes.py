"""The benches of several nodes: what they compute, their helpers, and that each of them runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import xxhash

from bench.loader import digest_of
from bench.mirror import REPLICATIONS, WRITES, Content, cases
from bench.nodes import CONNECTED
from bench.recovery import GOALS, RCLONE, add_with_mount
from bench.report import MILLISECONDS, Comparison, Results, judge, to_json
from bench.turns import Turn, measure
from bench.workloads import Case, no_case
from lmstorfs.units import GIB, MIB
from tests.unit.test_bench_write import Ballast, contender

ROOT = Path(__file__).parents[2]
LOAD = Case("torch.load", "torch.load", GIB, no_case)


def recovery_results(**seconds: float) -> Results:
    names = ["ram", "mirror", "mirror-mount", "store", "store-mount", *RCLONE]
    results = Results([LOAD], [contender(name) for name in names])
    for name, value in seconds.items():
        results.add(LOAD, contender(name.replace("_", "-")), value)
    return results


def test_recovery_is_judged_over_the_fastest_form_of_the_traditional_way():
    results = recovery_results(ram=0.5, mirror=3.0, store=12.0, rclone=20, rclone_unverified=12)
    verdicts = {verdict["of"]: verdict for verdict in judge(results, GOALS)}
    assert [verdicts[name]["met"] for name in ("ram", "mirror", "store")] == [True, True, True]
    results.add(LOAD, contender("rclone-tuned"), 11.0)
    verdicts = {verdict["of"]: verdict for verdict in judge(results, GOALS)}
    assert [verdicts[name]["met"] for name in ("ram", "mirror", "store")] == [False, False, False]


def test_the_mount_is_added_sample_by_sample():
    results = recovery_results()
    for load, mount in ((1.0, 5.0), (2.0, 1.0), (3.0, 0.5)):
        results.add(LOAD, contender("mirror"), load, {"lmstorfs mount, before": mount})
    add_with_mount(results)
    assert results.samples["torch.load", "mirror-mount"] == [6.0, 3.0, 3.5]
    assert ("torch.load", "store-mount") not in results.samples


def test_a_row_that_is_a_sum_has_no_figure_where_a_turn_failed():
    results = recovery_results()
    results.add(LOAD, contender("mirror"), 1.0, {"lmstorfs mount, before": 1.0})
    results.failures["torch.load", "mirror"] = "no mirror"
    add_with_mount(results)
    assert results.seconds(LOAD, "mirror-mount") is None


def test_parts_are_told_beside_the_whole_and_comparisons_name_whose_they_are():
    results = recovery_results(rclone=10.0)
    results.add(LOAD, contender("ram"), 2.0, {"fsync": 0.5})
    results.add(LOAD, contender("ram"), 4.0, {"fsync": 0.7})
    over = Comparison("rclone", ["rclone"], "ram")
    assert results.part_seconds(LOAD, "ram", "fsync") == pytest.approx(0.6)
    (case,) = to_json(results, [over], [], {})["cases"]
    assert case["contenders"]["ram"]["parts"] == {"fsync": [0.5, 0.7]}
    assert "parts" not in case["contenders"]["rclone"]
    assert case["ratios"] == {"ram / rclone": pytest.approx(10 / 3)}
    assert MILLISECONDS.of(LOAD, 0.25) == 250


def test_who_has_no_part_in_a_case_takes_no_turn():
    results = Results([LOAD], [contender("lmstorfs"), contender("tmpfs")])
    told = []

    def prepare(_case, who):
        turn = Turn(lambda: 1.0, lambda: told.append("cleaned"), lambda: told.append("settled"))
        return turn if who.name == "lmstorfs" else None

    measure(results, prepare, 2, Ballast(0), quiet_timeout_s=0, warm_up=[])
    assert results.samples == {("torch.load", "lmstorfs"): [1.0, 1.0]}
    assert told == ["cleaned", "settled"] * 2


def test_a_turn_that_fails_is_cleaned_up_and_told():
    results = Results([LOAD], [contender("lmstorfs")])
    told = []

    def fail() -> float:
        raise OSError("no such device")

    turn = Turn(fail, lambda: told.append("cleaned"))
    measure(results, lambda *_: turn, 2, Ballast(0), quiet_timeout_s=0)
    assert results.failures == {("torch.load", "lmstorfs"): "no such device"}
    assert told == ["cleaned"]


def test_all_cases_of_the_mirror_are_judged():
    named = {case.name: case for case in cases(quick=False)}
    assert named.keys() == {*REPLICATIONS, *WRITES}
    assert {case.total for case in named.values()} == {2 * GIB}
    assert not any("," in name for name in named)  # --cases has commas between


def test_an_origins_connection_is_found_in_the_mirrors_log():
    line = "timestamp={} level=info event=connected peer=10.0.0.1:4 origin=ab purpose={}\n"
    log = line.format("2026-01-01T00:00:00.000001Z", "read")
    assert CONNECTED.search(log) is None
    log += line.format("2026-01-01T00:00:01.500000Z", "replicate")
    assert CONNECTED.findall(log) == ["2026-01-01T00:00:01.500000Z"]


@pytest.mark.parametrize("how", ["map", "splice"])
def test_the_bare_transfer_brings_the_bytes_whatever_the_files_they_come_from(tmp_path, how):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    sent = Content(3, 2 * MIB)
    sent.write(source)
    command = [sys.executable, ROOT / "bench/bare.py"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    words = ["receive", "127.0.0.1", target, "2", str(3 * MIB), how]
    with subprocess.Popen([*command, *words], **pipes) as receiver:
        port = receiver.stdout.readline().split()[1]
        words = ["send", "127.0.0.1", port, *sent.paths(source)]
        with subprocess.Popen([*command, *words], **pipes) as sender:
            assert sender.stdout.readline() == "ready\n"
            began = float(sender.communicate("go\n", timeout=60)[0])
        assert float(receiver.communicate(timeout=60)[0]) > began
    whole = b"".join(path.read_bytes() for path in sent.paths(source))
    assert b"".join(path.read_bytes() for path in sorted(target.iterdir())) == whole


@pytest.mark.parametrize("how", ["copy", "mmap"])
def test_the_loader_proves_what_it_loaded(tmp_path, how):
    state = {"b": torch.arange(1000), "a": torch.ones(7, 3)}
    torch.save(state, tmp_path / "model.pt")
    size, digest = digest_of(state)
    assert size == 8000 + 84
    content = state["a"].numpy().tobytes() + state["b"].numpy().tobytes()
    assert digest == xxhash.xxh3_128_hexdigest(content)
    done = subprocess.run(
        [sys.executable, ROOT / "bench/loader.py", how],
        input=f"{tmp_path / 'model.pt'}\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    ready, said = done.stdout.splitlines()
    began, ended, *proof = said.split()
    assert ready == "ready"
    assert float(ended) > float(began)
    assert proof == [str(size), digest]


@pytest.mark.mounted
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount tmpfs")
@pytest.mark.parametrize(
    ("bench", "chosen"),
    [
        ("mirror", ["--cases", "one file afterwards,write 16 MiB"]),
        ("recovery", ["--cases", "torch.load", "--contenders", "ram,killed,mirror,tmpfs"]),
        ("fsync", ["--cases", "save 1 MiB", "--contenders", "lmstorfs,directory,disk"]),
    ],
)
def test_quick_run_measures_all_that_was_chosen(tmp_path, bench, chosen):
    output = tmp_path / "found.json"
    command = [sys.executable, ROOT / f"bench/{bench}.py", "--quick", "--repeats", "1", *chosen]
    result = subprocess.run(
        [*command, "--workdir", tmp_path, "--json", output],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    document = json.loads(output.read_text())
    assert document["bench"] == bench
    assert document["not_run"] == {}
    assert len(document["cases"]) == len(chosen[1].split(","))
    for case in document["cases"]:
        assert case["contenders"]
        assert not [entry for entry in case["contenders"].values() if "failed" in entry]
        assert all(entry["median_s"] > 0 for entry in case["contenders"].values())
    assert list(tmp_path.iterdir()) == [output]
