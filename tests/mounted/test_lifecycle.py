"""Whoever ends a mount, what is dirty is brought to the store first; and nobody needs root."""

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
from tests.mounted.conftest import FAST
from tests.mounting import Mount, mounted, wait_for

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


def test_a_plain_umount_drains(tmp_path: Path) -> None:
    with mounted(tmp_path, *SLOW) as mount:
        want = save(mount)
        subprocess.run(["umount", mount.path], check=True)
        wait_for(lambda: gone(mount), "keeper and mount are gone")
        assert_stored(mount, want)


@pytest.mark.parametrize("who", ["keeper", "daemon"])
def test_a_signal_drains(tmp_path: Path, who: str) -> None:
    with mounted(tmp_path, *SLOW) as mount:
        want = save(mount)
        os.kill(mount.pids()[0 if who == "keeper" else 1], signal.SIGTERM)
        wait_for(lambda: gone(mount), "keeper and mount are gone")
        assert_stored(mount, want)


def test_fsync_waits_for_the_store_in_spite_of_the_flush_delay(tmp_path: Path) -> None:
    with (
        mounted(tmp_path, *SLOW, "--fsync", "store") as mount,
        (mount.path / "file").open("wb", buffering=0) as file,
    ):
        file.write(b"content")
        os.fsync(file.fileno())
        assert (mount.store / "file").read_bytes() == b"content"


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
