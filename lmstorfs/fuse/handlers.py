"""What all FUSE handlers share: errors become an errno, and what was done is not done twice."""

import errno
import functools
from collections.abc import Awaitable, Callable, Container, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

import pyfuse3
import structlog

from lmstorfs.catalog import NamespaceError, SqliteCatalog
from lmstorfs.errors import LmstorfsError, errno_of

log = structlog.get_logger()

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Self = TypeVar("_Self")


def handler(
    method: Callable[Concatenate[_Self, _P], Awaitable[_R]],
) -> Callable[Concatenate[_Self, _P], Coroutine[Any, Any, _R]]:
    """Turn whatever a handler raises into the errno that its caller sees."""

    @functools.wraps(method)
    async def wrapper(self: _Self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return await method(self, *args, **kwargs)
        except pyfuse3.FUSEError:
            raise
        except (LmstorfsError, OSError) as error:
            code = errno_of(error)
            if code == errno.EIO:
                log.error("operation failed", op=method.__name__, error=str(error))
            raise pyfuse3.FUSEError(code) from error
        except Exception as error:
            log.exception("operation failed", op=method.__name__)
            raise pyfuse3.FUSEError(errno.EIO) from error

    return wrapper  # type: ignore[return-value]  # mypy sees a class of functools here


class Handlers(pyfuse3.Operations):
    """What may be done only once is noted under the request's number, in its own transaction.

    The channel tells the number in the place of the caller's process id. A daemon that died
    before it answered is asked the same again.
    """

    def __init__(self, catalog: SqliteCatalog, resent: Container[int], *, read_only: bool) -> None:
        """Take `resent`: numbers of requests that an earlier daemon may have done already."""
        super().__init__()
        self._catalog = catalog
        self._resent = resent
        self._read_only = read_only

    def _done(self, ctx: pyfuse3.RequestContext) -> int | None:
        """Return the inode that came of the request already (0: none); None: it is to be done."""
        return self._catalog.db.done(ctx.pid) if ctx.pid in self._resent else None

    def _check_writable(self) -> None:
        if self._read_only:
            raise NamespaceError(errno.EROFS)
