"""Extended attributes: `user.*`, and `trusted.*` for root."""

import errno
from collections.abc import Sequence

import pyfuse3

from lmstorfs.catalog import NamespaceError
from lmstorfs.fuse.handlers import Handlers, handler

_VALUE_MAX_BYTES = 64 << 10  # XATTR_SIZE_MAX of linux/limits.h
_NAMESPACES = (b"user.", b"trusted.")
_OWN = b"user.lmstorfs."  # what we note for ourselves; not to be seen, copied or set


class XattrOperations(Handlers):
    """The handlers for extended attributes."""

    def _changed(self) -> None:
        """The store's copy of the attributes is behind."""
        raise NotImplementedError

    @handler
    async def setxattr(
        self, inode: int, name: bytes, value: bytes, ctx: pyfuse3.RequestContext
    ) -> None:
        """Set one extended attribute (`user.*`, and `trusted.*` for root)."""
        self._check_writable()
        self._check_xattr(name, ctx)
        if len(value) > _VALUE_MAX_BYTES:
            raise NamespaceError(errno.E2BIG)
        self._catalog.set_xattr(inode, name, value)
        self._changed()

    @handler
    async def getxattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        """Tell one extended attribute."""
        value = self._catalog.xattrs(inode).get(name)
        if value is None:
            raise pyfuse3.FUSEError(pyfuse3.ENOATTR)
        return value

    @handler
    async def listxattr(self, inode: int, ctx: pyfuse3.RequestContext) -> Sequence[bytes]:
        """Tell the names of the extended attributes."""
        return [name for name in self._catalog.xattrs(inode) if not name.startswith(_OWN)]

    @handler
    async def removexattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        """Remove one extended attribute."""
        self._check_writable()
        self._check_xattr(name, ctx)
        if self._done(ctx) is not None:
            return
        with self._catalog.db.once(ctx.pid):
            self._catalog.set_xattr(inode, name, None)
        self._changed()

    def _check_xattr(self, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        if not name.startswith(_NAMESPACES):
            raise NamespaceError(errno.EOPNOTSUPP)
        if name.startswith(_OWN):
            raise NamespaceError(errno.EPERM)
        if name.startswith(b"trusted.") and ctx.uid != 0:
            raise NamespaceError(errno.EPERM)
