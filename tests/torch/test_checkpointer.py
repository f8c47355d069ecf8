"""What `Checkpointer` promises: the state at the call, whole files, bounded memory, no silence."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lmstorfs.errors import PoolFullError, SaveError, SetupError
from lmstorfs.torch import Checkpointer, SaveHandle
from lmstorfs.torch.writing import FileWriter
from tests.mounting import wait_for

MIB = 1 << 20
LAYER = 300  # 300 by 300 floats: more than what is copied as text


def model() -> torch.nn.Module:
    layers = [torch.nn.Linear(LAYER, LAYER), torch.nn.BatchNorm1d(LAYER)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(LAYER, LAYER))


def trained(network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    network(torch.randn(8, LAYER)).square().mean().backward()
    optimizer.step()


def state_of(network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}


def copy_of(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: copy_of(value) for key, value in state.items()}
    return state


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    return bool(one == other)


@pytest.fixture
def held_writes(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let no file be written until the event is set."""
    may_go = threading.Event()
    run = FileWriter.run

    def later(writer: FileWriter) -> None:
        assert may_go.wait(60)
        run(writer)

    monkeypatch.setattr(FileWriter, "run", later)
    return may_go


# --- the state at the call -----------------------------------------------------------------------


def test_what_changes_right_after_save_is_not_in_the_file(
    tmp_path: Path, held_writes: threading.Event
) -> None:
    state = {"big": torch.rand(3 * MIB), "small": torch.rand(3), "step": 7, "list": [1]}
    wanted = copy_of(state)
    with Checkpointer() as checkpointer:
        handle = checkpointer.save(state, tmp_path / "a.pt")
        state["big"].zero_()
        state["small"].zero_()
        state["list"].append(2)
        handle.staged(1)
        assert not handle.done
        assert not (tmp_path / "a.pt").exists()
        held_writes.set()
    assert equal(torch.load(tmp_path / "a.pt", weights_only=True), {**wanted, "list": [1]})


def test_with_guard_a_step_right_after_save_waits_for_it(
    tmp_path: Path, held_writes: threading.Event
) -> None:
    network = model()
    optimizer = torch.optim.AdamW(network.parameters())
    trained(network, optimizer)
    with Checkpointer(max_host_memory=MIB) as checkpointer:
        checkpointer.guard(optimizer)
        wanted = copy_of(state_of(network, optimizer))
        handle = checkpointer.save(state_of(network, optimizer), tmp_path / "a.pt")
        with pytest.raises(TimeoutError, match=r"a\.pt is not staged after 0\.1 s"):
            handle.staged(0.1)
        network(torch.randn(8, LAYER)).square().mean().backward()  # changes buffers
        threading.Timer(0.2, held_writes.set).start()
        optimizer.step()
        handle.staged(0)
    assert not equal(state_of(network, optimizer)["model"], wanted["model"])
    assert equal(torch.load(tmp_path / "a.pt", weights_only=True), wanted)


def test_the_end_of_a_guard_waits_for_what_it_guards(
    tmp_path: Path, held_writes: threading.Event
) -> None:
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    wanted = copy_of(network.state_dict())
    with Checkpointer() as checkpointer:
        end = checkpointer.guard(optimizer)
        checkpointer.save(network.state_dict(), tmp_path / "a.pt")
        threading.Timer(0.1, held_writes.set).start()
        end()
        for parameter in network.parameters():
            parameter.data.zero_()
        checkpointer.save(network.state_dict(), tmp_path / "b.pt").staged(0)
    assert equal(torch.load(tmp_path / "a.pt", weights_only=True), wanted)


def test_memory_that_is_promised_is_not_copied(
    tmp_path: Path, held_writes: threading.Event
) -> None:
    state = {"big": torch.rand(3 * MIB)}
    with Checkpointer(max_host_memory=MIB) as checkpointer:
        handle = checkpointer.save(state, tmp_path / "a.pt", in_place=True)
        assert checkpointer.held_bytes == 0
        with pytest.raises(TimeoutError):
            handle.staged(0.05)
        held_writes.set()
        handle.staged(60)
        handle.written(60)
    assert equal(torch.load(tmp_path / "a.pt", weights_only=True), state)


# --- memory --------------------------------------------------------------------------------------


def test_a_state_passes_through_a_pool_that_is_smaller(tmp_path: Path) -> None:
    state = {"big": torch.rand(5 * MIB)}
    with Checkpointer(max_host_memory=2 * MIB, chunk_bytes=MIB) as checkpointer:
        checkpointer.save(state, tmp_path / "a.pt")
        assert checkpointer.held_bytes == 2 * MIB
    assert equal(torch.load(tmp_path / "a.pt", weights_only=True), state)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_stays_under_its_bound_and_nothing_leaks_over_200_saves(tmp_path: Path) -> None:
    state = {f"layer-{number}": torch.rand(MIB // 8) for number in range(64)}  # 32 MiB
    with Checkpointer(max_host_memory=8 * MIB, chunk_bytes=2 * MIB) as checkpointer:
        for _ in range(20):
            checkpointer.save(state, tmp_path / "a.pt")
        checkpointer.wait()
        gc.collect()
        before, descriptors = resident_bytes(), len(names(Path("/proc/self/fd")))
        most = 0
        for _ in range(200):
            checkpointer.save(state, tmp_path / "a.pt")
            most = max(most, resident_bytes())
        checkpointer.wait()
        assert checkpointer.held_bytes == 8 * MIB
        assert most - before < 8 * MIB
        assert len(names(Path("/proc/self/fd"))) == descriptors
        assert threading.active_count() < 10
    assert names(tmp_path) == ["a.pt"]


def test_a_pool_that_stays_full_is_told_with_the_path(
    tmp_path: Path, held_writes: threading.Event
) -> None:
    checkpointer = Checkpointer(max_host_memory=MIB, chunk_bytes=MIB, pool_timeout_s=0.1)
    with pytest.raises(PoolFullError, match=r"a\.pt: no staging memory came free within 0 s"):
        checkpointer.save({"big": torch.rand(MIB)}, tmp_path / "a.pt")
    held_writes.set()
    checkpointer.save({"small": torch.rand(3)}, tmp_path / "b.pt")
    checkpointer.close()
    assert names(tmp_path) == ["b.pt"]


# --- failures ------------------------------------------------------------------------------------


def full_disk(folder: Path, size: str = "1M") -> Callable[[], object]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], check=True)
    return lambda: subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a tmpfs")
@pytest.mark.parametrize("told_by", ["save", "wait", "close", "handle"])
def test_a_failed_write_is_raised_once_with_its_path(tmp_path: Path, told_by: str) -> None:
    unmount = full_disk(tmp_path / "full")
    path = tmp_path / "full" / "a.pt"
    try:
        checkpointer = Checkpointer()
        checkpointer.save({"old": torch.rand(3)}, path).written(60)
        handle = checkpointer.save({"big": torch.rand(MIB)}, path)
        wait_for(lambda: handle.done, "the write ended")
        calls: dict[str, Callable[[], object]] = {
            "save": lambda: checkpointer.save({}, tmp_path / "b.pt"),
            "wait": checkpointer.wait,
            "close": checkpointer.close,
            "handle": handle.written,
        }
        with pytest.raises(SaveError, match=rf"{path}: No space left on device"):
            calls[told_by]()
        checkpointer.close()
        assert list(torch.load(path, weights_only=True)) == ["old"]
        assert names(path.parent) == ["a.pt"]
    finally:
        unmount()


@pytest.mark.parametrize(
    ("where", "why"),
    [("no/such/a.pt", "No such file or directory"), ("folder", "Is a directory")],
)
def test_a_bad_path_is_told_by_save_itself(tmp_path: Path, where: str, why: str) -> None:
    (tmp_path / "folder").mkdir()
    with Checkpointer() as checkpointer, pytest.raises(SaveError, match=f"{where}: {why}"):
        checkpointer.save({}, tmp_path / where)
    assert names(tmp_path) == ["folder"]


def test_an_object_that_cannot_be_pickled_leaves_nothing(tmp_path: Path) -> None:
    with Checkpointer() as checkpointer:
        with pytest.raises(AttributeError, match="local object"):
            checkpointer.save({"x": lambda: None}, tmp_path / "a.pt")
        with pytest.raises(ValueError, match="format='tar': it is one of torch, safetensors"):
            checkpointer.save({}, tmp_path / "a.pt", format="tar")
    assert names(tmp_path) == []


def test_two_saves_to_one_path_come_in_their_order(
    tmp_path: Path, held_writes: threading.Event
) -> None:
    with Checkpointer() as checkpointer:
        for number in range(5):
            checkpointer.save({"number": number}, tmp_path / "a.pt")
        held_writes.set()
    assert torch.load(tmp_path / "a.pt", weights_only=True) == {"number": 4}
    assert names(tmp_path) == ["a.pt"]


def test_modes_and_links_stay(tmp_path: Path) -> None:
    (tmp_path / "real.pt").write_bytes(b"old")
    (tmp_path / "real.pt").chmod(0o640)
    (tmp_path / "last.pt").symlink_to("real.pt")
    with Checkpointer() as checkpointer:
        checkpointer.save({"a": 1}, tmp_path / "last.pt")
    assert (tmp_path / "last.pt").is_symlink()
    assert (tmp_path / "real.pt").stat().st_mode & 0o777 == 0o640
    assert torch.load(tmp_path / "real.pt", weights_only=True) == {"a": 1}


def test_levels_need_a_mount(tmp_path: Path) -> None:
    with Checkpointer() as checkpointer:
        handle = checkpointer.save({}, tmp_path / "a.pt")
        for wait in (handle.stored, handle.mirrored):
            with pytest.raises(SetupError, match=r"a\.pt is in no lmstorfs mount"):
                wait(60)


# --- processes -----------------------------------------------------------------------------------


KILLED = """
import os, signal, sys, torch
from lmstorfs.torch import Checkpointer
checkpointer = Checkpointer()
checkpointer.save({"number": 1}, sys.argv[1]).written()
from lmstorfs.torch import writing
writing.os.write = lambda fd, view: (os.writev(fd, [view[:9]]), os.kill(os.getpid(), 9))
checkpointer.save({"number": 2}, sys.argv[1]).written()
"""

LEFT = """
import sys, torch
from lmstorfs.torch import Checkpointer
Checkpointer().save({"big": torch.ones(8 << 20)}, sys.argv[1])
"""

FORKED = """
import os, sys, torch
from lmstorfs.torch import Checkpointer
checkpointer = Checkpointer(max_host_memory=1 << 20, chunk_bytes=1 << 20)
checkpointer.save({"big": torch.ones(8 << 20)}, sys.argv[1])
child = os.fork()
if not child:
    torch.set_num_threads(1)  # as a data loader's workers do: OpenMP's threads did not come along
    checkpointer.wait()
    checkpointer.save({"child": torch.ones(1 << 20)}, sys.argv[1] + "-child")
    checkpointer.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
checkpointer.close()
"""


def python(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_a_killed_process_leaves_the_old_file_and_the_next_save_cleans_up(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    assert python(KILLED, path).returncode == -signal.SIGKILL
    assert torch.load(path, weights_only=True) == {"number": 1}
    (left,) = {*names(tmp_path)} - {"a.pt"}
    assert left.startswith(".a.pt.")
    assert left.endswith(".tmp")
    with Checkpointer() as checkpointer:
        checkpointer.save({"number": 3}, path)
    assert names(tmp_path) == ["a.pt"]


def test_nothing_is_lost_at_the_interpreters_end(tmp_path: Path) -> None:
    done = python(LEFT, tmp_path / "a.pt")
    assert (done.returncode, done.stderr) == (0, "")
    assert torch.load(tmp_path / "a.pt", weights_only=True)["big"].sum() == 8 << 20


def test_a_forked_worker_does_not_hang(tmp_path: Path) -> None:
    done = python(FORKED, tmp_path / "a.pt")
    assert (done.returncode, done.stderr) == (0, "")
    assert torch.load(tmp_path / "a.pt", weights_only=True)["big"].sum() == 8 << 20
    assert torch.load(f"{tmp_path}/a.pt-child", weights_only=True)["child"].sum() == 1 << 20


def test_a_handle_says_when_it_is_late(tmp_path: Path, held_writes: threading.Event) -> None:
    with Checkpointer() as checkpointer:
        handle: SaveHandle = checkpointer.save({}, tmp_path / "a.pt")
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"a\.pt is not written after 0\.05 s"):
            handle.written(0.05)
        assert time.monotonic() - began >= 0.05
        held_writes.set()
        handle.written(60)
