"""Every command finds a mount by its mount point alone; dead mounts are seen and taken away."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmstorfs import mounts, validation
from lmstorfs.config import MountConfig, write_config
from lmstorfs.errors import SetupError
from lmstorfs.store.store import StoreConfig
from lmstorfs.units import MIB

needs_fuse = pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs root and /dev/fuse"
)


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LMSTORFS_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "run"


def config_for(tmp_path: Path, name: str) -> MountConfig:
    state = tmp_path / f"state-{name.replace('/', '-')}"
    state.mkdir(exist_ok=True)
    config = MountConfig(
        mountpoint=str(tmp_path / name),
        state_dir=str(state),
        store=StoreConfig(url=str(state / "store")),
        ram_bytes=16 * MIB,
        allow_other=False,
    )
    write_config(config)
    return config


def test_a_registered_mount_is_found_by_its_mount_point_and_below(tmp_path: Path) -> None:
    config = config_for(tmp_path, "mnt")
    mounts.register(config, 77)
    assert mounts.find(config.mountpoint) == config.state
    assert mounts.find(f"{config.mountpoint}/run/step-3") == config.state
    with pytest.raises(SetupError, match=r"is in no lmstorfs mount; there are: .*/mnt$"):
        mounts.find(f"{config.mountpoint}-other")
    assert [(mount.mountpoint, mount.pid) for mount in mounts.all_mounts()] == [
        (config.mountpoint, 77)
    ]
    mounts.unregister(config)
    assert mounts.all_mounts() == []


def test_the_innermost_mount_is_found(tmp_path: Path) -> None:
    outer, inner = config_for(tmp_path, "mnt"), config_for(tmp_path, "mnt/in")
    mounts.register(outer, 1)
    mounts.register(inner, 2)
    assert mounts.find(f"{inner.mountpoint}/x") == inner.state
    assert mounts.find(f"{outer.mountpoint}/x") == outer.state


def test_a_path_through_a_symlink_is_named_as_the_mount_knows_it(tmp_path: Path) -> None:
    config = config_for(tmp_path, "mnt")
    (tmp_path / "mnt").mkdir()
    (tmp_path / "link").symlink_to("mnt")
    mounts.register(config, 1)
    found, path = mounts.locate(tmp_path / "link" / "a")
    assert (found.state, path) == (config.state, f"{config.mountpoint}/a")


def test_unregister_leaves_the_entry_of_a_successor(tmp_path: Path) -> None:
    old = config_for(tmp_path, "mnt")
    new = MountConfig(
        mountpoint=old.mountpoint,
        state_dir=str(tmp_path),
        store=old.store,
        ram_bytes=old.ram_bytes,
    )
    mounts.register(old, 1)
    mounts.register(new, 2)
    mounts.unregister(old)
    assert mounts.find(old.mountpoint) == tmp_path


def test_a_mount_whose_entry_was_cleared_is_found_by_its_default_state(tmp_path: Path) -> None:
    from lmstorfs.config import default_state_dir

    mountpoint = str(tmp_path / "mnt")
    state = Path(default_state_dir(mountpoint))
    state.mkdir(parents=True)
    write_config(
        MountConfig(
            mountpoint=mountpoint,
            state_dir=str(state),
            store=StoreConfig(url="/s"),
            ram_bytes=16 * MIB,
        )
    )
    assert mounts.find(f"{mountpoint}/a") == state


def test_the_only_mount_needs_no_name(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="there is no mount; make one: lmstorfs mount /ckpt"):
        mounts.only_mount()
    one = config_for(tmp_path, "one")
    mounts.register(one, 1)
    assert mounts.only_mount().state == one.state
    mounts.register(config_for(tmp_path, "two"), 2)
    with pytest.raises(SetupError, match=r"several mounts, name one of them: .*/one, .*/two$"):
        mounts.only_mount()


def test_entries_that_mean_nothing_are_passed_over(tmp_path: Path, run_dir: Path) -> None:
    gone = config_for(tmp_path, "gone")
    mounts.register(gone, 1)
    for path in gone.state.iterdir():
        path.unlink()
    gone.state.rmdir()
    (run_dir / "broken.json").write_text("{")
    assert mounts.all_mounts() == []


def test_a_run_directory_that_anyone_may_write_is_refused(tmp_path: Path, run_dir: Path) -> None:
    run_dir.mkdir()
    run_dir.chmod(0o777)
    with pytest.raises(SetupError, match="is writable by everyone; run: chmod o-w"):
        mounts.register(config_for(tmp_path, "mnt"), 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_run_directory_of_another_user_is_refused(tmp_path: Path, run_dir: Path) -> None:
    run_dir.mkdir()
    os.chown(run_dir, 1234, 1234)
    with pytest.raises(SetupError, match="belongs to another user"):
        mounts.all_mounts()


def test_names_in_the_mount_table_are_unescaped() -> None:
    assert mounts._unescape(r"/a\040b\134c\011d") == "/a b\\c\td"
    assert "/proc" in {entry.mountpoint for entry in mounts.mounted_filesystems()}


# --- dead mounts -----------------------------------------------------------------------------


@pytest.fixture
def dead(tmp_path: Path) -> Iterator[MountConfig]:
    """A mount whose daemon is gone: every call on it says ENOTCONN."""
    config = config_for(tmp_path, "dead mount")
    Path(config.mountpoint).mkdir()
    device = os.open("/dev/fuse", os.O_RDWR)
    data = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
    words = [b"store", os.fsencode(config.mountpoint), b"fuse.lmstorfs"]
    assert ctypes.CDLL(None).mount(*words, ctypes.c_ulong(0), data) == 0
    os.close(device)
    yield config
    while mounts.is_mounted(config.mountpoint):
        mounts.detach(config.mountpoint)


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "lmstorfs.cli", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@needs_fuse
def test_a_dead_mount_is_taken_away_before_the_next(dead: MountConfig) -> None:
    assert mounts.is_mounted(dead.mountpoint)
    assert not mounts.answers(dead.mountpoint)
    said: list[str] = []
    validation.validate(dead, said.append)
    assert said == [f"the daemon that served {dead.mountpoint} is dead; its mount is taken away"]
    assert not mounts.is_mounted(dead.mountpoint)


@needs_fuse
def test_a_dead_mount_stays_where_the_next_cannot_be_made(dead: MountConfig) -> None:
    done = run("mount", dead.mountpoint, "--store", f"{dead.mountpoint}-none")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert mounts.is_mounted(dead.mountpoint)


@needs_fuse
@pytest.mark.parametrize("registered", [True, False])
def test_unmount_takes_a_dead_mount_away(dead: MountConfig, registered: bool) -> None:
    if registered:
        mounts.register(dead, 1)
    done = run("unmount", dead.mountpoint)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"unmounted {dead.mountpoint}; its daemon was dead\n"
    assert not mounts.is_mounted(dead.mountpoint)


@needs_fuse
def test_unmount_of_a_dead_mount_tells_of_what_is_left(dead: MountConfig) -> None:
    mounts.register(dead, 1)
    (dead.state / "catalog.db").touch()
    done = run("unmount", dead.mountpoint)
    assert done.returncode == 1
    assert "stays in the tiers" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not mounts.is_mounted(dead.mountpoint)


@needs_fuse
def test_a_dead_mount_is_told_of_by_status(dead: MountConfig) -> None:
    mounts.register(dead, 1)
    done = run("status", f"{dead.mountpoint}/run")
    assert (done.returncode, done.stderr) == (
        1,
        f"lmstorfs: the daemon of {dead.mountpoint} is not running; "
        f"run `lmstorfs mount {dead.mountpoint} …` again: it takes over what is left\n",
    )
