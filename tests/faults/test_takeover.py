"""The daemon dies by `kill -9`; the keeper brings another, and no program notices."""

import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmstorfs.digest import digest_bytes, digest_file
from tests.mounting import Mount, mounted, wait_for

pytestmark = [
    pytest.mark.mounted,
    pytest.mark.skipif(
        os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs root and /dev/fuse"
    ),
]

KILLS = 20
WRITERS = 4
MIB = 1 << 20


def daemon_pid(mount: Mount) -> int | None:
    pids = mount.pids()
    return pids[1] if len(pids) > 1 else None


def kill_daemon(mount: Mount, last: int = 0) -> int:
    """Kill the daemon that is there, or comes after the one killed `last`; return its pid."""
    pid = wait_for(
        lambda: (found := daemon_pid(mount)) and found != last and found, "there is a daemon"
    )
    os.kill(pid, signal.SIGKILL)
    return int(pid)


def wait_for_another(mount: Mount, killed: int) -> None:
    wait_for(lambda: (daemon_pid(mount) or killed) != killed, "the keeper brought another daemon")
    mount.status()


@contextlib.contextmanager
def busy_writers(mount: Mount, seed: int) -> Iterator[dict[str, "subprocess.Popen[str]"]]:
    with contextlib.ExitStack() as stack:
        running: dict[str, subprocess.Popen[str]] = {}
        for number in range(WRITERS):
            name = f"writer-{number}"
            script = Path(__file__).with_name("busy_writer.py")
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(script), str(mount.path / name), str(seed + number)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
                )
            )
            stack.callback(process.kill)
            running[name] = process
        for process in running.values():
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        yield running


@pytest.mark.parametrize("data_path", ["auto", "userspace"])
def test_writers_notice_nothing_of_a_daemon_that_is_killed_again_and_again(
    tmp_path: Path, data_path: str
) -> None:
    seed = int(os.environ.get("LMSTORFS_TEST_SEED", "0")) or time.time_ns() % 1_000_000
    moments = random.Random(seed)
    options = ("--ram", "1G", "-o", f"data_path={data_path},flush_delay=0.05,restart_limit=1000")
    with mounted(tmp_path, *options) as mount:
        with busy_writers(mount, seed) as writers:
            killed = 0
            for _ in range(KILLS):
                time.sleep(moments.uniform(0, 1.0))  # the moment of the kill
                killed = kill_daemon(mount, killed)
            said = {
                name: process.communicate("\n", timeout=120) for name, process in writers.items()
            }
        for name, process in writers.items():
            assert process.returncode == 0, f"seed {seed}: {name}: {said[name][1]}\n{mount.log()}"
        assert mount.status()["recovery"]["daemon_restarts"] >= KILLS
        wanted = {
            f"{name}/{line.split(' ', 1)[1]}": line.split(" ", 1)[0]
            for name, (lines, _) in said.items()
            for line in lines.splitlines()
        }
        assert {path: digest_file(mount.path / path) for path in wanted} == wanted
        mount.sync()
        stored = {
            str(path.relative_to(mount.store)): digest_file(path)
            for path in mount.store.rglob("*")
            if path.is_file()
        }
        assert stored == wanted, f"seed {seed}"


def test_what_is_open_and_unlinked_lives_on_and_gives_its_memory_back(tmp_path: Path) -> None:
    with mounted(tmp_path, "--ram", "256M") as mount:
        path = mount.path / "scratch"
        content = os.urandom(40 * MIB)
        with path.open("w+b", buffering=0) as file:
            file.write(content)
            path.unlink()
            wait_for_another(mount, kill_daemon(mount))
            file.seek(0)
            assert digest_bytes(file.read()) == digest_bytes(content)
            assert mount.status()["tiers"][0]["used_bytes"] >= 40 * MIB
        ram = mount.state / "ram"
        wait_for(lambda: not list(ram.glob("[0-9]*")), "the tier's file is gone")
        free = os.statvfs(ram)  # a backing id that stayed would hold the memory
        assert (free.f_blocks - free.f_bfree) * free.f_frsize < MIB


def test_a_file_opened_again_after_a_takeover_shares_the_backing_of_the_first(
    tmp_path: Path,
) -> None:
    with mounted(tmp_path, "--ram", "256M") as mount, (mount.path / "model").open("wb") as first:
        first.write(b"a" * 5 * MIB)
        first.flush()
        wait_for_another(mount, kill_daemon(mount))
        with (mount.path / "model").open("r+b", buffering=0) as second:
            second.seek(5 * MIB)
            second.write(b"b" * MIB)
        first.write(b"c" * 100)  # goes on where it was
        first.flush()
        assert (mount.path / "model").read_bytes() == b"a" * 5 * MIB + b"c" * 100 + b"b" * (
            MIB - 100
        )


def test_reservations_go_on_after_a_takeover(tmp_path: Path) -> None:
    with mounted(tmp_path, "--ram", "1G") as mount, (mount.path / "model").open("wb") as file:
        file.write(b"a" * MIB)
        file.flush()
        wait_for_another(mount, kill_daemon(mount))
        for _ in range(400):
            file.write(b"b" * MIB)
        file.flush()
        used = wait_for(
            lambda: (found := mount.status()["tiers"][0]["used_bytes"]) > 401 * MIB and found,
            "room is reserved ahead of the writer",
        )
        assert used > 401 * MIB


def test_a_daemon_that_dies_too_often_stays_down_and_says_so(tmp_path: Path) -> None:
    with mounted(tmp_path, "--ram", "256M", "-o", "restart_limit=2,flush_delay=600") as mount:
        with (mount.path / "model").open("wb", buffering=0) as file:
            file.write(b"first" * MIB)
            first = kill_daemon(mount)
            wait_for_another(mount, first)
            kill_daemon(mount, first)
            wait_for((mount.state / "down").exists, "the keeper gave up")
            file.write(b"then" * MIB)
        with pytest.raises(OSError) as caught:  # noqa: PT011 - its errno is looked at
            (mount.path / "other").write_bytes(b"x")
        assert caught.value.errno == errno.EIO
        said = mount.run("status", mount.path)
        assert said.returncode == 1
        assert "died 2 times within a minute, at last: killed by signal 9" in said.stderr
        answer = mount.run("status", mount.path, "--json")
        assert answer.returncode == 1
        assert '"state": "down"' in answer.stdout
        ended = mount.run("unmount", mount.path)
        assert "what was not yet stored stays in the tiers" in ended.stderr
        assert mount.pids() == []
        mount.start()
        assert (mount.path / "model").read_bytes() == b"first" * MIB + b"then" * MIB
        mount.sync()
        assert (mount.store / "model").read_bytes() == b"first" * MIB + b"then" * MIB


def test_signals_reach_the_daemon_that_comes_after(tmp_path: Path) -> None:
    with mounted(tmp_path, "--ram", "64M", "-o", "flush_delay=600") as mount:
        (mount.path / "model").write_bytes(b"x" * 1000)
        keeper, daemon = mount.pids()[:2]
        os.kill(daemon, signal.SIGSTOP)
        os.kill(keeper, signal.SIGTERM)  # its daemon dies before it can act on this
        os.kill(daemon, signal.SIGKILL)
        wait_for(lambda: not mount.pids(), "keeper and daemon have ended")
        assert (mount.store / "model").read_bytes() == b"x" * 1000
