"""A mount that fails leaves nothing behind, whatever its keeper does.

The keepers here are small scripts in place of the real one, since that does not fail on demand.
"""

import os
import signal
import stat
import sys
import time
from pathlib import Path

import pytest

from lmstorfs import launch
from lmstorfs.config import MountConfig
from lmstorfs.errors import SetupError
from lmstorfs.store.store import StoreConfig
from lmstorfs.units import MIB


@pytest.fixture
def config(tmp_path: Path) -> MountConfig:
    (tmp_path / "mnt").mkdir()
    state = tmp_path / "var" / "lib" / "state"
    return MountConfig(
        mountpoint=str(tmp_path / "mnt"),
        state_dir=str(state),
        store=StoreConfig(url=str(state / "store")),
        ram_bytes=16 * MIB,
    )


PRELUDE = "import os, signal, sys, time\nstate, fd = sys.argv[1], int(sys.argv[2])\n"


def keeper(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    def command(state: Path, ready_fd: int) -> list[str]:
        return [sys.executable, "-c", PRELUDE + script, str(state), str(ready_fd)]

    monkeypatch.setattr(launch, "keeper_command", command)


READY = """
assert os.listdir(state)
os.write(fd, b'{"ready": true, "data_path": "passthrough", "reason": null}\\n')
"""


def test_a_mount_that_answers(config: MountConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper(monkeypatch, READY + "print('a line for the log'); sys.exit(3)")
    ready, process = launch.start(config, foreground=False)
    assert (ready.ready, ready.data_path) == (True, "passthrough")
    assert process.wait_in_foreground() == 3
    assert stat.S_IMODE(config.state.stat().st_mode) == 0o700
    log = config.state / "daemon.log"
    assert log.read_text() == "a line for the log\n"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert (config.state / "store").is_dir()


def test_a_keeper_that_refuses(
    config: MountConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keeper(monkeypatch, 'os.write(fd, b\'{"error": "no luck", "exit_code": 2}\\n\')')
    with pytest.raises(SetupError, match=r"^no luck$") as caught:
        launch.start(config, foreground=False)
    assert caught.value.exit_code == 2
    assert sorted(tmp_path.iterdir()) == [tmp_path / "mnt"]


def test_a_keeper_that_dies_leaves_only_its_log(
    config: MountConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper(monkeypatch, "raise SystemExit('first\\nlast words')")
    with pytest.raises(SetupError) as caught:
        launch.start(config, foreground=False)
    log = config.state / "daemon.log"
    assert str(caught.value) == f"the keeper died: last words; its log is {log}"
    assert list(config.state.iterdir()) == [log]


def test_a_failed_mount_leaves_an_old_state_directory_as_it_was(
    config: MountConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.state.mkdir(parents=True)
    (config.state / "mount.json").write_text("the old one")
    (config.state / "catalog.db").write_text("precious")
    keeper(monkeypatch, 'os.write(fd, b\'{"error": "no luck", "exit_code": 1}\\n\')')
    with pytest.raises(SetupError):
        launch.start(config, foreground=False)
    assert (config.state / "mount.json").read_text() == "the old one"
    assert (config.state / "catalog.db").read_text() == "precious"


def test_a_keeper_that_never_answers_is_ended(
    config: MountConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(launch, "READY_TIMEOUT_S", 1)
    pid_file = tmp_path / "pid"
    keeper(monkeypatch, f"open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    with pytest.raises(SetupError, match="did not answer within 1 s and was given up"):
        launch.start(config, foreground=False)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    assert not config.state.exists()


def test_ctrl_c_while_a_mount_is_made_undoes_it(
    config: MountConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keeper(monkeypatch, "os.kill(os.getppid(), signal.SIGINT); time.sleep(600)")
    with pytest.raises(KeyboardInterrupt):
        launch.start(config, foreground=False)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "mnt"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_in_the_foreground_signals_are_passed_on(
    config: MountConfig, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    script = READY + (
        "got = []\n"
        "signal.signal(signal.SIGINT, lambda *_: got.append(2))\n"
        "signal.signal(signal.SIGTERM, lambda *_: got.append(15))\n"
        "time.sleep(0.5)\n"
        f"os.kill(os.getppid(), {int(number)})\n"
        "while not got: time.sleep(0.01)\n"
        "sys.exit(got[0])\n"
    )
    keeper(monkeypatch, script)
    _, process = launch.start(config, foreground=True)
    assert process.wait_in_foreground() == number


def test_two_mounts_at_once_with_one_state_directory(
    config: MountConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper(monkeypatch, READY)
    with launch.StateDirectory(config).prepared(), pytest.raises(SetupError) as caught:
        launch.start(config, foreground=False)
    assert "is starting with the state directory" in str(caught.value)


def test_waiting_until_a_mount_is_gone_ends(
    config: MountConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch.wait_until_gone(config.mountpoint, config.state)
    monkeypatch.setattr(launch, "GONE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(launch, "lock_held", lambda _state: True)
    started = time.monotonic()
    with pytest.raises(SetupError, match="does not end; its log is"):
        launch.wait_until_gone(config.mountpoint, config.state)
    assert time.monotonic() - started < 10
