"""What `DirectoryStore` does to single files: walk to them, copy them, read and set attributes.

Everything goes by descriptors, a part of the path at a time and never through a symlink, so that
no link that somebody puts into the store leads out of it. Attributes are reached through
`/proc/self/fd/N`, which works for a descriptor opened with `O_PATH` too: a file that may not be
read still has a mode and a time.
"""

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import structlog
import xxhash

from lmstorfs.errors import (
    NotInStoreError,
    StoreDeniedError,
    StoreError,
    StoreUnreachableError,
    SupersededError,
)
from lmstorfs.store.content import check_cancelled
from lmstorfs.store.keys import TEMPORARY_PREFIX, printable
from lmstorfs.store.store import Attributes, Kind, ObjectInfo, Watch

log = structlog.get_logger()

COPY_BYTES = 32 << 20  # one kernel copy: long enough for speed, short enough to cancel
DIGEST_XATTR = "user.lmstorfs.digest"
VERSION_XATTR = "user.lmstorfs.version"
_OURS = frozenset({DIGEST_XATTR, VERSION_XATTR})
_NO_XATTRS = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES, errno.EPERM})
_NO_KERNEL_COPY = frozenset({errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_UNREACHABLE = frozenset(
    {
        errno.ESTALE,
        errno.ENOTCONN,
        errno.EIO,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENODEV,
        errno.ENXIO,
        errno.ETIMEDOUT,
        errno.ESHUTDOWN,
    }
)
NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)
_ABANDONED_AFTER_S = 3600  # a temporary file of another host: nobody writes this long in silence


@contextmanager
def store_errors(what: str) -> Iterator[None]:
    """Turn every `OSError` of the block into the `StoreError` that it stands for."""
    try:
        yield
    except OSError as error:
        raise store_error(error, what) from error


def store_error(error: OSError, what: str) -> StoreError:
    """Return the `StoreError` for `error`, which happened to `what` (a key, or the root)."""
    reason = f"{printable(what)}: {os.strerror(error.errno) if error.errno else error}"
    if error.errno in _ABSENT:
        return NotInStoreError(reason)
    if error.errno in _DENIED:
        return StoreDeniedError(reason)
    if error.errno in _UNREACHABLE:
        return StoreUnreachableError(reason)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreError(f"the store is full ({reason})")
    return StoreError(reason)


@contextmanager
def open_directory(root: int, parts: list[str], *, make: bool = False) -> Iterator[int]:
    """Yield a descriptor of the directory `parts` below `root`; `make` makes what is missing."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.dup(root)
    try:
        for part in parts:
            try:
                below = os.open(part, flags, dir_fd=fd)
            except FileNotFoundError:
                if not make:
                    raise
                with suppress(FileExistsError):  # another writer was faster
                    os.mkdir(part, dir_fd=fd)
                sync_directory(fd)
                below = os.open(part, flags, dir_fd=fd)
            os.close(fd)
            fd = below
        yield fd
    finally:
        os.close(fd)


@contextmanager
def open_entry(parent: int, name: str, flags: int = os.O_PATH) -> Iterator[int]:
    """Yield a descriptor of `name` itself: never of what a symlink points to."""
    fd = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)


def names_in(fd: int) -> list[str]:
    """Return the names in the directory open as `fd`."""
    with os.scandir(fd) as entries:
        return [entry.name for entry in entries]


def sync_directory(fd: int) -> None:
    """Bring a directory's names to the disk, where its filesystem can."""
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise


def copy_content(source: int, target: int, size: int, watch: Watch) -> None:
    """Copy the first `size` bytes inside the kernel.

    `copy_file_range` first, which an NFS server or a reflinking filesystem does without moving a
    byte, and `sendfile` where the two filesystems cannot do that.
    """
    offset = 0
    by_range = True
    while offset < size:
        check_cancelled(watch)
        want = min(COPY_BYTES, size - offset)
        count = 0
        if by_range:
            try:
                count = os.copy_file_range(source, target, want, offset, offset)
            except OSError as error:
                if error.errno not in _NO_KERNEL_COPY:
                    raise
            by_range = count > 0
        if not by_range:
            os.lseek(target, offset, os.SEEK_SET)
            count = os.sendfile(target, source, offset, want)
        if count == 0:
            raise SupersededError(f"the file ends at {offset} bytes: it was truncated")
        watch.came(offset, count)
        watch.moved(count)
        offset += count


def kind_of(mode: int) -> Kind | None:
    """Return what a mode stands for; None for a device, a pipe or a socket."""
    if stat.S_ISREG(mode):
        return Kind.FILE
    if stat.S_ISDIR(mode):
        return Kind.DIRECTORY
    return Kind.SYMLINK if stat.S_ISLNK(mode) else None


def etag_of(status: os.stat_result) -> str:
    """Return what changes with the content: not the ctime, which a `chmod` changes too."""
    return f"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"


def info_of(key: str, fd: int) -> ObjectInfo | None:
    """Return what the store says of the entry open as `fd`; None where it is no object."""
    status = os.fstat(fd)
    kind = kind_of(status.st_mode)
    if kind is None:
        return None
    xattrs = {} if kind is Kind.SYMLINK else _read_xattrs(fd)
    digest, version = xattrs.pop(DIGEST_XATTR, b""), xattrs.pop(VERSION_XATTR, b"")
    return ObjectInfo(
        key=key,
        kind=kind,
        size=0 if kind is Kind.DIRECTORY else status.st_size,
        etag=etag_of(status),
        mtime_ns=status.st_mtime_ns,
        attributes=Attributes(
            mode=status.st_mode,
            uid=status.st_uid,
            gid=status.st_gid,
            mtime_ns=status.st_mtime_ns,
            digest=_believed_digest(digest, status),
            version=int(version) if version.isdigit() else None,
            xattrs=xattrs,
        ),
    )


def set_attributes(fd: int, attributes: Attributes) -> None:
    """Give the file or directory open as `fd` (also with `O_PATH`) these attributes, all of them.

    In this order: a foreign owner first, as it takes the set-id bits away; xattrs while the owner
    may write; the time before the digest that is recorded beside it; the mode last.
    """
    path = f"/proc/self/fd/{fd}"
    before = os.fstat(fd)
    _change_owner(path, before, attributes)
    if os.geteuid() != 0 and not before.st_mode & stat.S_IWUSR:
        Path(path).chmod(stat.S_IMODE(before.st_mode) | stat.S_IWUSR)
    _write_xattrs(path, {**attributes.xattrs, **_version_xattr(attributes)})
    os.utime(path, ns=(attributes.mtime_ns, attributes.mtime_ns))
    if attributes.digest is not None:
        status = os.fstat(fd)  # the time as this filesystem keeps it, which may be coarser
        line = f"{attributes.digest}:{status.st_size}:{status.st_mtime_ns}"
        _set_xattr(path, DIGEST_XATTR, line.encode())
    Path(path).chmod(stat.S_IMODE(attributes.mode))


def set_link_attributes(parent: int, name: str, attributes: Attributes) -> None:
    """Give a symlink its owner and time; it has no mode and no xattrs."""
    with suppress(PermissionError):
        os.chown(name, attributes.uid, attributes.gid, dir_fd=parent, follow_symlinks=False)
    times = (attributes.mtime_ns, attributes.mtime_ns)
    os.utime(name, ns=times, dir_fd=parent, follow_symlinks=False)


def _change_owner(path: str, before: os.stat_result, attributes: Attributes) -> None:
    """Set the owner where that is allowed: not for others than root, nor on a squashing NFS."""
    if (before.st_uid, before.st_gid) == (attributes.uid, attributes.gid):
        return
    try:
        os.chown(path, attributes.uid, attributes.gid)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EINVAL):
            raise


def _read_xattrs(fd: int) -> dict[str, bytes]:
    path = f"/proc/self/fd/{fd}"
    found = {}
    try:
        names = [name for name in os.listxattr(path) if name.startswith("user.")]
        for name in names:
            with suppress_errno(errno.ENODATA):  # removed since it was listed
                found[name] = os.getxattr(path, name)
    except OSError as error:
        if error.errno not in _NO_XATTRS:
            raise
    return found


def _write_xattrs(path: str, wanted: dict[str, bytes]) -> None:
    """Make the file's `user.` attributes exactly `wanted`, where its filesystem has any."""
    try:
        present = {name for name in os.listxattr(path) if name.startswith("user.")}
    except OSError as error:
        if error.errno not in _NO_XATTRS:
            raise
        return
    for name in present - wanted.keys():
        with suppress_errno(errno.ENODATA):
            os.removexattr(path, name)
    for name, value in sorted(wanted.items(), key=lambda pair: len(pair[1])):
        if name.startswith("user.") and (name not in _OURS or name == VERSION_XATTR):
            _set_xattr(path, name, value)


def _set_xattr(path: str, name: str, value: bytes) -> None:
    """Set one attribute; one that the filesystem has no room for must not keep the file out.

    ext4 gives all attributes of a file 4 KiB. It says ENOSPC, which on a full disk the content
    before it or the next file says as well.
    """
    try:
        os.setxattr(path, name, value)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.E2BIG, errno.ERANGE):
            log.warning("extended attribute left out: too large for the store", name=name)
        elif error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise


def _version_xattr(attributes: Attributes) -> dict[str, bytes]:
    return {} if attributes.version is None else {VERSION_XATTR: str(attributes.version).encode()}


def _believed_digest(line: bytes, status: os.stat_result) -> str | None:
    """Return the recorded digest if size and time still match: others write files in place."""
    digest, _, rest = line.decode("ascii", "replace").partition(":")
    return digest if digest and rest == f"{status.st_size}:{status.st_mtime_ns}" else None


@contextmanager
def suppress_errno(*numbers: int) -> Iterator[None]:
    """Like `contextlib.suppress`, for these error numbers only."""
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise


def temporary_name() -> str:
    """Return a new name for a file that is not published yet: it tells who is writing."""
    return f"{TEMPORARY_PREFIX}{_writers_home()}-{os.getpid()}-{secrets.token_hex(6)}"


def is_abandoned(name: str, status: os.stat_result, now: float) -> bool:
    """Whether the writer of the temporary file `name` is certainly gone.

    Its process number means something only on the same boot of the same host and in the same
    container; of others' files the age must do. The age goes by ctime: nobody can set it back.
    """
    home, _, rest = name.removeprefix(TEMPORARY_PREFIX).partition("-")
    pid = rest.partition("-")[0]
    if home == _writers_home() and pid.isdigit() and not _is_alive(pid):
        return True
    return now - status.st_ctime > _ABANDONED_AFTER_S


def _is_alive(pid: str) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(") ")[2][:1] not in "ZX"  # dead, where nobody collects the dead


@cache
def _writers_home() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return xxhash.xxh3_64_hexdigest(f"{boot} {Path('/proc/self/ns/pid').readlink()}".encode())
