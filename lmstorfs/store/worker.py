"""A worker process: digests, uploads and fetches, so that none of it slows the daemon down.

`python -m lmstorfs.store.worker FD PARENT` speaks `wire` over the socket FD. The main thread
only reads frames; every call runs in a thread of its own, and the pool decides how many there
are at once. The worker never outlives its parent, and takes no signal of a terminal or a service
manager for itself: whether a drain goes on is the daemon's decision.
"""

import ctypes
import errno
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec

from lmstorfs.digest import DigestCancelledError, FollowingDigest
from lmstorfs.errors import (
    CorruptCopyError,
    LmstorfsError,
    NoRoomError,
    StoreError,
    SupersededError,
)
from lmstorfs.store import wire
from lmstorfs.store.content import digest_content
from lmstorfs.store.keys import printable
from lmstorfs.store.location import open_store
from lmstorfs.store.records import check_owner
from lmstorfs.store.store import Cancelled, Store

log = logging.getLogger("lmstorfs.worker")

MAX_THREADS = 32  # more than a pool ever has under way in one worker
_REPORT_INTERVAL_S = 0.1  # between two reports of a call's progress
_OWNER_BELIEVED_S = 1.0  # what the store's owner record said
_NICENESS = 5  # training comes first
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class _Line:
    """The socket to the pool; frames are sent whole, by any thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()

    def send(self, message: wire.FromWorker) -> None:
        frame = wire.encode(message)
        with self._lock:
            self._sock.sendall(frame)

    def receive(self) -> wire.ToWorker | None:
        """Return the next message; None once the pool is gone."""
        head = self._exactly(wire.LENGTH_BYTES)
        body = head and self._exactly(int.from_bytes(head, "big"))
        return wire.decode_to_worker(body) if body else None

    def _exactly(self, count: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < count:
            part = self._sock.recv(count - len(parts))
            if not part:
                return None
            parts += part
        return bytes(parts)


class _CallWatch:
    """Tells the pool how far a call is, and the call whether the pool still wants it."""

    def __init__(self, line: _Line, number: int) -> None:
        self._line = line
        self._number = number
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._unreported = 0
        self._reported_at = time.monotonic()
        self.source: _Source | None = None
        self.following: FollowingDigest | None = None
        self.check_owner: Callable[[], None] | None = None

    def cancel(self) -> None:
        self._stop.set()

    def cancelled(self) -> bool:
        return self._stop.is_set()

    def moved(self, count: int) -> None:
        with self._lock:
            self._unreported += count
            due = time.monotonic() - self._reported_at >= _REPORT_INTERVAL_S
        if due:
            self.report()

    def came(self, offset: int, count: int) -> None:
        if self.following is not None:
            self.following.came(offset, count)

    def report(self) -> None:
        """Send what was moved since the last report."""
        with self._lock:
            count, self._unreported = self._unreported, 0
            self._reported_at = time.monotonic()
        if count:
            self._line.send(wire.Moved(self._number, count))

    def began_upload(self, key: str, upload_id: str) -> None:
        self._line.send(wire.Began(self._number, key, upload_id))

    def about_to_publish(self) -> None:
        if self.cancelled():
            raise Cancelled
        if self.source is not None:
            self.source.check()
        if self.check_owner is not None:
            self.check_owner()


class _Source:
    """The file of a version, open; `check` raises where it is not that version any more."""

    def __init__(self, job: wire.Upload) -> None:
        try:
            self.fd = os.open(job.source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError as error:
            raise SupersededError(f"{printable(job.source)} is gone") from error
        self._job = job

    def check(self) -> None:
        status = os.fstat(self.fd)
        if self._job.mtime_ns not in (None, status.st_mtime_ns):
            raise SupersededError(f"{printable(self._job.key)} was written again")
        if status.st_size < self._job.size:
            raise SupersededError(f"{printable(self._job.key)} was truncated")

    def close(self) -> None:
        os.close(self.fd)


class _Worker:
    """The calls under way, and the store that they share."""

    def __init__(self, line: _Line) -> None:
        self._line = line
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="call")
        self._watches: dict[int, _CallWatch] = {}
        self._owner_seen_at = -_OWNER_BELIEVED_S
        self._store: Future[Store]

    def serve(self) -> None:
        """Read frames until the pool is gone."""
        while (message := self._line.receive()) is not None:
            match message:
                case wire.Start(config):
                    self._store = self._threads.submit(open_store, config)
                case wire.Call(number, job):
                    watch = self._watches[number] = _CallWatch(self._line, number)
                    self._threads.submit(self._answer, number, job, watch)
                case wire.Cancel(number):
                    known = self._watches.get(number)  # none: the answer is on its way
                    if known is not None:
                        known.cancel()

    def _answer(self, number: int, job: wire.Job, watch: _CallWatch) -> None:
        answer: wire.FromWorker
        try:
            answer = wire.Done(number, self._do(job, watch))
        except (Cancelled, DigestCancelledError):
            answer = wire.Stopped(number)
        except LmstorfsError as error:
            answer = wire.Failed(number, type(error).__name__, str(error))
        except OSError as error:
            answer = wire.Failed(number, StoreError.__name__, str(error))
        except Exception as error:
            log.exception("a call failed in an unforeseen way")
            answer = wire.Failed(number, StoreError.__name__, f"{type(error).__name__}: {error}")
        watch.report()
        del self._watches[number]
        self._line.send(answer)

    def _do(self, job: wire.Job, watch: _CallWatch) -> wire.Result:
        match job:
            case wire.Digest():
                return self._digest(job, watch)
            case wire.Upload():
                return self._upload(job, watch)
            case wire.Fetch():
                return self._fetch(job, watch)

    def _digest(self, job: wire.Digest, watch: _CallWatch) -> wire.Digested:
        try:
            fd = os.open(job.source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError as error:
            raise SupersededError(f"{printable(job.source)} is gone") from error
        try:
            return wire.Digested(digest=digest_content(fd, job.size, watch))
        finally:
            os.close(fd)

    def _upload(self, job: wire.Upload, watch: _CallWatch) -> wire.Uploaded:
        """Publish a version. Two readings of the source agree before anything is published.

        The store digests what it sends; that this is the digest from before proves that the
        content did not change between the two, even where a mapped write left the mtime alone.
        """
        source = watch.source = _Source(job)
        try:
            source.check()
            digest = job.attributes.digest
            if digest is None or job.verify:
                found = digest_content(source.fd, job.size, watch)
                if digest not in (None, found):
                    raise SupersededError(f"{printable(job.key)} has another digest now")
                digest = found
            attributes = msgspec.structs.replace(job.attributes, digest=digest)
            store = self._store.result()
            if (owner := job.owner) is not None:
                watch.check_owner = lambda: self._check_owner(store, owner)
            info = store.put_file(job.key, source.fd, job.size, attributes, watch)
            return wire.Uploaded(info=info, digest=digest)
        finally:
            source.close()

    def _check_owner(self, store: Store, owner: str) -> None:
        """Look whether another node has taken over; small files share what was just seen."""
        if time.monotonic() - self._owner_seen_at > _OWNER_BELIEVED_S:
            check_owner(store, owner)
            self._owner_seen_at = time.monotonic()

    def _fetch(self, job: wire.Fetch, watch: _CallWatch) -> wire.Fetched:
        store = self._store.result()
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(job.target, flags, 0o600)
        try:
            _reserve(fd, job.size)
            with FollowingDigest(fd, watch.cancelled) as watch.following:
                store.fetch(job.key, fd, job.size, watch, etag=job.etag)
                digest = watch.following.result(job.size)
            if job.digest not in (None, digest):
                raise CorruptCopyError(f"{printable(job.key)}: the store's copy is corrupt")
        except BaseException:
            with suppress(FileNotFoundError):
                Path(job.target).unlink()
            raise
        finally:
            os.close(fd)
        return wire.Fetched(digest=digest)


def _reserve(fd: int, size: int) -> None:
    """Have the room before the first byte is asked for."""
    if size == 0:
        return
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise NoRoomError(f"no room for {size} bytes") from error
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise


def _tie_to_parent(parent: int) -> None:
    """Die with the parent, even if it is killed; and at once if it died before we asked."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit(0)


def main() -> None:
    """Serve the pool whose socket and process number the command line tells."""
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    _tie_to_parent(parent)
    os.nice(_NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(stream=sys.stderr, format="worker %(process)d: %(message)s")
    with socket.socket(fileno=fd) as sock:
        _Worker(_Line(sock)).serve()
    os._exit(0)  # calls under way have nobody to answer, and must not hold the process


if __name__ == "__main__":
    main()
