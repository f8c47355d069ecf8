"""How a mount comes to be and goes: the state directory, the keeper, and what it answers.

What fails leaves nothing behind: neither a mount, nor a process, nor a state directory that was
not there before. Only the log of a keeper that died without a word stays, since it is the one
thing that tells why.
"""

import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from lmstorfs.config import PARTS, MountConfig, write_config
from lmstorfs.errors import SetupError
from lmstorfs.mounts import detach, is_mounted, lock_held, lock_pid, mounted_filesystems
from lmstorfs.validation import wait_until_free

READY_TIMEOUT_S = 600.0  # adopting a large tier after a crash may take minutes; for ever it is not
STOP_TIMEOUT_S = 20.0
GONE_TIMEOUT_S = 60.0
POLL_S = 0.05


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """What the keeper says when the mount answers, or why there is none."""

    ready: bool = False
    data_path: str = "userspace"
    reason: str | None = None
    error: str | None = None
    exit_code: int = 1


class _DiedError(SetupError):
    """The keeper ended without a word."""


class StateDirectory:
    """The state directory of a mount that is being made; a context that undoes on failure."""

    def __init__(self, config: MountConfig) -> None:
        self._config = config
        self._path = config.state
        self._made: list[Path] = []
        self._old_config: bytes | None = None

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Have the directory there, locked against other `mount` commands, config written."""
        self._make()
        descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._claim(descriptor)
            try:
                self._write()
                yield
            except BaseException as error:
                self._undo(keep_log=isinstance(error, _DiedError))
                raise
        finally:
            os.close(descriptor)

    def _make(self) -> None:
        missing = [p for p in (self._path, *self._path.parents) if not p.exists()]
        for path in reversed(missing):
            path.mkdir(mode=0o755)
            self._made.insert(0, path)
        self._path.chmod(0o700)

    def _claim(self, descriptor: int) -> None:
        """Hold the directory itself while starting: `STATE/lock` is the keeper's to take."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SetupError(
                f"another `lmstorfs mount` is starting with the state directory {self._path}; "
                "wait for it, or give another --state"
            ) from None
        wait_until_free(self._path, lambda _line: None)

    def _write(self) -> None:
        config = self._path / PARTS["config"]
        self._old_config = config.read_bytes() if config.exists() else None
        write_config(self._config)
        if self._config.store.url == str(self._path / PARTS["store"]):
            (self._path / PARTS["store"]).mkdir(exist_ok=True)

    def _undo(self, *, keep_log: bool) -> None:
        if is_mounted(self._config.mountpoint) and not lock_held(self._path):
            detach(self._config.mountpoint)
        if self._path not in self._made:
            if self._old_config is not None:
                (self._path / PARTS["config"]).write_bytes(self._old_config)
            return
        self._drop_ram()
        self._remove(keep_log=keep_log)

    def _drop_ram(self) -> None:
        """Give the memory back of a RAM tier that never held a file."""
        ram = self._path / PARTS["ram"]
        for entry in mounted_filesystems():
            if entry.mountpoint == str(ram):
                detach(str(ram))
        if ram.is_symlink():  # the keeper's stand-in where it may not mount
            shutil.rmtree(ram.resolve(), ignore_errors=True)

    def _remove(self, *, keep_log: bool) -> None:
        for path in self._path.iterdir():
            if keep_log and path.name == PARTS["log"]:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        for path in self._made:
            if any(path.iterdir()):
                break
            path.rmdir()


def start(config: MountConfig, *, foreground: bool) -> tuple[Ready, "Keeper"]:
    """Make the mount that `config` tells of; return when it answers."""
    with StateDirectory(config).prepared():
        keeper = Keeper(config.state, foreground=foreground)
        try:
            ready = keeper.wait_until_ready()
            if foreground:  # before anyone is told that the mount is there, and ends it
                keeper.forward_signals()
            return ready, keeper
        except BaseException:
            keeper.stop()
            raise


def keeper_command(state: Path, ready_fd: int) -> list[str]:
    """Return the command line of the keeper."""
    command = [sys.executable, "-m", "lmstorfs.keeper"]
    return [*command, "--state", str(state), "--ready-fd", str(ready_fd)]


class Keeper:
    """The keeper process, as the command that started it sees it."""

    def __init__(self, state: Path, *, foreground: bool) -> None:
        self._state = state
        self._foreground = foreground
        self._handlers: dict[int, Any] = {}  # what was there before `forward_signals`
        read_end, write_end = os.pipe()
        try:
            self._process = self._spawn(write_end)
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        self._ready_fd = read_end

    def _spawn(self, write_end: int) -> "subprocess.Popen[bytes]":
        command = keeper_command(self._state, write_end)
        if self._foreground:  # its own group: Ctrl-C reaches it once, forwarded
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[write_end], process_group=0
            )
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        log = os.open(self._state / PARTS["log"], flags, 0o600)
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[write_end],
                start_new_session=True,
            )
        finally:
            os.close(log)

    def wait_until_ready(self) -> Ready:
        """Return what the keeper says; raises `SetupError` where it says no, or nothing."""
        try:
            line = self._read_line()
        finally:
            os.close(self._ready_fd)
        if not line:
            raise _DiedError(self._last_words())
        answer = msgspec.json.decode(line, type=Ready)
        if answer.error is not None or not answer.ready:
            error = SetupError(answer.error or "the keeper failed")
            error.exit_code = answer.exit_code
            with suppress(subprocess.TimeoutExpired):  # else `start` ends it
                self._process.wait(STOP_TIMEOUT_S)  # it cleans up after itself
            raise error
        return answer

    def _read_line(self) -> bytes:
        received = b""
        give_up = time.monotonic() + READY_TIMEOUT_S
        while b"\n" not in received:
            left = give_up - time.monotonic()
            if left <= 0 or not select.select([self._ready_fd], [], [], left)[0]:
                raise SetupError(
                    f"the mount did not answer within {READY_TIMEOUT_S:.0f} s and was given up"
                )
            more = os.read(self._ready_fd, 1 << 16)
            if not more:
                return b""
            received += more
        return received.partition(b"\n")[0]

    def _last_words(self) -> str:
        if self._foreground:
            return "the keeper died; what it said stands above"
        log = self._state / PARTS["log"]
        lines = log.read_text(errors="replace").strip().splitlines()
        said = lines[-1].strip() if lines else "it said nothing"
        return f"the keeper died: {said}; its log is {log}"

    def stop(self) -> None:
        """End a keeper whose mount is not wanted; it is given time to clean up."""
        if self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def forward_signals(self) -> None:
        """Pass SIGINT and SIGTERM on to the keeper from now on."""

        def forward(number: int, _frame: FrameType | None) -> None:
            self._process.send_signal(number)

        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers.setdefault(number, signal.signal(number, forward))

    def wait_in_foreground(self) -> int:
        """Return the keeper's exit code; signals are passed on to it until then."""
        self.forward_signals()
        try:
            code = self._process.wait()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        return 128 - code if code < 0 else code


def wait_until_gone(mountpoint: str, state: Path) -> None:
    """Return when neither the kernel nor a keeper knows the mount any more."""
    give_up = time.monotonic() + GONE_TIMEOUT_S
    while is_mounted(mountpoint) or lock_held(state):
        if time.monotonic() > give_up:
            raise SetupError(
                f"{mountpoint} is unmounted, but its keeper (pid {lock_pid(state)}) does not end; "
                f"its log is {state / PARTS['log']}"
            )
        time.sleep(POLL_S)


def clear_dead_mount(mountpoint: str, state: Path | None) -> str | None:
    """Take a mount away whose daemon is dead; return a warning where data may be left in tiers."""
    while is_mounted(mountpoint):
        detach(mountpoint)
    if state is None or not (state / PARTS["catalog"]).exists():
        return None
    return (
        f"the daemon of {mountpoint} was dead; its mount is taken away, and what was not yet "
        f"stored stays in the tiers: run `lmstorfs mount {mountpoint} …` again to bring it to "
        "the store"
    )
