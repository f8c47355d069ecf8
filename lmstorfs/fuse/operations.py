"""The FUSE operations as pyfuse3 calls them: names and attributes.

Bytes do not come here (`channel.py`). Every handler answers from the catalog; only a look at a
directory that is not known yet, and an fsync, wait for anything.
"""

import errno
import os
import stat
import time
from collections.abc import Container, Sequence

import pyfuse3

from lmstorfs.catalog import Inode, NamespaceError, SqliteCatalog
from lmstorfs.fuse.attributes import changed_mode, entry_of, mode_after_chown
from lmstorfs.fuse.handle import handle_ino
from lmstorfs.fuse.handlers import handler
from lmstorfs.fuse.handles import OpenFiles
from lmstorfs.fuse.refresh import Refresher
from lmstorfs.fuse.space import SpaceReport
from lmstorfs.fuse.xattrs import XattrOperations

_READDIR_BATCH = 512


class Operations(XattrOperations):
    """One mount."""

    supports_dot_lookup = False
    enable_writeback_cache = False

    def __init__(
        self,
        catalog: SqliteCatalog,
        opened: OpenFiles,
        refresher: Refresher,
        space: SpaceReport,
        *,
        resent: Container[int],
        attr_timeout_s: float,
        read_only: bool,
    ) -> None:
        super().__init__(catalog, resent, read_only=read_only)
        self._files = opened
        self._refresher = refresher
        self._space = space
        self._attr_timeout_s = attr_timeout_s

    def _changed(self) -> None:
        self._files.flusher.wake()

    # --- looking -----------------------------------------------------------------------------

    def _entry(self, inode: Inode) -> pyfuse3.EntryAttributes:
        return entry_of(inode, self._files.stat(inode.ino), self._attr_timeout_s)

    async def _find(self, parent: int, name: bytes) -> Inode:
        await self._refresher.look(self._catalog.get(parent))
        inode = self._catalog.lookup(parent, name)
        if inode is None:
            raise NamespaceError(errno.ENOENT)
        return inode

    @handler
    async def lookup(
        self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        """Find a name."""
        inode = await self._find(parent_inode, name)
        if inode.needs_head:
            await self._refresher.complete([inode])
            inode = self._catalog.get(inode.ino)
        return self._entry(inode)

    @handler
    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        """Tell the attributes."""
        return self._entry(self._catalog.get(inode))

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        """Let unlinked inodes go that the kernel does not know any more."""
        for ino, _ in inode_list:
            if not self._files.is_open(ino):
                self._catalog.purge(ino)

    @handler
    async def readlink(self, inode: int, ctx: pyfuse3.RequestContext) -> bytes:
        """Tell a symlink's target."""
        return await self._refresher.link_target(self._catalog.get(inode))

    @handler
    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        """A directory's handle is its inode: it has no state to lose."""
        await self._refresher.look(self._catalog.get(inode))
        return inode

    @handler
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        """List names with their attributes, in the order in which they were made."""
        while True:
            batch = self._catalog.children(fh, start_id, _READDIR_BATCH)
            if any(entry.inode.needs_head for entry in batch):
                await self._refresher.complete(entry.inode for entry in batch)
                batch = self._catalog.children(fh, start_id, _READDIR_BATCH)
            for entry in batch:
                attributes = self._entry(entry.inode)
                if not pyfuse3.readdir_reply(token, entry.name, attributes, entry.cookie):
                    return
                start_id = entry.cookie
            if len(batch) < _READDIR_BATCH:
                return

    async def releasedir(self, fh: int) -> None:
        """Nothing is held for an open directory."""

    @handler
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        """Wait until the mirror has the names, too."""
        await self._files.versions.fsync_names()

    @handler
    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        """Tell how much room there is."""
        return await self._space.statfs(self._catalog.count())

    # --- names -------------------------------------------------------------------------------

    def _make(
        self, parent: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext,
        *, rdev: int = 0, target: bytes | None = None, writing: bool = False,
        tier: str | None = None,
    ) -> Inode:  # fmt: skip
        self._check_writable()
        if not stat.S_ISLNK(mode):
            mode &= ~ctx.umask
        done = self._done(ctx)
        if done is not None:
            return self._catalog.get(done)
        with self._catalog.db.once(ctx.pid) as note:
            inode = self._catalog.create(
                parent, name, mode=mode, uid=ctx.uid, gid=ctx.gid, rdev=rdev, target=target,
                writing=writing, tier=tier,
            )  # fmt: skip
            note(inode.ino)
        return inode

    @handler
    async def mkdir(
        self, parent_inode: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        """Make a directory."""
        inode = self._make(parent_inode, name, stat.S_IFDIR | stat.S_IMODE(mode), ctx)
        self._refresher.made_here(inode.ino)
        self._files.flusher.wake()
        return self._entry(inode)

    @handler
    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        """Make a regular file, a FIFO or a socket; devices are refused."""
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            raise NamespaceError(errno.EPERM)
        inode = self._make(parent_inode, name, mode, ctx, rdev=rdev)
        if inode.is_file:
            handle = await self._files.open(inode.ino, os.O_WRONLY | os.O_TRUNC)
            self._files.release(handle)
        else:
            self._catalog.contents.kept_here(inode.ino)
        return self._entry(self._catalog.get(inode.ino))

    @handler
    async def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        """Make a symlink."""
        inode = self._make(parent_inode, name, stat.S_IFLNK | 0o777, ctx, target=target)
        self._files.flusher.wake()
        return self._entry(inode)

    @handler
    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        """Hard links are refused: one file is one object."""
        raise NamespaceError(errno.EPERM)

    @handler
    async def unlink(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        """Remove a name; who has the file open keeps it."""
        self._check_writable()
        if self._done(ctx) is not None:
            return
        inode = await self._find(parent_inode, name)
        with self._catalog.db.once(ctx.pid):
            self._files.guard.losing_name(inode)
            gone = self._catalog.unlink(parent_inode, name)
        self._gone(gone)

    @handler
    async def rmdir(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        """Remove an empty directory."""
        self._check_writable()
        if self._done(ctx) is not None:
            return
        inode = await self._find(parent_inode, name)
        if inode.is_dir:
            await self._refresher.look(inode)
        with self._catalog.db.once(ctx.pid):
            self._catalog.rmdir(parent_inode, name)

    @handler
    async def rename(
        self, parent_inode_old: int, name_old: bytes, parent_inode_new: int, name_new: bytes,
        flags: int, ctx: pyfuse3.RequestContext,
    ) -> None:  # fmt: skip
        """Rename, replacing what is there."""
        self._check_writable()
        if self._done(ctx) is not None:
            return
        inode = await self._find(parent_inode_old, name_old)
        await self._refresher.look(self._catalog.get(parent_inode_new))
        with self._catalog.db.once(ctx.pid):
            target = self._catalog.lookup(parent_inode_new, name_new)
            if target is not None and target.ino != inode.ino and not flags:
                self._files.guard.losing_name(target)
            replaced = self._catalog.rename(
                parent_inode_old, name_old, parent_inode_new, name_new, flags
            )
        if replaced is not None:
            self._gone(replaced)
        opened = None
        moved = self._catalog.lookup(parent_inode_new, name_new)
        if moved is not None:
            opened = self._files.get(moved.ino)
        if opened is not None:
            opened.name = name_new
        self._files.flusher.wake()

    def _gone(self, inode: Inode) -> None:
        """An inode lost its name: stop what is under way for it, free what nobody has open."""
        self._files.flusher.cancel(inode.ino)
        if self._files.guard.keeps(inode.ino):
            return
        self._files.digester.forget(inode.ino)
        if not self._files.is_open(inode.ino):
            self._files.placement.drop(inode.ino, inode.tier)

    # --- files -------------------------------------------------------------------------------

    @handler
    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: pyfuse3.RequestContext
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        """Make a file and open it."""
        tier, wanted = self._files.home(name)
        again = self._done(ctx) is not None
        inode = self._make(
            parent_inode, name, stat.S_IFREG | stat.S_IMODE(mode), ctx, writing=True, tier=tier.name
        )
        if again:  # whatever else was done for it is lost with the daemon that did it
            handle = await self._files.open(inode.ino, flags)
        else:
            handle = self._files.create(inode, name, flags, wanted)
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(handle), keep_cache=False), self._entry(
            inode
        )

    @handler
    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        """Open a file."""
        if flags & os.O_ACCMODE != os.O_RDONLY:
            self._check_writable()
        handle = await self._files.open(inode, flags, keep_bits=ctx.uid == 0)
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(handle), keep_cache=False)

    @handler
    async def flush(self, fh: int) -> None:
        """A descriptor is being closed."""
        self._files.flush(fh)

    @handler
    async def release(self, fh: int) -> None:
        """An open is over."""
        self._files.release(fh)

    @handler
    async def fsync(self, fh: int, datasync: bool) -> None:
        """Wait for the second copy."""
        await self._files.fsync(fh)

    @handler
    async def setattr(
        self, inode: int, attr: pyfuse3.EntryAttributes, fields: pyfuse3.SetattrFields,
        fh: int | None, ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:  # fmt: skip
        """Change size, mode, owner or times."""
        self._check_writable()
        row = self._catalog.get(inode)
        if fields.update_size:
            await self._truncate(row, attr.st_size, fh, ctx)
        changes: dict[str, int] = {}
        if fields.update_uid or fields.update_gid:
            changes["mode"] = mode_after_chown(row)
        if fields.update_mode:
            changes["mode"] = changed_mode(row, attr.st_mode)
        if fields.update_uid:
            changes["uid"] = attr.st_uid
        if fields.update_gid:
            changes["gid"] = attr.st_gid
        if changes:
            self._catalog.set_attributes(inode, **changes, ctime_ns=time.time_ns())
        if fields.update_atime or fields.update_mtime:
            self._set_times(self._catalog.get(inode), attr, fields)
        self._files.flusher.wake()
        return self._entry(self._catalog.get(inode))

    def _set_times(
        self, row: Inode, attr: pyfuse3.EntryAttributes, fields: pyfuse3.SetattrFields
    ) -> None:
        found = self._files.stat(row.ino)
        mtime_ns = row.mtime_ns if found is None else found.st_mtime_ns
        self._files.set_times(
            row,
            attr.st_atime_ns if fields.update_atime else row.atime_ns,
            attr.st_mtime_ns if fields.update_mtime else mtime_ns,
        )

    async def _truncate(
        self, row: Inode, size: int, fh: int | None, ctx: pyfuse3.RequestContext
    ) -> None:
        if not row.is_file:
            raise NamespaceError(errno.EINVAL)
        if fh is not None and (opened := self._files.get(handle_ino(fh))) and opened.fd is not None:
            os.ftruncate(opened.fd, size)
            opened.written = True
            return
        flags = os.O_WRONLY | (os.O_TRUNC if size == 0 else 0)
        handle = await self._files.open(row.ino, flags, keep_bits=ctx.uid == 0)
        try:
            opened = self._files.get(row.ino)
            if opened is None or opened.fd is None:
                raise NamespaceError(errno.EIO)
            os.ftruncate(opened.fd, size)
            opened.written = True
            self._files.flush(handle)
        finally:
            self._files.release(handle)
