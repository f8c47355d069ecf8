"""A directory as the store: an NFS mount, a parallel filesystem, a disk.

A file is published as everything careful on a filesystem is: written under a temporary name in
the directory where it belongs, checked, brought to the disk, renamed. Symlinks and directories
are real ones. Modes, owners and times are the files' own; digest and version are xattrs where
the filesystem has any.
"""

import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lmstorfs.errors import (
    ChangedInStoreError,
    NotInStoreError,
    SetupError,
    StoreError,
    StoreUnreachableError,
    SupersededError,
)
from lmstorfs.store import directory_files as files
from lmstorfs.store.content import check_digest, digest_content
from lmstorfs.store.directory_files import store_errors
from lmstorfs.store.keys import OWN_PREFIX, TEMPORARY_PREFIX, printable, split_key
from lmstorfs.store.store import Attributes, Capacity, Kind, ObjectInfo, Store, Watch


class DirectoryStore(Store):
    """Objects are the files below one directory."""

    directory_times_drift = True

    def __init__(self, root: str) -> None:
        self.url = root
        self._root = root
        self._was_mounted = self._is_mount_point()

    def _is_mount_point(self) -> bool:
        try:
            return Path(self._root).is_mount()
        except OSError:
            return False

    @contextmanager
    def _open_root(self) -> Iterator[int]:
        """Yield a descriptor of the root; a root that is gone is a store out of reach.

        It is opened for every call, as an NFS mount may come back as another one; and a mount
        point that nothing is mounted on any more must not be taken for an empty store.
        """
        try:
            fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise StoreUnreachableError(f"the directory {self._root} is gone") from error
        except OSError as error:
            raise files.store_error(error, self._root) from error
        try:
            if self._was_mounted and not self._is_mount_point():
                raise StoreUnreachableError(f"{self._root} is no longer mounted")
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def _open_parent(self, key: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """Yield the directory that holds `key`, and its name there; maps `OSError`s."""
        *above, name = split_key(key)
        with (
            self._open_root() as root,
            store_errors(key),
            files.open_directory(root, above, make=make) as parent,
        ):
            yield parent, name

    def probe(self, *, write: bool) -> None:
        """Check the root's mode and, by a file that is removed at once, that it takes files."""
        root = Path(self._root)
        if not root.exists():
            gone = StoreUnreachableError(f"{root} is not there")
            raise SetupError(
                f"the store {root} does not exist; create it, or mount it first"
            ) from gone
        if not root.is_dir():
            raise SetupError(f"the store {root} is no directory; name a directory")
        if not os.access(root, os.R_OK | os.X_OK):
            raise SetupError(f"the store {root} may not be read by this user; check its mode")
        if not write:
            return
        try:
            with self._open_root() as fd:
                self._sweep_directory(fd)
                name = files.temporary_name()
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                try:
                    os.close(os.open(name, flags, 0o600, dir_fd=fd))
                finally:
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=fd)
        except (OSError, StoreError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise SetupError(
                f"the store {root} cannot be written ({reason}); check its mode and its mount"
            ) from error

    def list(self, directory: str) -> Iterator[ObjectInfo]:
        """Yield the entries with their attributes; temporary files are not shown."""
        parts = split_key(directory, root=True)
        with (
            self._open_root() as root,
            store_errors(directory or self._root),
            files.open_directory(root, parts) as fd,
        ):
            for name in files.names_in(fd):
                if name.startswith(OWN_PREFIX):
                    continue
                with suppress(FileNotFoundError), files.open_entry(fd, name) as entry:
                    info = files.info_of("/".join([*parts, name]), entry)
                    if info is not None:
                        yield info

    def head(self, key: str) -> ObjectInfo:
        """Return the entry itself, never what a symlink points to."""
        with self._open_parent(key) as (parent, name):
            return self._info(key, parent, name)

    def _info(self, key: str, parent: int, name: str) -> ObjectInfo:
        with files.open_entry(parent, name) as fd:
            info = files.info_of(key, fd)
        if info is None:
            raise NotInStoreError(f"{printable(key)}: neither a file nor a directory nor a symlink")
        return info

    def put_file(
        self, key: str, source_fd: int, size: int, attributes: Attributes, watch: Watch
    ) -> ObjectInfo:
        """Publish by rename. A crash at any line leaves the old file, or the new one whole.

        What a crash may leave besides is a temporary file, which `sweep` removes.
        """
        with self._open_parent(key, make=True) as (parent, name):
            temporary = files.temporary_name()
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            fd = os.open(temporary, flags, 0o600, dir_fd=parent)
            try:
                watch.began_upload(key, temporary)
                files.copy_content(source_fd, fd, size, watch)
                check_digest(digest_content(fd, size, watch), attributes.digest)
                files.set_attributes(fd, attributes)
                os.fsync(fd)
                watch.about_to_publish()
                os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
                info = files.info_of(key, fd)
            except BaseException:
                with suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=parent)
                raise
            finally:
                os.close(fd)
            files.sync_directory(parent)
            assert info is not None  # a regular file always is an object
            return info

    def put_directory(self, key: str, attributes: Attributes) -> ObjectInfo:
        """Make the directory, or give it new attributes."""
        with self._open_parent(key, make=True) as (parent, name):
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=parent)
            with files.open_entry(parent, name) as fd:
                if files.kind_of(os.fstat(fd).st_mode) is not Kind.DIRECTORY:
                    raise StoreError(f"{printable(key)}: something else is in the way")
                files.set_attributes(fd, attributes)
            files.sync_directory(parent)
            return self._info(key, parent, name)

    def put_symlink(self, key: str, target: str, attributes: Attributes) -> ObjectInfo:
        """Publish a symlink by rename, as a file is."""
        with self._open_parent(key, make=True) as (parent, name):
            temporary = files.temporary_name()
            os.symlink(target, temporary, dir_fd=parent)
            try:
                files.set_link_attributes(parent, temporary, attributes)
                os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
            except BaseException:
                with suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=parent)
                raise
            files.sync_directory(parent)
            return self._info(key, parent, name)

    def read_link(self, key: str) -> str:
        """Return the target as it is written; it is never followed here."""
        with self._open_parent(key) as (parent, name):
            return os.readlink(name, dir_fd=parent)

    @contextmanager
    def _open_content(self, key: str, etag: str | None) -> Iterator[int]:
        """Yield `key` open for reading; it must be the file `etag` before and after."""
        with (
            self._open_parent(key) as (parent, name),
            files.open_entry(parent, name, os.O_RDONLY) as fd,
        ):
            before = os.fstat(fd)
            if not stat.S_ISREG(before.st_mode):
                raise StoreError(f"{printable(key)} is no file")
            _check_etag(key, before, etag or files.etag_of(before))
            yield fd
            _check_etag(key, os.fstat(fd), etag or files.etag_of(before))

    def read(self, key: str, offset: int, length: int, *, etag: str | None = None) -> bytes:
        """Read a piece of a file that stays the same meanwhile."""
        chunks = []
        with self._open_content(key, etag) as fd:
            while length > 0 and (chunk := os.pread(fd, length, offset)):
                chunks.append(chunk)
                offset += len(chunk)
                length -= len(chunk)
        return b"".join(chunks)

    def fetch(self, key: str, target_fd: int, size: int, watch: Watch, *, etag: str | None) -> None:
        """Copy a whole file out, inside the kernel."""
        with self._open_content(key, etag) as fd:
            have = os.fstat(fd).st_size
            if have != size:
                raise ChangedInStoreError(f"{printable(key)} has {have} bytes, not {size}")
            try:
                files.copy_content(fd, target_fd, size, watch)
            except SupersededError as error:
                raise ChangedInStoreError(f"{printable(key)}: {error}") from error

    def set_attributes(self, key: str, kind: Kind, attributes: Attributes) -> ObjectInfo:
        """Set mode, owner, time and xattrs in place."""
        with self._open_parent(key) as (parent, name):
            if kind is Kind.SYMLINK:
                files.set_link_attributes(parent, name, attributes)
            else:
                with files.open_entry(parent, name) as fd:
                    if files.kind_of(os.fstat(fd).st_mode) is not kind:
                        raise NotInStoreError(f"{printable(key)} is another kind of entry now")
                    files.set_attributes(fd, attributes)
            return self._info(key, parent, name)

    def rename(self, old: str, new: str, kind: Kind) -> None:
        """Rename; where the source is gone and the target there, it was done before."""
        with self._open_parent(new, make=True) as (new_parent, new_name):
            try:
                with self._open_parent(old) as (old_parent, old_name):
                    os.rename(old_name, new_name, src_dir_fd=old_parent, dst_dir_fd=new_parent)
                    files.sync_directory(new_parent)
                    files.sync_directory(old_parent)
            except NotInStoreError:
                if self._exists(old):
                    raise  # a part of the way is no directory, which counts as absent too
                self._info(new, new_parent, new_name)  # there: a repeated call is done already

    def _exists(self, key: str) -> bool:
        try:
            self.head(key)
        except NotInStoreError:
            return False
        return True

    def delete(self, keys: Iterable[str]) -> None:
        """Unlink each of `keys`; a directory of that name is no file, and stays."""
        for key in keys:
            with (
                suppress(NotInStoreError),
                self._open_parent(key) as (parent, name),
                suppress(IsADirectoryError),
            ):
                os.unlink(name, dir_fd=parent)

    def remove_directory(self, key: str) -> None:
        """Remove an empty directory; what dead writers left does not count as content."""
        with suppress(NotInStoreError), self._open_parent(key) as (parent, name):
            with files.open_entry(parent, name, os.O_RDONLY | os.O_DIRECTORY) as fd:
                self._sweep_directory(fd)
            with files.suppress_errno(*files.NOT_EMPTY):
                os.rmdir(name, dir_fd=parent)

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Remove the temporary file `upload_id`, which lies beside `key`."""
        if not upload_id:
            with suppress(NotInStoreError):
                self.sweep(key.rpartition("/")[0])
            return
        if "/" in upload_id or not upload_id.startswith(TEMPORARY_PREFIX):
            raise StoreError(f"{printable(upload_id)} is no temporary file of this store")
        with suppress(NotInStoreError), self._open_parent(key) as (parent, _):
            os.unlink(upload_id, dir_fd=parent)

    def capacity(self) -> Capacity | None:
        """Return the room on the root's filesystem."""
        with self._open_root() as root, store_errors(self._root):
            room = os.fstatvfs(root)
        return Capacity(total=room.f_blocks * room.f_frsize, free=room.f_bavail * room.f_frsize)

    def sweep(self, directory: str = "") -> int:
        """Remove what dead writers left in `directory`; returns how many files that were."""
        parts = split_key(directory, root=True)
        with (
            self._open_root() as root,
            store_errors(directory or self._root),
            files.open_directory(root, parts) as fd,
        ):
            return self._sweep_directory(fd)

    @staticmethod
    def _sweep_directory(fd: int) -> int:
        removed = 0
        for name in files.names_in(fd):
            if not name.startswith(TEMPORARY_PREFIX):
                continue
            with suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                if files.is_abandoned(name, status, time.time()):
                    os.unlink(name, dir_fd=fd)
                    removed += 1
        return removed

    def close(self) -> None:
        """Nothing is held between calls."""


def _check_etag(key: str, status: os.stat_result, etag: str) -> None:
    if files.etag_of(status) != etag:
        raise ChangedInStoreError(f"{printable(key)} changed in the store")
