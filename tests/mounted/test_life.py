"""Mounts come, go and come back: nothing that was acknowledged is lost, nothing is left behind."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from lmstorfs.mounts import is_mounted, lock_held, mounted_at
from tests.mounting import Mount, mounted, wait_for

QUICK = ("--ram", "256M", "-o", "flush_delay=0.05")


def gone(mount: Mount) -> bool:
    return not is_mounted(str(mount.path)) and not lock_held(mount.state)


@pytest.mark.parametrize("way", ["umount", "SIGTERM", "SIGINT", "unmount"])
def test_every_way_to_unmount_brings_all_to_the_store(tmp_path: Path, way: str) -> None:
    content = os.urandom(20 << 20)
    with mounted(tmp_path, *QUICK) as mount:
        (mount.path / "model.pt").write_bytes(content)
        if way == "unmount":
            assert mount.run("unmount", mount.path).returncode == 0
        elif way == "umount":
            subprocess.run(["umount", mount.path], check=True)
        else:
            os.kill(mount.pids()[0], getattr(signal, way))
        wait_for(lambda: gone(mount), "keeper and mount are gone")
        assert (mount.store / "model.pt").read_bytes() == content
        assert mounted_at(str(mount.state / "ram")) is None
        mount.start()
        assert (mount.path / "model.pt").read_bytes() == content


def test_a_busy_mount_says_who_uses_it_and_stays(tmp_path: Path) -> None:
    with mounted(tmp_path, *QUICK) as mount:
        with (mount.path / "log").open("w") as file:
            done = mount.run("unmount", mount.path)
            assert done.returncode == 1
            assert f"({os.getpid()})" in done.stderr
            file.write("still here")
        assert (mount.path / "log").read_text() == "still here"
        assert mount.status()["state"] == "ready"


def test_without_draining_the_dirty_data_waits_for_the_next_mount(tmp_path: Path) -> None:
    content = os.urandom(4 << 20)
    with mounted(tmp_path, "--ram", "256M", "-o", "flush_delay=3600") as mount:
        (mount.path / "model.pt").write_bytes(content)
        assert mount.run("unmount", mount.path, "--no-drain").returncode == 0
        assert not (mount.store / "model.pt").exists()
        mount.start()
        assert mount.status()["recovery"]["adopted_files"] == 1
        assert (mount.path / "model.pt").read_bytes() == content
        mount.sync()
        assert (mount.store / "model.pt").read_bytes() == content


def test_two_mounts_live_side_by_side(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with mounted(tmp_path / "one", *QUICK) as one, mounted(tmp_path / "two", *QUICK) as two:
        (one.path / "file").write_bytes(b"1")
        (two.path / "file").write_bytes(b"2")
        for mount in (one, two):
            mount.sync()
        assert [(mount.store / "file").read_bytes() for mount in (one, two)] == [b"1", b"2"]


def test_the_mount_table_shows_type_and_store(tmp_path: Path) -> None:
    with mounted(tmp_path, *QUICK) as mount:
        entry = mounted_at(str(mount.path))
        assert entry is not None
        assert (entry.filesystem, entry.source) == ("fuse.lmstorfs", str(mount.store))


def test_state_is_the_owners_alone(tmp_path: Path) -> None:
    with mounted(tmp_path, *QUICK) as mount:
        (mount.path / "secret").write_bytes(b"x")
        assert mount.state.stat().st_mode & 0o077 == 0
        for name in ("ram", "control.sock", "catalog.db", "mount.json", "daemon.log", "lock"):
            assert (mount.state / name).stat().st_mode & 0o077 == 0, name


def test_a_read_only_mount_refuses_writes(tmp_path: Path) -> None:
    objects = tmp_path / "objects"
    objects.mkdir()
    (objects / "data").write_bytes(b"data")
    with mounted(tmp_path, "--store", objects, "--read-only", *QUICK) as mount:
        assert (mount.path / "data").read_bytes() == b"data"
        with pytest.raises(OSError, match="Read-only"):
            (mount.path / "new").touch()


def test_fsync_ram_returns_though_the_store_is_far(tmp_path: Path) -> None:
    with mounted(tmp_path, "--ram", "256M", "--fsync", "ram", "-o", "flush_delay=3600") as mount:
        with (mount.path / "file").open("wb") as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
        assert not (mount.store / "file").exists()
        assert mount.status()["fsync"] == "ram"
