"""A mount for tests: made, broken, made again, and always cleaned up."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from lmstorfs import mounts
from lmstorfs.mounts import lock_held, lock_pid

T = TypeVar("T")
COMMAND_S = 120


def wait_for(condition: Callable[[], T], what: str, timeout_s: float = 60.0) -> T:
    """Return the first true value of `condition()`; fails after `timeout_s`."""
    give_up = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() > give_up:
            raise TimeoutError(f"within {timeout_s:.0f} s it was never so: {what}")
        time.sleep(0.02)
    return found


class Mount:
    """One mount below a folder of its own: `mnt`, `state`, and the command's answers."""

    def __init__(
        self, folder: Path, *options: object, environment: dict[str, str] | None = None
    ) -> None:
        self.path = folder / "mnt"
        self.state = folder / "state"
        self.store = self.state / "store"
        """Where the objects are, when no other store was asked for."""
        self._options = options
        self.prefix: Sequence[str] = ()
        """What stands before every command: how to run it as somebody else."""
        self.environment = {
            **os.environ,
            "LMSTORFS_RUN_DIR": str(folder / "run"),
            "LMSTORFS_CONFIG": str(folder / "none.toml"),
            **(environment or {}),
        }
        self.path.mkdir(exist_ok=True)

    def run(
        self, *words: object, timeout_s: float = COMMAND_S
    ) -> "subprocess.CompletedProcess[str]":
        """Run an lmstorfs command."""
        return subprocess.run(
            [*self.prefix, sys.executable, "-m", "lmstorfs.cli", *map(str, words)],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=self.environment,
        )

    def start(self, *more: object) -> None:
        """Run `lmstorfs mount`; also over the remains of a killed one."""
        done = self.run("mount", self.path, "--state", self.state, *self._options, *more)
        assert done.returncode == 0, f"{done.stderr}\n{self.log()}"

    def sync(self) -> None:
        """Return when the store has everything."""
        done = self.run("sync", self.path)
        assert done.returncode == 0, f"{done.stderr}\n{self.log()}"

    def status(self) -> dict[str, Any]:
        """Return the answer to `status --json`."""
        done = self.run("status", self.path, "--json")
        assert done.returncode == 0, f"{done.stderr}\n{self.log()}"
        return dict(json.loads(done.stdout))

    def log(self) -> str:
        """Return the end of the daemon's log."""
        path = self.state / "daemon.log"
        return path.read_text(errors="replace")[-3000:] if path.exists() else "(no log)"

    def pids(self) -> list[int]:
        """Return keeper and daemon, the keeper first."""
        keeper = lock_pid(self.state) if lock_held(self.state) else None
        if keeper is None:
            return []
        children = Path(f"/proc/{keeper}/task/{keeper}/children")
        try:
            return [keeper, *map(int, children.read_text().split())]
        except FileNotFoundError:
            return [keeper]

    def kill(self) -> None:
        """End keeper and daemon with SIGKILL; the dead mount stays."""
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        wait_for(lambda: not lock_held(self.state), "the state directory's lock is free")

    def remount(self) -> None:
        """Kill and mount again."""
        self.kill()
        self.start()

    def clean_up(self) -> None:
        """Leave nothing mounted and nothing running."""
        if self.state.exists():
            self.kill()
        for target in (str(self.path), str(self.state / "ram")):
            while mounts.mounted_at(target):
                mounts.detach(target)


@contextmanager
def mounted(
    folder: Path, *options: object, environment: dict[str, str] | None = None
) -> Iterator[Mount]:
    """Mount with these options; whatever happens, nothing is left."""
    mount = Mount(folder, *options, environment=environment)
    try:
        mount.start()
        yield mount
    finally:
        mount.clean_up()
