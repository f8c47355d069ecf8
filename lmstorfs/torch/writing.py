"""One file written from its beginning to its end, under a temporary name until it is whole."""

import errno
import os
import queue
import re
import socket
import stat
import threading
from pathlib import Path

from lmstorfs.torch.handle import SaveHandle
from lmstorfs.torch.pool import Pool
from lmstorfs.torch.staging import Stretch

_TOKEN = re.compile(r"\.(?P<host>[^/]+)-(?P<pid>\d+)-\d+\.tmp")
_NAME_BYTES_MAX = 255


class FileWriter:
    """Writes what the stager puts; made where `save` was called, so that a bad path is told there.

    The name is the file's own, hidden, with the host, the process and `.tmp`: neither a store nor
    a search for the newest checkpoint takes it for one, and what a killed process left is found.
    """

    def __init__(self, path: str, handle: SaveHandle, pool: Pool, number: int) -> None:
        """Raise `OSError` where no file can be made there."""
        self.handle = handle
        self._pool = pool
        self._target = os.path.realpath(path)  # as open(2) does, a link is followed
        folder, name = os.path.split(self._target)
        remove_remains(folder, name)
        token = f".{_host()}-{os.getpid()}-{number}.tmp"
        stem = os.fsdecode(os.fsencode(name)[: _NAME_BYTES_MAX - 1 - len(token)])
        self._temporary = f"{folder}/.{stem}{token}"
        self._stretches: queue.SimpleQueue[Stretch | BaseException | None] = queue.SimpleQueue()
        self._started = threading.Event()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._fd = os.open(self._temporary, flags, 0o666)
        try:
            self._take_mode()
        except BaseException:
            self._discard()
            raise

    def _take_mode(self) -> None:
        """Have the mode of the file that is to be replaced; it must be one."""
        try:
            old = Path(self._target).stat()
        except FileNotFoundError:
            return
        if stat.S_ISDIR(old.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not os.access(self._target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        os.fchmod(self._fd, stat.S_IMODE(old.st_mode))

    # --- the stager's side -------------------------------------------------------------------

    def put(self, stretch: Stretch) -> None:
        """Give the next bytes."""
        if stretch.lender is not None:
            self.handle.lend()
        self._stretches.put(stretch)

    def start(self) -> None:
        """Write what there is, and not only when all is staged.

        Until then the copies, which the training may be waiting for, have memory and processors
        for themselves.
        """
        self._started.set()

    def end(self, error: BaseException | None = None) -> None:
        """There are no more; with `error` the file is not to be."""
        self._stretches.put(error)
        self._started.set()

    # --- the writing thread's side -----------------------------------------------------------

    def run(self) -> None:
        """Write until the end, and give the file its name. What fails is the handle's to tell."""
        failed: BaseException | None = None
        self._started.wait()
        while isinstance(stretch := self._stretches.get(), Stretch):
            try:
                for event in stretch.events:  # also before others may have the chunk
                    event.synchronize()
                if failed is None:
                    for start, end, touch in stretch.touches:
                        touch(stretch.view[start:end])
                    self._write(stretch.view)
            except (OSError, RuntimeError) as error:  # CUDA's are of the second kind
                failed = failed or error
            finally:
                self._let_go(stretch)
        failed = failed or stretch
        try:
            if failed is None:
                self._publish()
        except OSError as error:
            failed = error
        if failed is not None:
            self._discard()
        self.handle.finished(failed)

    def _write(self, left: memoryview) -> None:
        while left:
            left = left[os.write(self._fd, left) :]

    def _let_go(self, stretch: Stretch) -> None:
        if stretch.chunk is not None:
            self._pool.give_back(stretch.chunk)
        if stretch.lender is not None:
            self.handle.returned()

    def _publish(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)
        Path(self._temporary).replace(self._target)

    def _discard(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        Path(self._temporary).unlink(missing_ok=True)


def remove_remains(folder: str, name: str) -> None:
    """Remove what killed processes of this host left of earlier saves of the file."""
    begin = f".{name}"
    with os.scandir(folder) as entries:
        remains = [entry.name for entry in entries if entry.name.startswith(begin)]
    for remain in remains:
        found = _TOKEN.fullmatch(remain[len(begin) :])
        if found is None or found["host"] != _host() or _is_alive(int(found["pid"])):
            continue
        Path(folder, remain).unlink(missing_ok=True)


def _host() -> str:
    return socket.gethostname() or "localhost"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
