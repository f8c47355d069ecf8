"""The commands on a real mount, from the first to the last."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmstorfs import mounts
from lmstorfs.errors import SetupError
from lmstorfs.mounts import is_mounted, lock_held, lock_pid

pytestmark = [
    pytest.mark.mounted,
    pytest.mark.skipif(
        os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs root and /dev/fuse"
    ),
]

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "lmstorfs.cli", *map(str, words)]


@pytest.fixture
def mountpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("LMSTORFS_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("LMSTORFS_CONFIG", str(tmp_path / "none.toml"))
    path = tmp_path / "mnt"
    path.mkdir()
    yield path
    run("unmount", path, "--no-drain")
    state = tmp_path / "state"
    if pid := (lock_held(state) and lock_pid(state)):
        os.kill(pid, signal.SIGKILL)
    for target in (str(path), str(state / "ram")):
        while mounts.mounted_at(target):
            mounts.detach(target)


def run(*words: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command(*words), capture_output=True, text=True, timeout=120, check=False)


def mount(path: Path, *more: object) -> "subprocess.CompletedProcess[str]":
    return run("mount", path, "--ram", "64M", "--state", path.parent / "state", *more)


def test_from_mount_to_unmount(mountpoint: Path) -> None:
    done = mount(mountpoint)
    assert (done.returncode, done.stderr) == (0, "")
    state = mountpoint.parent / "state"
    assert done.stdout.startswith(f"mounted {mountpoint} (store {state}/store, RAM 64 MiB, ")
    assert done.stdout.count("\n") == 1

    (mountpoint / "run" / "step-1").mkdir(parents=True)
    (mountpoint / "run" / "step-1" / "model").write_bytes(b"x" * 100_000)
    done = run("sync", mountpoint / "run")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"stored: the store has all of {mountpoint}/run (waited for ")

    status = json.loads(run("status", "--json").stdout)
    assert status["mountpoint"] == str(mountpoint)
    assert status["store"]["pending_files"] == 0
    table = run("status", mountpoint / "run").stdout
    assert table.startswith("newest checkpoint run/step-1 is stored: the store has it")
    assert "run/step-1" in run("checkpoints").stdout

    done = mount(mountpoint)
    assert done.returncode == 1
    assert "is already mounted" in done.stderr

    done = run("unmount", mountpoint)
    assert (done.returncode, done.stdout) == (0, f"unmounted {mountpoint}\n")
    assert not is_mounted(str(mountpoint))
    assert (state / "store" / "run" / "step-1" / "model").stat().st_size == 100_000


def test_the_latest_checkpoint_is_the_newest_complete_one(mountpoint: Path) -> None:
    assert mount(mountpoint, "-o", "flush_delay=0.05").returncode == 0
    done = run("latest", mountpoint)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"lmstorfs: there is no complete checkpoint in {mountpoint}; see lmstorfs checkpoints\n"
    )
    odd = os.fsdecode(b"run-b\xff/step_1")
    for path in ("run-a/step_10/model.pt", "run-a/step_9/model.pt", f"{odd}/model.pt"):
        (mountpoint / path).parent.mkdir(parents=True)
        (mountpoint / path).write_bytes(b"weights")
        assert run("sync", mountpoint).returncode == 0
    (mountpoint / "train.log").write_bytes(b"loss 0.1")
    assert run("sync", mountpoint).returncode == 0
    (mountpoint / "run-a" / "step_11").mkdir()
    with (mountpoint / "run-a" / "step_11" / "model.pt").open("wb", buffering=0) as writer:
        writer.write(b"half of the wei")
        answer = subprocess.run(command("latest", mountpoint), capture_output=True, check=True)
        assert answer.stdout == os.fsencode(mountpoint / odd) + b"\n"
        # The last one that was written, and not the one with the largest number.
        assert run("latest", mountpoint / "run-a").stdout == f"{mountpoint}/run-a/step_9\n"
    assert run("sync", mountpoint).returncode == 0
    assert run("latest", mountpoint).stdout == f"{mountpoint}/run-a/step_11\n"


def test_after_the_death_of_daemon_and_keeper_mount_takes_over(mountpoint: Path) -> None:
    assert mount(mountpoint, "-o", "flush_delay=600").returncode == 0
    (mountpoint / "precious").write_bytes(b"x" * 100_000)
    state = mountpoint.parent / "state"
    daemon = mounts.only_mount().pid
    keeper = lock_pid(state)
    assert keeper is not None
    for pid in (keeper, daemon):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not lock_held(state))
    done = run("status")
    assert done.returncode == 1
    assert "is not running; run `lmstorfs mount" in done.stderr
    done = mount(mountpoint)
    assert done.returncode == 0, done.stderr
    assert done.stderr == (
        f"lmstorfs: the daemon that served {mountpoint} is dead; its mount is taken away\n"
    )
    assert (mountpoint / "precious").read_bytes() == b"x" * 100_000


def test_in_the_foreground_a_signal_unmounts(mountpoint: Path) -> None:
    words = command("mount", mountpoint, "--ram", "64M", "--state", mountpoint.parent / "state")
    with subprocess.Popen([*words, "--foreground"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("mounted ")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert not is_mounted(str(mountpoint))


@pytest.mark.parametrize("words", [("sync",), ("unmount",)])
def test_ctrl_c_leaves_the_mount_as_it_is(
    mountpoint: Path, words: tuple[str, ...], tmp_path: Path
) -> None:
    assert mount(mountpoint).returncode == 0
    keeper = lock_pid(tmp_path / "state")
    daemon = mounts.only_mount().pid
    os.kill(daemon, signal.SIGSTOP)  # so that the command has something to wait for
    try:
        with subprocess.Popen(
            command(*words, mountpoint), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            wait_for(lambda: connected(process.pid))
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=60) == ("", "")
            assert process.returncode == 130
    finally:
        os.kill(daemon, signal.SIGCONT)
    assert is_mounted(str(mountpoint))
    assert lock_pid(tmp_path / "state") == keeper
    assert run("status").returncode == 0


def connected(pid: int) -> bool:
    """Whether a process has a socket open."""
    links = (str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir())
    try:
        return any(link.startswith("socket:") for link in links)
    except FileNotFoundError:  # one was closed meanwhile
        return False


def wait_for(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 30
    while not condition():
        if time.monotonic() > give_up:
            raise SetupError("it never came true")
        time.sleep(0.02)
