"""Whose close(2) it is: the writer's own, or that of a copy of its descriptor in another process.

A process that starts another while it saves (a fork, and an exec that closes what was inherited)
sends a FLUSH for a file that is half written. That is no close of the writer: a version of it would
be torn. The process that opened the file tells the two apart, as long as it lives; after that,
whoever has the descriptor is the writer.
"""

from pathlib import Path

from lmstorfs.fuse.handle import handle_writable


class Closers:
    """The processes that have opened files for writing, by handle."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._openers: dict[int, dict[int, int]] = {}  # handle → thread → how many opens

    def opened(self, handle: int, thread: int) -> None:
        """A thread (as FUSE tells it: 0 where it is in no namespace of ours) opened a file."""
        if handle_writable(handle):
            threads = self._openers.setdefault(handle, {})
            threads[thread] = threads.get(thread, 0) + 1

    def released(self, handle: int, opens_left: int) -> None:
        """One open of the handle is over; which of them is not told."""
        if not opens_left:
            self._openers.pop(handle, None)

    def is_foreign(self, handle: int, thread: int) -> bool:
        """Whether a FLUSH by `thread` is of a copy that another process has of the descriptor."""
        openers = self._openers.get(handle)
        if not openers or thread in openers or thread == 0 or 0 in openers:
            return False
        process = self._process(thread)
        living = {self._process(opener) for opener in openers} - {None}
        return bool(living) and process is not None and process not in living

    def _process(self, thread: int) -> int | None:
        """Return the process of a thread; None for one that has ended."""
        try:
            status = (self._proc / str(thread) / "status").read_text(errors="replace")
        except OSError:
            return None
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        # A process that was killed is no writer any more, though its parent has not asked yet.
        ended = fields.get("State", "").strip().startswith(("Z", "X"))
        return None if ended or "Tgid" not in fields else int(fields["Tgid"])
