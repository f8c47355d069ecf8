"""A mount ends well however it is ended, several live side by side, and nobody needs root."""

import hashlib
import os
import pwd
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmstorfs.mounts import is_mounted, lock_held, mounted_at
from tests.faults.mounting import Mount, mounted, wait_for
from tests.mounted.conftest import FAST

SLOW = ("--ram", "1G", "-o", "flush_delay=600")
"""So that all is dirty until somebody drains."""


def gone(mount: Mount) -> bool:
    return not lock_held(mount.state) and not is_mounted(str(mount.path))


def save(mount: Mount) -> dict[str, bytes]:
    """Write a small checkpoint that is not stored yet."""
    want = {f"step_1/rank_{number}.pt": os.urandom(700_000) for number in range(5)}
    (mount.path / "step_1").mkdir()
    for name, content in want.items():
        (mount.path / name).write_bytes(content)
    assert mount.status()["store"]["pending_files"] >= len(want)
    assert not list(mount.store.rglob("*.pt"))
    return want


def assert_stored(mount: Mount, want: dict[str, bytes]) -> None:
    assert {
        str(path.relative_to(mount.store)): path.read_bytes() for path in mount.store.rglob("*.pt")
    } == want
    assert mounted_at(str(mount.state / "ram")) is None


def test_the_unmount_command_drains(tmp_path: Path) -> None:
    with mounted(tmp_path, *SLOW) as mount:
        want = save(mount)
        assert mount.run("unmount", mount.path).returncode == 0
        wait_for(lambda: gone(mount), "keeper and mount are gone")
        assert_stored(mount, want)


def test_a_plain_umount_drains(tmp_path: Path) -> None:
    with mounted(tmp_path, *SLOW) as mount:
        want = save(mount)
        subprocess.run(["umount", mount.path], check=True)
        wait_for(lambda: gone(mount), "keeper and mount are gone")
        assert_stored(mount, want)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("who", ["keeper", "daemon"])
def test_a_signal_drains(tmp_path: Path, number: signal.Signals, who: str) -> None:
    with mounted(tmp_path, *SLOW) as mount:
        want = save(mount)
        os.kill(mount.pids()[0 if who == "keeper" else 1], number)
        wait_for(lambda: gone(mount), "keeper and mount are gone")
        assert_stored(mount, want)


def test_unmount_without_draining_keeps_the_dirty_files_for_the_next_mount(tmp_path: Path) -> None:
    with mounted(tmp_path, *SLOW) as mount:
        want = save(mount)
        assert mount.run("unmount", mount.path, "--no-drain").returncode == 0
        wait_for(lambda: gone(mount), "keeper and mount are gone")
        assert not list(mount.store.rglob("*.pt"))
        mount.start()
        assert mount.status()["recovery"]["adopted_files"] == len(want)
        for name, content in want.items():
            assert (mount.path / name).read_bytes() == content
        assert mount.run("unmount", mount.path).returncode == 0
        wait_for(lambda: gone(mount), "keeper and mount are gone")
        assert_stored(mount, want)


def test_a_busy_mount_stays_and_its_user_is_named(tmp_path: Path) -> None:
    with mounted(tmp_path, *FAST) as mount:
        (mount.path / "file").write_bytes(b"content")
        with subprocess.Popen(["sleep", "600"], cwd=mount.path) as user:
            try:
                done = mount.run("unmount", mount.path)
                assert done.returncode == 1
                assert f"sleep ({user.pid})" in done.stderr
                assert done.stderr.count("\n") == 1
                assert is_mounted(str(mount.path))
                assert (mount.path / "file").read_bytes() == b"content"
                assert mount.status()["state"] == "ready"
                (mount.path / "more").write_bytes(b"more")
            finally:
                user.kill()
        assert mount.run("unmount", mount.path).returncode == 0
        wait_for(lambda: gone(mount), "keeper and mount are gone")
        assert (mount.store / "more").read_bytes() == b"more"


def test_two_mounts_at_one_time_know_nothing_of_each_other(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with mounted(tmp_path / "one", *FAST) as one, mounted(tmp_path / "two", *FAST) as two:
        (one.path / "file").write_bytes(b"one")
        (two.path / "file").write_bytes(b"two")
        subprocess.run(["cp", one.path / "file", two.path / "copy"], check=True)
        subprocess.run(["mv", two.path / "file", one.path / "moved"], check=True)
        one.sync()
        two.sync()
        assert {path.name for path in one.store.iterdir()} == {"file", "moved"}
        assert {path.name for path in two.store.iterdir()} == {"copy"}
        assert one.run("unmount", one.path).returncode == 0
        assert (two.path / "copy").read_bytes() == b"one"


def test_fsync_ram_returns_before_the_store_has_it(tmp_path: Path) -> None:
    with mounted(tmp_path, *SLOW, "--fsync", "ram") as mount:
        with (mount.path / "file").open("wb", buffering=0) as file:
            file.write(b"content")
            os.fsync(file.fileno())
            assert not (mount.store / "file").exists()
            assert mount.status()["fsync"] == "ram"
        mount.sync()
        assert (mount.store / "file").read_bytes() == b"content"


def test_fsync_waits_for_the_store_in_spite_of_the_flush_delay(tmp_path: Path) -> None:
    with (
        mounted(tmp_path, *SLOW, "--fsync", "store") as mount,
        (mount.path / "file").open("wb", buffering=0) as file,
    ):
        file.write(b"content")
        os.fsync(file.fileno())
        assert (mount.store / "file").read_bytes() == b"content"


def test_a_read_only_mount_refuses_all_that_writes(tmp_path: Path) -> None:
    objects = tmp_path / "objects"
    objects.mkdir()
    (objects / "file").write_bytes(b"content")
    with mounted(tmp_path, "--store", objects, *FAST, "--read-only") as mount:
        path = mount.path / "file"
        assert path.read_bytes() == b"content"
        for refused in (
            lambda: path.open("r+b"),
            lambda: (mount.path / "new").touch(),
            lambda: (mount.path / "dir").mkdir(),
            path.unlink,
            lambda: path.chmod(0o600),
            lambda: path.rename(mount.path / "other"),
            lambda: os.truncate(path, 0),
        ):
            with pytest.raises(OSError, match="Read-only"):
                refused()
    assert (objects / "file").read_bytes() == b"content"


# --- without root ----------------------------------------------------------------------------


NOBODY = pwd.getpwnam("nobody")
# The one capability lets the user reach an interpreter that lies in root's home.
AS_NOBODY = (
    *("setpriv", f"--reuid={NOBODY.pw_uid}", f"--regid={NOBODY.pw_gid}", "--clear-groups"),
    *("--inh-caps=-all,+dac_read_search", "--ambient-caps=+dac_read_search"),
)


@pytest.fixture
def open_device() -> Iterator[None]:
    """Let everybody open /dev/fuse, as udev does wherever it runs; as it was, afterwards."""
    device = Path("/dev/fuse")
    mode = stat.S_IMODE(device.stat().st_mode)
    device.chmod(0o666)
    yield
    device.chmod(mode)


@pytest.fixture
def users_mounts(open_device: None) -> Iterator[list[Mount]]:
    """Yield two mounts that an ordinary user made, at places that ordinary users reach."""
    if shutil.which("fusermount3") is None:
        pytest.skip("fusermount3 is missing")
    folder = Path(tempfile.mkdtemp(prefix="lt-nobody.", dir="/tmp"))
    made: list[Mount] = []
    try:
        for name in ("one", "two"):
            (folder / name).mkdir()
            mount = Mount(folder / name, *FAST, environment={"HOME": str(folder)})
            mount.prefix = AS_NOBODY
            for path in (folder, folder / name, mount.path):
                os.chown(path, NOBODY.pw_uid, NOBODY.pw_gid)
            made.append(mount)
            mount.start()
        yield made
    finally:
        for mount in made:
            mount.clean_up()
            shutil.rmtree((mount.state / "ram").resolve(), ignore_errors=True)
        shutil.rmtree(folder)


def as_nobody(script: str, *arguments: object) -> str:
    command = [*AS_NOBODY, "sh", "-ec", script, "sh", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_ordinary_user_mounts_saves_and_unmounts(users_mounts: list[Mount]) -> None:
    mount, other = users_mounts
    status = mount.status()
    assert status["data_path"] == "userspace"
    assert "root" in status["data_path_reason"]
    assert (mount.state / "ram").resolve().is_relative_to("/dev/shm")
    script = """
        mkdir "$1/step_1"
        head -c 5000000 /dev/urandom > "$1/step_1/model.pt.tmp"
        mv "$1/step_1/model.pt.tmp" "$1/step_1/model.pt"
        echo more >> "$1/step_1/model.pt"
        chmod 640 "$1/step_1/model.pt"
        sha256sum < "$1/step_1/model.pt"
        """
    want = as_nobody(script, mount.path)
    mount.sync()
    stored = mount.store / "step_1" / "model.pt"
    assert f"{hashlib.sha256(stored.read_bytes()).hexdigest()}  -\n" == want
    assert (stored.stat().st_uid, stored.stat().st_mode & 0o777) == (NOBODY.pw_uid, 0o640)
    shared = (mount.state / "ram").resolve()
    assert shared != (other.state / "ram").resolve()
    as_nobody('echo other > "$1/file"', other.path)
    done = mount.run("unmount", mount.path)
    assert done.returncode == 0, done.stderr
    wait_for(lambda: gone(mount), "keeper and mount are gone")
    assert not shared.exists()
    assert as_nobody('cat "$1/file"', other.path) == "other\n"
