"""Keeper and daemon die by `kill -9`: what a close or an fsync acknowledged comes to the store."""

import contextlib
import errno
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmstorfs.digest import digest_file
from lmstorfs.mounts import lock_held
from lmstorfs.store.keys import TEMPORARY_PREFIX
from tests.mounting import Mount, mounted, wait_for

pytestmark = [
    pytest.mark.mounted,
    pytest.mark.skipif(
        os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs root and /dev/fuse"
    ),
]

KILLS = 10
DEAD = {errno.ENOTCONN, errno.ECONNABORTED, errno.EIO}


@contextlib.contextmanager
def saver(mount: Mount, log: Path, seed: int) -> Iterator["subprocess.Popen[str]"]:
    words = [sys.executable, Path(__file__).with_name("saver.py"), mount.path, log, seed]
    with subprocess.Popen(
        [str(word) for word in words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    ) as process:
        try:
            assert answer(process) == "ready"
            yield process
        finally:
            process.kill()


def ask(process: "subprocess.Popen[str]", step: int) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{step}\n")
    process.stdin.flush()


def answer(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


class Said:
    """What the saver's log says of each path: all digests begun, and the last acknowledged."""

    def __init__(self, log: Path) -> None:
        self.begun: dict[str, list[str]] = {}
        self.acknowledged: dict[str, str] = {}
        """Digest of the content that a close or fsync returned for, where nothing came after."""
        for line in log.read_text().splitlines():
            word, digest, path = line.split(" ", 2)
            if word == "begin":
                self.begun.setdefault(path, []).append(digest)
                self.acknowledged.pop(path, None)
                if not path.endswith(".tmp"):
                    self.begun.setdefault(path + ".tmp", [])
            else:
                self.acknowledged[path] = digest
                if f"{path}.tmp" in self.acknowledged:
                    del self.acknowledged[f"{path}.tmp"]  # renamed


def check(store: Path, said: Said, where: str) -> None:
    found = {
        str(path.relative_to(store)): digest_file(path)
        for path in store.rglob("*")
        if path.is_file()
    }
    left = [name for name in found if TEMPORARY_PREFIX in name]
    assert not left, f"{where}: temporary files left in the store: {left}"
    for path, digest in found.items():
        assert digest in said.begun[path], f"{where}: {path} in the store is torn"
    for path, digest in said.acknowledged.items():
        stored = found.get(path)
        if stored is None and path.endswith(".tmp"):  # the rename was done, its answer was lost
            stored = found.get(path.removesuffix(".tmp"))
        assert stored == digest, f"{where}: {path} was acknowledged, and is not stored"


@pytest.mark.parametrize("data_path", ["auto", "userspace"])
def test_what_was_acknowledged_survives_a_kill_at_any_moment(
    tmp_path: Path, data_path: str
) -> None:
    seed = int(os.environ.get("LMSTORFS_TEST_SEED", "0")) or time.time_ns() % 1_000_000
    moments = random.Random(seed)
    log = tmp_path / "saved"
    options = ("--ram", "1G", "-o", f"data_path={data_path},flush_delay=0.05")
    with mounted(tmp_path, *options) as mount, saver(mount, log, seed) as process:
        began = time.monotonic()
        ask(process, 0)
        assert answer(process) == "saved"
        took_s = time.monotonic() - began
        for step in range(1, KILLS + 1):
            where = f"seed {seed}, {data_path}, kill {step}"
            ask(process, step)
            time.sleep(moments.uniform(0, 1.3 * took_s))  # the moment of the kill
            mount.kill()
            said = answer(process)
            assert said == "saved" or said.startswith("failed"), where
            mount.start()
            mount.sync()
            check(mount.store, Said(log), where)


def test_after_a_kill_the_dead_mount_fails_at_once_and_a_new_one_adopts(tmp_path: Path) -> None:
    with mounted(tmp_path, "--ram", "256M", "-o", "flush_delay=600") as mount:
        for number in range(3):
            (mount.path / f"file-{number}").write_bytes(b"%d" % number * 100_000)
        mount.kill()
        with pytest.raises(OSError) as caught:  # noqa: PT011 - its errno is looked at
            (mount.path / "file-0").read_bytes()
        assert caught.value.errno in DEAD
        mount.start()
        assert mount.status()["recovery"]["adopted_files"] == 3
        for number in range(3):
            assert (mount.path / f"file-{number}").read_bytes() == b"%d" % number * 100_000


def test_a_kill_while_adopting_is_adopted_again(tmp_path: Path) -> None:
    with mounted(tmp_path, "--ram", "256M", "-o", "flush_delay=600") as mount:
        wanted = {f"file-{number}": os.urandom(1000 + number) for number in range(300)}
        for name, content in wanted.items():
            (mount.path / name).write_bytes(content)
        mount.kill()
        for _ in range(3):
            words = ["mount", mount.path, "--state", mount.state, "--ram", "256M"]
            starting = subprocess.Popen(
                [sys.executable, "-m", "lmstorfs.cli", *map(str, words)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=mount.environment,
            )
            wait_for(lambda: lock_held(mount.state), "a keeper holds the state directory")
            wait_for(lambda: len(mount.pids()) > 1, "the daemon has started")
            mount.kill()
            starting.wait(60)
        mount.start()
        assert mount.status()["recovery"]["adopted_files"] == len(wanted)
        assert {path.name: path.read_bytes() for path in mount.path.iterdir()} == wanted
        mount.sync()
        stored = {path.name: path.read_bytes() for path in mount.store.iterdir()}
        assert stored == wanted


def test_a_writer_that_the_kill_caught_leaves_nothing_torn_in_the_store(tmp_path: Path) -> None:
    with mounted(tmp_path, "--ram", "256M", "-o", "flush_delay=0") as mount:
        (mount.path / "model").write_bytes(b"first" * 10_000)
        mount.sync()
        fd = os.open(mount.path / "model", os.O_WRONLY)
        try:
            os.write(fd, b"second")
            mount.kill()
        finally:
            with contextlib.suppress(OSError):  # its mount is dead
                os.close(fd)
        mount.start()
        mount.sync()
        status = mount.status()
        assert status["state"] == "degraded"
        assert any("was being written when the daemon died: model" in r for r in status["reasons"])
        assert (mount.store / "model").read_bytes() == b"first" * 10_000
        (mount.path / "model").write_bytes(b"third")  # a whole save ends the doubt
        mount.sync()
        assert (mount.store / "model").read_bytes() == b"third"
        assert mount.status()["state"] == "ready"
