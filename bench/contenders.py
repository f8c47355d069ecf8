"""The filesystems that a benchmark writes to: each is started with its best settings and torn down.

What starts a contender gives a `Target`, a directory with what has to be known about it, and leaves
its end on an `ExitStack`. All contenders are up at the same time, so that they can take turns; what
each keeps in memory is gone once its files are deleted. The rivals are in `rivals.py`.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmstorfs.units import MIB, format_size

COMMAND_TIMEOUT_S = 120
SETTLE_TIMEOUT_S = 120.0
SETTLE_POLL_S = 0.1
DAEMON_EXIT_TIMEOUT_S = 10.0
CACHE_EMPTY_BYTES = 4 * MIB  # a cache's own bookkeeping may stay


class CannotStartError(Exception):
    """A contender does not run here; the message says why."""


@dataclass(frozen=True)
class Target:
    """A directory to write to, and how to wait until nothing of it goes on in the background."""

    directory: Path
    settings: str
    settle: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Workspace:
    """A folder on the local disk (stores, state, mount points), and the RAM each may fill."""

    disk: Path
    ram_bytes: int

    def folder(self, name: str) -> Path:
        path = self.disk / name
        path.mkdir(parents=True)
        return path


@dataclass(frozen=True)
class Contender:
    """A name for tables and JSON, a title for people, and what starts it."""

    name: str
    title: str
    start: Callable[[Workspace, ExitStack], Target]


def run(*words: object) -> str:
    """Run a command that a contender needs; its last words become the reason if it fails.

    Its output goes to a file and not to a pipe, which a daemon that it leaves would hold open.
    """
    command = [str(word) for word in words]
    with tempfile.TemporaryFile("w+") as output:
        try:
            result = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=COMMAND_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CannotStartError(f"{Path(command[0]).name}: {error}") from error
        output.seek(0)
        text = output.read()
    if result.returncode != 0:
        lines = text.strip().splitlines() or [f"exit code {result.returncode}"]
        raise CannotStartError(f"{Path(command[0]).name}: {lines[-1]}")
    return text


def is_mounted(path: Path) -> bool:
    lines = Path("/proc/mounts").read_text().splitlines()
    return any(line.split()[1] == str(path) for line in lines)


def detach(path: Path) -> None:
    """Unmount `path` if it is mounted, whatever still uses it."""
    if is_mounted(path):
        subprocess.run(["umount", path], stderr=subprocess.DEVNULL, check=False)
    if is_mounted(path):
        subprocess.run(["umount", "-l", path], check=False)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + SETTLE_TIMEOUT_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} took more than {SETTLE_TIMEOUT_S:.0f} s")
        time.sleep(SETTLE_POLL_S)


def mount_tmpfs(path: Path, size: int, stack: ExitStack) -> str:
    """Mount a private tmpfs with huge pages, as lmstorfs's RAM tier is one; return its options."""
    options = f"size={size // MIB}M,huge=within_size"
    run("mount", "-t", "tmpfs", "-o", options, "tmpfs", path)
    stack.callback(detach, path)
    return f"tmpfs {options}"


def used_bytes(path: Path) -> int:
    """Return what the files on the filesystem of `path` occupy."""
    found = os.statvfs(path)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def make_cache(workspace: Workspace, name: str, stack: ExitStack) -> tuple[Path, str]:
    """Give a rival a cache in memory, of the same kind as lmstorfs's RAM tier."""
    cache = workspace.folder(name)
    return cache, mount_tmpfs(cache, workspace.ram_bytes, stack)


def wait_until_empty(cache: Path) -> None:
    """Wait until a cache has forgotten the deleted files, and so has nothing to write back."""
    wait_for(lambda: used_bytes(cache) < CACHE_EMPTY_BYTES, f"emptying {cache.name}")


def start_tmpfs(workspace: Workspace, stack: ExitStack) -> Target:
    directory = workspace.folder("tmpfs")
    return Target(directory, mount_tmpfs(directory, workspace.ram_bytes, stack))


def start_shm(_workspace: Workspace, stack: ExitStack) -> Target:
    directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir="/dev/shm"))
    return Target(Path(directory), "as the system mounts it")


def start_disk(workspace: Workspace, _stack: ExitStack) -> Target:
    def settle() -> None:
        run("sync", "-f", directory)

    directory = workspace.folder("disk")
    return Target(directory, "buffered writes, no fsync", settle)


def start_lmstorfs(workspace: Workspace, stack: ExitStack, data_path: str) -> Target:
    """Mount lmstorfs with a directory of the local disk as its store."""
    base = workspace.folder(f"lmstorfs-{data_path}")
    mount_point, store, state = base / "mnt", base / "store", base / "state"
    mount_point.mkdir()
    store.mkdir()
    command = [sys.executable, "-m", "lmstorfs.cli"]
    ram = f"{workspace.ram_bytes // MIB}M"
    # Without the guard: what is deleted after a turn gives its memory back.
    options = ["--store", store, "--ram", ram, "--state", state, "--no-guard"]
    if data_path == "userspace":
        options += ["-o", "data_path=userspace"]

    def unmount() -> None:
        subprocess.run(
            [*command, "unmount", mount_point, "--no-drain"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        detach(mount_point)

    def status() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(run(*command, "status", mount_point, "--json"))
        return found

    def settle() -> None:
        # What `lmstorfs sync` waits for, and deleted files are not waited for at all.
        wait_for(lambda: status()["store"]["pending_files"] == 0, "lmstorfs's flush")

    stack.callback(unmount)
    run(*command, "mount", mount_point, *options)
    found = status()["data_path"]
    if found != data_path:
        raise CannotStartError(f"lmstorfs runs on {found} here: {status()['data_path_reason']}")
    settings = f"--ram {format_size(workspace.ram_bytes)}, store a directory, data path {found}"
    return Target(mount_point, settings, settle)


@contextmanager
def workspace(parent: Path, ram_bytes: int) -> Iterator[Workspace]:
    """Give a folder on the local disk for one run; nothing of it is left afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="lmstorfs-bench-", dir=parent)).resolve()
    try:
        yield Workspace(folder, ram_bytes)
    finally:
        end_processes(folder)
        for point in mounts_under(folder):
            detach(point)
        shutil.rmtree(folder, ignore_errors=True)


def mounts_under(folder: Path) -> list[Path]:
    """Return what is mounted below `folder`, the last mounted first."""
    lines = Path("/proc/mounts").read_text().splitlines()
    points = [Path(line.split()[1]) for line in lines]
    return [point for point in reversed(points) if folder in point.parents]


def end_processes(folder: Path) -> None:
    """Wait for the daemons that were started with `folder` in their words; kill what stays."""

    def daemons() -> list[int]:
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (entry / "cmdline").read_bytes()
                if int(entry.name) != os.getpid() and os.fsencode(folder) in words:
                    found.append(int(entry.name))
        return found

    end = time.monotonic() + DAEMON_EXIT_TIMEOUT_S
    while daemons() and time.monotonic() < end:
        time.sleep(SETTLE_POLL_S)
    for pid in daemons():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
