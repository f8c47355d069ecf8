"""The saves of a script that believes they are done, and when it must wait for them after all.

Whoever looks at a file that is still on its way waits for it. So does what could lose something:
a removal, a rename, a file that is written over (as the pointer to the newest checkpoint is), a
program that is started. Everything else goes on.
"""

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from lmstorfs.errors import SaveError
from lmstorfs.torch.checkpointer import Checkpointer
from lmstorfs.torch.handle import SaveHandle

_LOOKING = ("os.listdir", "os.scandir", "os.chmod", "os.chown", "os.utime", "os.setxattr")
_LOSING = ("os.remove", "os.rename", "os.rmdir", "os.truncate", "os.link", "os.symlink")
_STARTING = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system")
_STATS = ("stat", "lstat", "access")
_OVERWRITING = os.O_TRUNC | os.O_APPEND | os.O_WRONLY | os.O_RDWR


class Pending:
    """The saves under way of this process."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        self.checkpointer = checkpointer
        self._saves: dict[str, SaveHandle] = {}
        self._inside = threading.local()
        self._leave = os._exit

    def save(self, state: Any, path: str, **options: Any) -> None:
        """Save to `path`; raises what `Checkpointer.save` raises."""
        with self._ours():
            handle = self.checkpointer.save(state, path, **options)
        self._saves[os.path.realpath(path)] = handle

    def wait(self, path: str | None = None) -> None:
        """Wait for the save to `path`, or at or below it; None: for all. Raises `SaveError`."""
        if not self._saves or self._is_ours():
            return
        for saved, handle in list(self._saves.items()):
            if handle.done and handle.error is None:
                self._saves.pop(saved, None)
            elif path is None or saved == path or saved.startswith(path.rstrip("/") + "/"):
                self._saves.pop(saved, None)
                handle.written()

    @contextlib.contextmanager
    def _ours(self) -> Iterator[None]:
        before, self._inside.now = getattr(self._inside, "now", False), True
        try:
            yield
        finally:
            self._inside.now = before

    def _is_ours(self) -> bool:
        """Whether this is a thread, or a call, of the checkpointer."""
        here = threading.current_thread()
        return here.name.startswith("lmstorfs") or getattr(self._inside, "now", False)

    # --- what the script does ------------------------------------------------------------------

    def watch(self) -> None:
        """Hear of all that this process does to files, from now until it ends."""
        sys.addaudithook(self._hear)
        atexit.unregister(self.checkpointer.close)
        atexit.register(self._at_the_end)
        for name in _STATS:
            _replace(name, self._looks_first(getattr(os, name)))

        def wait_and_leave(status: int) -> None:
            self.wait()
            self._leave(status)

        os._exit = wait_and_leave  # type: ignore[assignment]

    def _at_the_end(self) -> None:
        try:
            self.checkpointer.close()
        except SaveError as error:
            # Nobody can catch it any more; whoever started the script must not take it for done.
            print(f"lmstorfs: {error}", file=sys.stderr, flush=True)  # noqa: T201
            self._leave(1)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._saves or self._is_ours():
            return
        if event == "open":
            self._hear_open(*arguments[:3])
        elif event in _LOSING or event in _STARTING:
            self.wait()
        elif event in _LOOKING:
            self.wait(self._real(arguments[0]))

    def _hear_open(self, path: Any, mode: Any, flags: Any) -> None:
        name = self._real(path)
        if name is None:
            return
        self.wait(name)
        writes = isinstance(flags, int) and flags & _OVERWRITING
        if self._saves and writes and os.path.lexists(name):
            self.wait()

    def _looks_first(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def look(path: Any, *arguments: Any, **named: Any) -> Any:
            if self._saves and not self._is_ours() and (name := self._real(path)) is not None:
                self.wait(name)
            return call(path, *arguments, **named)

        return look

    def _real(self, path: Any) -> str | None:
        """Return where `path` leads to; None for a descriptor, and what is no path."""
        if path is None:
            path = "."  # os.listdir()
        if isinstance(path, int):
            return None
        with self._ours():  # to follow links means to look at them
            try:
                return os.path.realpath(os.fsdecode(path))
            except (TypeError, ValueError):
                return None


def _replace(name: str, call: Callable[..., Any]) -> None:
    old = getattr(os, name)
    for known in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        if old in known:
            known.add(call)
    setattr(os, name, call)
