"""Reading a file's content for a transfer: exact, in pieces, and safe against who changes it.

With `pread` rather than `mmap`: the file belongs to somebody who may truncate it at any moment,
and a mapped page that is gone is a SIGBUS that takes the whole worker along, while a short read
is only a `SupersededError`.
"""

import os

from lmstorfs.digest import DigestCancelledError, digest_fd
from lmstorfs.errors import SupersededError
from lmstorfs.store.store import Cancelled, Watch


def read_exactly(fd: int, view: memoryview, offset: int) -> None:
    """Fill `view` from `offset` of `fd`; raises `SupersededError` where the file is shorter."""
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            raise SupersededError(f"the file ends at {offset + done} bytes: it was truncated")
        done += count


def write_exactly(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at `offset` of `fd`."""
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def digest_content(fd: int, size: int, watch: Watch) -> str:
    """Return the xxh3-128 of the first `size` bytes of `fd`, as `lmstorfs.digest` writes it."""
    try:
        return digest_fd(fd, size, watch.cancelled)
    except EOFError as error:
        raise SupersededError(f"it was truncated: {error}") from error
    except DigestCancelledError as error:
        raise Cancelled from error


def check_digest(found: str, expected: str | None) -> None:
    """Raise `SupersededError` where the content that was read is not the version's."""
    if expected is not None and found != expected:
        raise SupersededError("the file changed while it was read: its digest is another one")


def check_cancelled(watch: Watch) -> None:
    """Raise `Cancelled` if the transfer is to be given up."""
    if watch.cancelled():
        raise Cancelled
