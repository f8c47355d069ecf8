"""What the flusher knows of the store's health, and when to ask it again."""

import random
import time

import msgspec

from lmstorfs.errors import StoreError, StoreUnreachableError

RETRY_FIRST_S = 0.5
RETRY_MAX_S = 60.0  # a store that was gone for an hour is found back within a minute


class StoreHealth(msgspec.Struct, kw_only=True):
    """State of the store as the last answers showed it. Times are seconds since the epoch."""

    state: str = "ok"
    """`ok` or `unreachable`."""
    since: float | None = None
    retries: int = 0
    last_error: str | None = None

    def succeeded(self) -> None:
        """The store did what it was asked."""
        self.state, self.since = "ok", None

    def failed(self, error: StoreError) -> None:
        """The store failed; it is tried again."""
        self.retries += 1
        self.last_error = str(error)
        if self.since is None:
            self.since = time.time()
        if isinstance(error, StoreUnreachableError):
            self.state = "unreachable"

    @property
    def degraded_reason(self) -> str | None:
        """One line for a person; None while all is well."""
        if self.since is None:
            return None
        since = time.strftime("%H:%M:%S", time.localtime(self.since))
        what = "unreachable" if self.state == "unreachable" else "failing"
        return f"store {what} since {since}: {self.last_error}"


class Backoff:
    """Waits that double, with jitter, so that many that failed at once do not return at once."""

    def __init__(self) -> None:
        self._waits: dict[int, tuple[float, float]] = {}  # what → (last wait, not before)

    def failed(self, what: int, now: float) -> None:
        """`what` failed at `now` (a monotonic clock, seconds).

        Several that were under way together and fail together are one failure.
        """
        last, not_before = self._waits.get(what, (RETRY_FIRST_S / 2, 0.0))
        if now < not_before:
            return
        wait = min(2 * last, RETRY_MAX_S)
        self._waits[what] = (wait, now + wait * random.uniform(0.5, 1.0))

    def succeeded(self, what: int) -> None:
        """`what` worked."""
        self._waits.pop(what, None)

    def forgive_all(self) -> None:
        """The store is back: nothing needs to wait any more."""
        self._waits.clear()

    def not_before(self, what: int) -> float:
        """Return when `what` may be tried again; 0 when at once."""
        return self._waits.get(what, (0.0, 0.0))[1]
