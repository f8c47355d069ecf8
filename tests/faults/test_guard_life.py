"""What the deletion guard keeps: for how long, what it costs, and how it comes back."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_guard import (
    MIB,
    Content,
    away,
    content_of_directory,
    content_of_file,
    kept,
    read,
    save,
)
from tests.faults.test_takeover import kill_daemon, wait_for_another
from tests.mounting import Mount, mounted, wait_for

pytestmark = [
    pytest.mark.mounted,
    pytest.mark.skipif(
        os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs root and /dev/fuse"
    ),
]

QUICK = ("--ram", "256M", "-o", "flush_delay=0.05")
NOTHING = {"checkpoints": 0, "files": 0, "bytes": 0}
BOTH_PATHS = pytest.mark.parametrize("data_path", ["auto", "userspace"])


def used(mount: Mount) -> int:
    return int(mount.status()["tiers"][0]["used_bytes"])


def objects(mount: Mount) -> set[str]:
    return {str(path.relative_to(mount.store)) for path in mount.store.rglob("*") if path.is_file()}


def names(folder: str, content: Content) -> set[str]:
    return {f"{folder}/{name}" for name in content}


@BOTH_PATHS
def test_it_lets_go_once_a_newer_one_is_stored(tmp_path: Path, data_path: str) -> None:
    with mounted(tmp_path, *QUICK, "-o", f"data_path={data_path}") as mount:
        first, second = content_of_directory(), content_of_directory()
        save(mount.path / "step_1", first)
        mount.sync()
        shutil.rmtree(mount.path / "step_1")
        size = sum(map(len, first.values()))
        assert mount.status()["guarded"] == {"checkpoints": 1, "files": 5, "bytes": size}
        assert objects(mount) == names("step_1", first)
        assert list(mount.path.iterdir()) == []  # also when the store was listed
        table = mount.run("checkpoints", mount.path).stdout
        assert "step_1" in table
        assert "deleted, kept" in table
        save(mount.path / "step_2", second)
        mount.sync()
        assert mount.status()["guarded"] == NOTHING
        assert objects(mount) == names("step_2", second)
        assert not (mount.store / "step_1").exists()
        assert kept(mount) == []
        assert used(mount) < 10 * MIB  # of one checkpoint
        assert "nothing that was deleted is kept" in mount.run("undelete", mount.path).stdout


def test_without_the_guard_all_is_free_at_once(tmp_path: Path) -> None:
    with mounted(tmp_path, *QUICK, "--no-guard") as mount:
        save(mount.path / "step_1", content_of_directory())
        mount.sync()
        shutil.rmtree(mount.path / "step_1")
        assert used(mount) == 0
        mount.sync()
        assert list(mount.store.iterdir()) == []
        done = mount.run("undelete", mount.path / "step_1")
        assert done.returncode == 1
        assert "no deleted checkpoint step_1 is kept" in done.stderr


def test_a_mount_without_the_guard_lets_go_of_what_an_earlier_one_kept(tmp_path: Path) -> None:
    with mounted(tmp_path, *QUICK) as mount:
        save(mount.path / "step_1", content_of_directory())
        mount.sync()
        shutil.rmtree(mount.path / "step_1")
        mount.kill()
        mount.start("--no-guard")
        wait_for(lambda: list(mount.store.iterdir()) == [], "the store has let go of it")
        assert used(mount) == 0


@BOTH_PATHS
def test_what_only_the_store_has_stays_there_and_comes_back(tmp_path: Path, data_path: str) -> None:
    options = ("--ram", "64M", "-o", f"flush_delay=0.05,data_path={data_path}")
    with mounted(tmp_path, *options) as mount:
        first = content_of_directory()
        save(mount.path / "step_1", first)
        mount.sync()
        for number in range(4):  # drives it out of RAM
            (mount.path / f"log-{number}").write_bytes(bytes(16 * MIB))
            mount.sync()
        assert not copies(mount, "step_1")["ram"]
        shutil.rmtree(mount.path / "step_1")
        save(mount.path / "step_1", half(first))  # the same place again, and broken off
        mount.sync()
        assert list(mount.path.glob(".*")) == []
        done = mount.run("undelete", mount.path / "step_1")
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert "is there again; rename it, or give --to NEWPATH" in done.stderr
        (mount.path / "step_1").rename(mount.path / "broken")
        done = mount.run("undelete", mount.path / "step_1")
        assert done.stdout.startswith(f"{mount.path}/step_1 is back (5 files, "), done.stderr
        assert read(mount.path / "step_1") == first
        mount.sync()
        assert {name: (mount.store / "step_1" / name).read_bytes() for name in first} == first
        assert not (mount.store / ".lmstorfs-deleted").exists()


def half(content: Content) -> Content:
    return {name: data[: len(data) // 2] for name, data in content.items()}


def copies(mount: Mount, path: str) -> dict[str, Any]:
    (found,) = [each for each in mount.status()["checkpoints"] if each["path"] == path]
    return dict(found["copies"])


def test_a_file_that_was_evicted_and_is_overwritten_comes_back(tmp_path: Path) -> None:
    with mounted(tmp_path, "--ram", "64M", "-o", "flush_delay=0.05") as mount:
        first, second = content_of_file(), content_of_file()
        save(mount.path / "last.pt", first)
        mount.sync()
        for number in range(4):
            (mount.path / f"log-{number}").write_bytes(bytes(16 * MIB))
            mount.sync()
        (mount.path / "last.pt").write_bytes(second[""][: 2 * MIB])  # and then it was killed
        mount.sync()
        done = mount.run("latest", mount.path)
        assert f"lmstorfs undelete {mount.path}/last.pt brings it back" in done.stderr
        done = mount.run("undelete", mount.path / "last.pt", "--to", mount.path / "old" / "last.pt")
        assert done.returncode == 0, done.stderr
        assert read(mount.path / "old" / "last.pt") == first


# --- who may die ---------------------------------------------------------------------------------

KILLED_WRITER = """
import os, sys, time
file = open(sys.argv[1], "wb", buffering=0)
file.write(b"x" * int(sys.argv[2]))
print("written", flush=True)
time.sleep(600)
"""


@BOTH_PATHS
@pytest.mark.parametrize("way", ["overwritten", "directory"])
def test_a_trainer_that_is_killed_leaves_no_half_checkpoint_that_counts(
    tmp_path: Path, way: str, data_path: str
) -> None:
    """The kernel closes a dead program's files: half a checkpoint is closed, and stored."""
    with mounted(tmp_path, *QUICK, "-o", f"data_path={data_path}") as mount:
        old = content_of_file() if way == "overwritten" else content_of_directory()
        path = mount.path / ("last.pt" if way == "overwritten" else "step_1")
        target = path if way == "overwritten" else mount.path / "step_2" / "optimizer.pt"
        save(path, old)
        mount.sync()
        if way == "directory":
            shutil.rmtree(path)
            save(mount.path / "step_2", {k: v for k, v in old.items() if k != "optimizer.pt"})
        with subprocess.Popen(
            [sys.executable, "-c", KILLED_WRITER, str(target), str(MIB)],
            stdout=subprocess.PIPE,
            text=True,
        ) as trainer:
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == "written\n"
            trainer.send_signal(signal.SIGKILL)
        mount.sync()  # what it left has two copies, and counts for nothing
        mount.remount()
        done = mount.run("latest", mount.path)
        assert done.returncode == 1
        assert f"lmstorfs undelete {path} brings it back" in done.stderr
        if way == "overwritten":
            path.rename(mount.path / "broken.pt")
        done = mount.run("undelete", path)
        assert done.returncode == 0, done.stderr
        assert read(path) == old
        if way == "directory":
            assert mount.run("latest", mount.path).stdout == f"{path}\n"


@BOTH_PATHS
def test_a_daemon_that_dies_in_the_middle_of_a_deletion(tmp_path: Path, data_path: str) -> None:
    options = ("-o", f"data_path={data_path},restart_limit=100")
    with mounted(tmp_path, *QUICK, *options) as mount:
        old = content_of_directory()
        save(mount.path / "step_1", old)
        mount.sync()
        with away(mount.store):
            killed = 0
            for path in sorted((mount.path / "step_1").iterdir()):
                path.unlink()
                killed = kill_daemon(mount, killed)
            (mount.path / "step_1").rmdir()
            wait_for_another(mount, killed)
            done = mount.run("undelete", mount.path / "step_1")
            assert done.returncode == 0, done.stderr
            assert read(mount.path / "step_1") == old


def test_who_has_it_open_reads_on_and_it_comes_back_all_the_same(tmp_path: Path) -> None:
    with mounted(tmp_path, *QUICK) as mount:
        old = content_of_file()
        save(mount.path / "step_1.pt", old)
        with (mount.path / "step_1.pt").open("rb") as reader:
            (mount.path / "step_1.pt").unlink()
            assert reader.read() == old[""]
            assert mount.run("undelete", mount.path / "step_1.pt").returncode == 0
            reader.seek(0)
            assert reader.read() == old[""]
        assert read(mount.path / "step_1.pt") == old
        mount.sync()
        assert (mount.store / "step_1.pt").read_bytes() == old[""]


# --- what it must not do -------------------------------------------------------------------------


def test_an_unmount_does_not_wait_for_it(tmp_path: Path) -> None:
    with mounted(tmp_path, "--ram", "256M", "-o", "flush_delay=600") as mount:
        old = content_of_directory()
        save(mount.path / "step_1", old)
        shutil.rmtree(mount.path / "step_1")
        mount.sync()
        assert objects(mount) == set()
        done = mount.run("unmount", mount.path)
        assert done.returncode == 0
        assert "of a deleted checkpoint stay in RAM" in done.stderr
        mount.start()
        assert mount.run("undelete", mount.path / "step_1").returncode == 0
        assert read(mount.path / "step_1") == old


def test_what_is_no_checkpoint_goes_at_once(tmp_path: Path) -> None:
    with mounted(tmp_path, *QUICK) as mount:
        (mount.path / "run").mkdir()
        for name in ("train.log", "latest", "notes.txt"):
            (mount.path / "run" / name).write_bytes(b"x" * 1000)
        mount.sync()
        shutil.rmtree(mount.path / "run")
        assert mount.status()["guarded"] == NOTHING
        mount.sync()
        assert objects(mount) == set()


def test_logs_and_trackers_beside_a_checkpoint_may_change(tmp_path: Path) -> None:
    """They are deleted and rewritten all the time; that does not put the checkpoint in doubt."""
    with mounted(tmp_path, *QUICK) as mount:
        (mount.path / "run").mkdir()
        (mount.path / "run" / "model.pt").write_bytes(os.urandom(2 * MIB))
        for number in range(3):
            (mount.path / "run" / "latest.new").write_bytes(b"%d" % number)
            (mount.path / "run" / "latest.new").rename(mount.path / "run" / "latest")
            (mount.path / "run" / "scratch").write_bytes(b"x")
            (mount.path / "run" / "scratch").unlink()
            (mount.path / "run" / "log").write_bytes(b"x" * number)
        mount.sync()
        assert mount.run("latest", mount.path).stdout == f"{mount.path}/run\n"
        assert kept(mount) == []


def test_a_full_tier_gets_its_room_back(tmp_path: Path) -> None:
    """What is kept and was never stored goes to the store, where nothing newer is whole."""
    with mounted(tmp_path, "--ram", "64M", "-o", "flush_delay=600") as mount:
        old = {"": os.urandom(40 * MIB)}
        save(mount.path / "step_1.pt", old)
        (mount.path / "step_1.pt").unlink()
        with (mount.path / "step_2.pt").open("wb", buffering=0) as file:
            for _ in range(40):
                assert file.write(bytes(MIB)) == MIB
        mount.run("undelete", mount.path / "step_1.pt")
        assert mount.run("undelete", mount.path / "step_1.pt").returncode == 1  # it is back
        assert read(mount.path / "step_1.pt") == old


def test_rotation_with_the_store_away_does_not_fill_the_tier(tmp_path: Path) -> None:
    with mounted(tmp_path, "--ram", "64M", "-o", "flush_delay=0.05") as mount:
        (mount.path / "begun").write_bytes(b"")
        mount.sync()
        with away(mount.store):
            for step in range(6):
                content = {"model.pt": os.urandom(20 * MIB)}
                save(mount.path / f"step_{step}", content)
                if step:
                    shutil.rmtree(mount.path / f"step_{step - 1}")
                assert read(mount.path / f"step_{step}") == content
        mount.sync()
        assert {path for path in objects(mount) if path != "begun"} == {"step_5/model.pt"}


def test_the_list_for_programs(tmp_path: Path) -> None:
    with mounted(tmp_path, *QUICK) as mount:
        save(mount.path / "step_1", content_of_directory())
        (mount.path / "step_1" / "optimizer.pt").unlink()
        (found,) = kept(mount)
        assert (found["path"], found["files"], found["complete"]) == ("step_1", 5, True)
        assert len(found["still_there"]) == 4
        told = json.loads(mount.run("checkpoints", mount.path, "--json").stdout)["checkpoints"]
        assert [(each["deleted"], each["complete"], each["lacks"]) for each in told] == [
            (False, False, ["optimizer.pt"]),
            (True, True, []),
        ]
        assert mount.run("undelete", mount.path / "step_1", "--discard").returncode == 0
        assert kept(mount) == []
