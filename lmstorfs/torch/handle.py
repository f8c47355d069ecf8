"""What `save` returns: one checkpoint on its way, and the waiting for each level of its safety."""

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from lmstorfs.errors import SaveError

_POLL_S = 0.0005


class _TooLateError(Exception):
    """Ends the wait for a daemon that goes on telling how far it is."""


class SaveHandle:
    """One checkpoint on its way.

    Each waiting method returns when its level is reached, and raises `TimeoutError` after
    `timeout_s` seconds (None: never), or `SaveError`, with the path in it, when the save failed.
    """

    def __init__(self, path: str, forget: Callable[["SaveHandle"], None]) -> None:
        self.path = path
        self.error: SaveError | None = None
        """Why it failed, if it did."""
        self.events: dict[torch.device, Any] = {}
        self._forget = forget
        self._enqueued = threading.Event()
        self._lent = 0
        self._returned = threading.Condition()
        self._written = threading.Event()

    @property
    def done(self) -> bool:
        """Whether the file is there under its own name, or the save failed."""
        return self._written.is_set()

    # --- waiting -----------------------------------------------------------------------------

    def staged(self, timeout_s: float | None = None) -> None:
        """Wait until parameters may change, and all other tensors that were given."""
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        self.wait_enqueued(timeout_s)
        for event in self.events.values():
            while not event.query():
                if give_up is not None and time.monotonic() > give_up:
                    self._late("staged", timeout_s)
                time.sleep(_POLL_S)
        self._raise()

    def wait_enqueued(self, timeout_s: float | None = None) -> None:
        """Wait until all copies from GPUs are ordered and all lent memory was read."""
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._enqueued.wait(timeout_s):
            self._late("staged", timeout_s)
        with self._returned:
            while self._lent > 0:
                left = None if give_up is None else give_up - time.monotonic()
                if left is not None and left <= 0:
                    self._late("staged", timeout_s)
                self._returned.wait(left)

    def written(self, timeout_s: float | None = None) -> None:
        """Wait until the file is whole under its own name (on a mount: in its RAM tier)."""
        if not self._written.wait(timeout_s):
            self._late("written", timeout_s)
        self._raise()

    def mirrored(self, timeout_s: float | None = None) -> None:
        """Wait until the mount's mirror has the file (or its store, which is as good).

        Raises `SetupError` where the path is on no lmstorfs mount, or that has no mirror.
        """
        self._wait_for("mirror", timeout_s)

    def stored(self, timeout_s: float | None = None) -> None:
        """Wait until the mount's store has the file.

        Raises `SetupError` where the path is on no lmstorfs mount.
        """
        self._wait_for("store", timeout_s)

    def _wait_for(self, copies: str, timeout_s: float | None) -> None:
        from lmstorfs.control_client import ControlClient
        from lmstorfs.mounts import locate

        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        self.written(timeout_s)

        def look(progress: dict[str, Any]) -> None:
            if give_up is not None and time.monotonic() > give_up:
                raise _TooLateError

        found, path = locate(self.path)
        try:
            ControlClient(found.state).call("wait", on_progress=look, path=path, copies=copies)
        except _TooLateError:
            self._late(f"in the {copies}", timeout_s)

    def _late(self, level: str, timeout_s: float | None) -> None:
        raise TimeoutError(f"{self.path} is not {level} after {timeout_s:g} s")

    def _raise(self) -> None:
        if self.error is not None:
            self._forget(self)
            raise self.error

    # --- the threads' side -------------------------------------------------------------------

    def lend(self) -> None:
        """One more stretch of the caller's own memory is to be read."""
        with self._returned:
            self._lent += 1

    def returned(self) -> None:
        """A lent stretch was read, or will not be."""
        with self._returned:
            self._lent -= 1
            self._returned.notify_all()

    def enqueued(self) -> None:
        """All copies are ordered."""
        self._enqueued.set()

    def finished(self, error: BaseException | None) -> None:
        """The file is there, or it never will be."""
        if error is not None:
            self.error = failure(self.path, error)
        self._enqueued.set()
        self._written.set()


def failure(path: str, error: BaseException) -> SaveError:
    """Return the error that tells of `path` and why."""
    if isinstance(error, SaveError) and str(error).startswith(path):
        return error
    kind = type(error) if isinstance(error, SaveError) else SaveError
    reason = str(error)
    if isinstance(error, OSError) and error.strerror:
        reason = error.strerror
    told = kind(f"{path}: {reason}")
    told.__cause__ = error
    told.errno = getattr(error, "errno", None) or told.errno
    return told
