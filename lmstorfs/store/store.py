"""What a store is: the place where files end up for good, one object a file, under its own name.

The interface is blocking and knows no trio: uploads and downloads of content run in worker
processes (`pool.py`), the rest in threads. A key is the file's path below the mount point, `/`
between its parts, no leading or trailing `/`, as text with `surrogateescape` where a name is not
UTF-8. What a store deliberately does not do: retry for ever (the flusher does), cache, or
interpret versions.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Protocol

import msgspec


class Kind(StrEnum):
    """What an object stands for."""

    FILE = "file"
    DIRECTORY = "dir"
    SYMLINK = "symlink"


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that a process needs to open the same store; never holds a secret."""

    url: str
    """`s3://bucket/prefix`, or an absolute path (also `file:///path`)."""
    endpoint: str | None = None
    """The S3 endpoint; None leaves it to boto3 (`AWS_ENDPOINT_URL`, profile, AWS itself)."""
    part_bytes: int = 32 << 20
    """Size of a multipart upload's part."""
    connections: int = 4
    """Requests at once within one upload or download."""


class Attributes(msgspec.Struct, frozen=True, kw_only=True):
    """What a file carries beside its content. `mode` has the type bits (`S_IFREG` …)."""

    mode: int
    uid: int
    gid: int
    mtime_ns: int
    digest: str | None = None
    """xxh3-128 of the content, hex; None for a file that another tool put there."""
    version: int | None = None
    xattrs: dict[str, bytes] = {}


class ObjectInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One object as the store tells of it."""

    key: str
    kind: Kind
    size: int
    """Bytes; for a symlink the length of its target; 0 for a directory."""
    etag: str
    """Changes whenever the content does; for a directory store made of inode, size and mtime."""
    mtime_ns: int
    """The store's own time of the object, not the file's. Told for people: S3 servers round it
    and some (rclone) tell another one each time, so only `etag` says whether a content changed."""
    attributes: Attributes | None = None
    """None where a listing does not tell them: ask `head`."""


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Room in the store, bytes."""

    total: int
    free: int


class Watch(Protocol):
    """How a long transfer speaks with whoever asked for it; called from any thread."""

    def cancelled(self) -> bool:
        """Whether to give up: the transfer then undoes what it began and raises `Cancelled`."""
        ...

    def moved(self, count: int) -> None:
        """`count` more bytes are through."""
        ...

    def came(self, offset: int, count: int) -> None:
        """These bytes, which `moved` counts as well, are in the target of a fetch."""
        ...

    def began_upload(self, key: str, upload_id: str) -> None:
        """A multipart upload exists from now on; whoever finds it later can abort it."""
        ...

    def about_to_publish(self) -> None:
        """All bytes are through; raise `SupersededError` to keep them from being published."""
        ...


class Unwatched:
    """The `Watch` of a transfer that nobody follows."""

    def cancelled(self) -> bool:
        """Never."""
        return False

    def moved(self, count: int) -> None:
        """Count nothing."""

    def came(self, offset: int, count: int) -> None:
        """Note nothing."""

    def began_upload(self, key: str, upload_id: str) -> None:
        """Remember nothing."""

    def about_to_publish(self) -> None:
        """Object to nothing."""


class Cancelled(Exception):  # noqa: N818 - a cancellation is no error
    """The transfer was given up because its `Watch` said so; nothing of it is left."""


class Store(ABC):
    """A place for objects. All methods raise `StoreError` and its kin, never boto's or `OSError`.

    All are safe to repeat: a rename whose source is gone and whose target is there, or a delete
    of what is not there, succeeds in silence.
    """

    url: str
    lists_empty_directories = True
    """Whether a directory that a listing does not show is gone; False: it may just be empty."""
    directory_times_drift = False
    """Whether publishing a file changes its directory's mtime, so that it must be set again."""

    @abstractmethod
    def probe(self, *, write: bool) -> None:
        """Check that the store is there, may be read and (`write`) written.

        Raises `SetupError` with one line that says what to do. Leaves nothing behind.
        """

    @abstractmethod
    def list(self, directory: str) -> Iterator[ObjectInfo]:
        """Yield what lies directly in `directory` (`""` is the root), in any order.

        Raises `NotInStoreError` where there is no such directory.
        """

    @abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """Return the object or directory `key` with its attributes."""

    @abstractmethod
    def put_file(
        self, key: str, source_fd: int, size: int, attributes: Attributes, watch: Watch
    ) -> ObjectInfo:
        """Publish the first `size` bytes of `source_fd` as `key`, whole or not at all.

        `attributes.digest` is known; what was sent is digested on the way and must match it.
        Readers see the old object until the new one is complete. Raises `SupersededError`, with
        nothing published, where the file changed on the way.
        """

    @abstractmethod
    def put_directory(self, key: str, attributes: Attributes) -> ObjectInfo:
        """Make the directory `key`, or give it new attributes.

        An S3 server that is a filesystem itself (rclone) holds no empty directories: there the
        directory appears with the first file in it, and its attributes are not kept.
        """

    @abstractmethod
    def put_symlink(self, key: str, target: str, attributes: Attributes) -> ObjectInfo:
        """Make or replace the symlink `key`."""

    @abstractmethod
    def read_link(self, key: str) -> str:
        """Return a symlink's target."""

    @abstractmethod
    def read(self, key: str, offset: int, length: int, *, etag: str | None = None) -> bytes:
        """Return up to `length` bytes from `offset` (fewer only at the end).

        Raises `ChangedInStoreError` where the object's ETag is not `etag`.
        """

    @abstractmethod
    def fetch(self, key: str, target_fd: int, size: int, watch: Watch, *, etag: str | None) -> None:
        """Write the whole object of `size` bytes into `target_fd` from its start.

        Raises `ChangedInStoreError` where it is not (or does not stay) the object `etag`.
        """

    @abstractmethod
    def set_attributes(self, key: str, kind: Kind, attributes: Attributes) -> ObjectInfo:
        """Give an object new attributes without sending its content again."""

    @abstractmethod
    def rename(self, old: str, new: str, kind: Kind) -> None:
        """Move one object, or a directory with all below it, replacing what is at `new`."""

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Delete files and symlinks; keys that are not there are fine."""

    @abstractmethod
    def remove_directory(self, key: str) -> None:
        """Remove a directory's own entry; one that still holds something is left alone."""

    @abstractmethod
    def abort_upload(self, key: str, upload_id: str) -> None:
        """Drop a multipart upload that nobody will finish, or its temporary file.

        An empty `upload_id` stands for one that nobody knows: all uploads to `key` whose writers
        are dead.
        """

    @abstractmethod
    def capacity(self) -> Capacity | None:
        """Return the room in the store; None where there is no such number."""

    @abstractmethod
    def close(self) -> None:
        """Let go of connections."""
