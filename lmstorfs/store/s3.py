"""S3, and what speaks its protocol, as the store.

A file is one object under its own name with its attributes as metadata (`s3_metadata`), a
symlink an object whose body is the target, a directory a marker `name/` or just what the names
below it imply: as s3fs and rclone have it, so that both read a store of ours and we read theirs.
"""

import logging
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from lmstorfs.errors import (
    ChangedInStoreError,
    NotInStoreError,
    SetupError,
    StoreDeniedError,
    StoreError,
    StoreUnreachableError,
)
from lmstorfs.store import s3_moves
from lmstorfs.store.keys import OWN_PREFIX, TEMPORARY_PREFIX, printable, split_key
from lmstorfs.store.s3_client import Bucket, s3_errors
from lmstorfs.store.s3_metadata import (
    DIRECTORY_TYPE,
    directory_info,
    read_etag,
    read_info,
    time_ns,
    write_metadata,
)
from lmstorfs.store.s3_transfer import (
    Fetcher,
    abort_upload,
    abort_uploads,
    get_range,
    put_large,
    put_small,
)
from lmstorfs.store.store import (
    Attributes,
    Capacity,
    Kind,
    ObjectInfo,
    Store,
    StoreConfig,
    Watch,
)

log = logging.getLogger(__name__)

_CHECK_CREDENTIALS = (
    "check the credentials that boto3 finds (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
    "AWS_PROFILE, ~/.aws, the instance's role)"
)


class S3Store(Store):
    """Objects are those below one prefix of one bucket."""

    lists_empty_directories = False  # some servers drop the markers

    def __init__(self, config: StoreConfig, bucket: str, prefix: str) -> None:
        self.url = config.url
        self._bucket = Bucket(config, bucket, prefix)
        self._part_bytes = config.part_bytes
        self._markers: bool | None = None
        self._markers_lock = threading.Lock()

    def probe(self, *, write: bool) -> None:
        """Look for the bucket, and put and delete a small object under the prefix."""
        bucket = self._bucket
        try:
            with s3_errors(f"bucket '{bucket.name}'"):
                bucket.client.head_bucket(Bucket=bucket.name)
                prefix = bucket.object_key("")
                bucket.client.list_objects_v2(Bucket=bucket.name, Prefix=prefix, MaxKeys=1)
            if write:
                self._probe_write()
        except NotInStoreError as error:
            raise SetupError(
                f"bucket '{bucket.name}' does not exist at {bucket.endpoint}; "
                "create it or check the name"
            ) from error
        except StoreDeniedError as error:
            raise SetupError(f"{error}; {_CHECK_CREDENTIALS} and the bucket's policy") from error
        except StoreUnreachableError as error:
            raise SetupError(
                f"no S3 server answers at {bucket.endpoint}; check the endpoint and the network"
            ) from error
        except StoreError as error:
            # not every server says 403 to a request that is not signed
            advice = (
                f"; it was asked without keys: {_CHECK_CREDENTIALS}" if bucket.anonymous else ""
            )
            raise SetupError(f"the store {self.url} does not work: {error}{advice}") from error

    def _probe_write(self) -> None:
        key = self._bucket.object_key(_temporary_name())
        with s3_errors(self._bucket.name):
            self._bucket.client.put_object(Bucket=self._bucket.name, Key=key, Body=b"lmstorfs")
            self._bucket.client.delete_object(Bucket=self._bucket.name, Key=key)

    def list(self, directory: str) -> Iterator[ObjectInfo]:
        """Yield the names in `directory`; attributes, and what is a symlink, only `head` tells."""
        split_key(directory, root=True)
        bucket = self._bucket
        prefix = bucket.object_key(f"{directory}/" if directory else "")
        found = not directory
        pages = bucket.client.get_paginator("list_objects_v2")
        with s3_errors(directory or bucket.name):
            for page in pages.paginate(Bucket=bucket.name, Prefix=prefix, Delimiter="/"):
                names = [item["Prefix"] for item in page.get("CommonPrefixes", ())]
                found = found or bool(names) or bool(page.get("Contents"))
                taken = set(names)
                for name in names:
                    key = self._listed(prefix, name.removesuffix("/"))
                    if key is not None:
                        yield ObjectInfo(key=key, kind=Kind.DIRECTORY, size=0, etag="", mtime_ns=0)
                for item in page.get("Contents", ()):
                    name = item["Key"]
                    key = self._listed(prefix, name)
                    if key is not None and f"{name}/" not in taken:
                        yield ObjectInfo(
                            key=key,
                            kind=Kind.FILE,
                            size=item["Size"],
                            etag=read_etag(item),
                            mtime_ns=time_ns(item["LastModified"]),
                        )
        if not found:
            raise NotInStoreError(f"{printable(directory)}: not in the store")

    def _listed(self, prefix: str, full: str) -> str | None:
        """Return our key for a listed object key; None for what is no file of anybody's."""
        name = full.removeprefix(prefix)
        if not name or name.startswith(OWN_PREFIX):
            return None  # the directory's own marker, or somebody's probe
        key = self._bucket.own_key(full)
        if key is None or name in (".", "..") or "/" in name:
            log.warning("an object cannot be a file and is not shown: %r", full)
            return None
        return key

    def head(self, key: str) -> ObjectInfo:
        """Return the object `key`, the marker `key/`, or the directory that others imply."""
        split_key(key)
        try:
            return read_info(key, self._head(key))
        except NotInStoreError:
            first = self._below(key, 1)
            if not first:
                raise
        if first[0]["Key"] == self._bucket.object_key(f"{key}/"):
            return read_info(key, self._head(f"{key}/"), Kind.DIRECTORY)
        return directory_info(key, time_ns(first[0]["LastModified"]))

    def _head(self, key: str) -> Any:
        with s3_errors(key):
            return self._bucket.client.head_object(
                Bucket=self._bucket.name, Key=self._bucket.object_key(key)
            )

    def _below(self, key: str, count: int) -> Any:
        """Return the first objects of the directory `key`; its marker comes first."""
        with s3_errors(key):
            response = self._bucket.client.list_objects_v2(
                Bucket=self._bucket.name,
                Prefix=self._bucket.object_key(f"{key}/"),
                MaxKeys=count,
            )
        return response.get("Contents", [])

    def put_file(
        self, key: str, source_fd: int, size: int, attributes: Attributes, watch: Watch
    ) -> ObjectInfo:
        """Publish by one request, or by a multipart upload that is completed or aborted."""
        split_key(key)
        extra = {"Metadata": write_metadata(attributes, Kind.FILE)}
        bucket, digest = self._bucket, attributes.digest
        if size > self._part_bytes:
            put_large(bucket, key, source_fd, size, self._part_bytes, digest, watch, extra)
            return read_info(key, self._head(key))
        etag = put_small(bucket, key, source_fd, size, digest, watch, extra)
        return ObjectInfo(
            key=key,
            kind=Kind.FILE,
            size=size,
            etag=etag,
            mtime_ns=time.time_ns(),
            attributes=attributes,
        )

    def put_directory(self, key: str, attributes: Attributes) -> ObjectInfo:
        """Put the marker `key/`, where the server can hold one."""
        split_key(key)
        if self._holds_markers():
            metadata = write_metadata(attributes, Kind.DIRECTORY)
            self._put_marker(self._bucket.object_key(f"{key}/"), metadata)
        return ObjectInfo(
            key=key,
            kind=Kind.DIRECTORY,
            size=0,
            etag="",
            mtime_ns=time.time_ns(),
            attributes=attributes,
        )

    def _put_marker(self, full: str, metadata: dict[str, str]) -> None:
        with s3_errors(full):
            self._bucket.client.put_object(
                Bucket=self._bucket.name,
                Key=full,
                Body=b"",
                ContentType=DIRECTORY_TYPE,
                Metadata=metadata,
            )

    def _holds_markers(self) -> bool:
        """Whether the server holds objects whose names end in a slash; asked once.

        A server that is a filesystem itself makes a plain file of `name/`, and then nothing can
        be put below it: there directories are only ever implied.
        """
        with self._markers_lock:
            if self._markers is None:
                name = _temporary_name()
                marker = self._bucket.object_key(f"{name}/")
                self._put_marker(marker, {})
                self._markers = any(item["Key"] == marker for item in self._below(name, 1))
                with s3_errors(self._bucket.name):
                    self._bucket.client.delete_object(
                        Bucket=self._bucket.name,
                        Key=marker if self._markers else marker.removesuffix("/"),
                    )
                if not self._markers:
                    log.warning("this S3 server holds no empty directories")
            return self._markers

    def put_symlink(self, key: str, target: str, attributes: Attributes) -> ObjectInfo:
        """Put an object whose mode says symlink, and whose body is the target."""
        split_key(key)
        with s3_errors(key):
            self._bucket.client.put_object(
                Bucket=self._bucket.name,
                Key=self._bucket.object_key(key),
                Body=target.encode("utf-8", "surrogateescape"),
                Metadata=write_metadata(attributes, Kind.SYMLINK),
            )
        return read_info(key, self._head(key))

    def read_link(self, key: str) -> str:
        """Return the body of an object whose mode says symlink."""
        if self.head(key).kind is not Kind.SYMLINK:
            raise StoreError(f"{printable(key)} is no symlink")
        with s3_errors(key):
            response = self._bucket.client.get_object(
                Bucket=self._bucket.name, Key=self._bucket.object_key(key)
            )
            target: bytes = response["Body"].read()
        return target.rstrip(b"\0").decode("utf-8", "surrogateescape")

    def read(self, key: str, offset: int, length: int, *, etag: str | None = None) -> bytes:
        """Read a piece by a ranged request."""
        split_key(key)
        if length <= 0:
            return b""
        with s3_errors(key):
            response = get_range(self._bucket, key, offset, length, etag)
            if response is None:
                return b""
            data: bytes = response["Body"].read()
            return data

    def fetch(self, key: str, target_fd: int, size: int, watch: Watch, *, etag: str | None) -> None:
        """Download by ranges, several at once; the size is checked before the first byte."""
        split_key(key)
        head = self._head(key)
        if etag not in (None, read_etag(head)) or head["ContentLength"] != size:
            raise ChangedInStoreError(f"{printable(key)} changed in the store")
        Fetcher(
            self._bucket, key, target_fd, size, self._part_bytes, read_etag(head), watch
        ).fetch()

    def set_attributes(self, key: str, kind: Kind, attributes: Attributes) -> ObjectInfo:
        """Copy the object onto itself with new metadata."""
        split_key(key)
        if kind is Kind.DIRECTORY:
            return self.put_directory(key, attributes)
        head = self._head(key)
        extra = {
            "Metadata": write_metadata(attributes, kind),
            "ContentType": head.get("ContentType", "binary/octet-stream"),
        }
        full = self._bucket.object_key(key)
        s3_moves.copy_object(self._bucket, full, full, head["ContentLength"], extra)
        return read_info(key, self._head(key))

    def rename(self, old: str, new: str, kind: Kind) -> None:
        """Copy and delete; where the source is gone and the target there, it was done before."""
        split_key(old)
        split_key(new)
        if kind is Kind.DIRECTORY:
            markers = self._holds_markers()
            moved = s3_moves.move_tree(self._bucket, old, new, markers=markers)
            if not moved and markers:  # without markers it may have been an empty directory
                self.head(new)
            return
        source, target = self._bucket.object_key(old), self._bucket.object_key(new)
        try:
            size = self._head(old)["ContentLength"]
            s3_moves.copy_object(self._bucket, source, target, size, {})
        except NotInStoreError:
            self._head(new)
            return
        s3_moves.delete_objects(self._bucket, [source])

    def delete(self, keys: Iterable[str]) -> None:
        """Delete in batches."""
        s3_moves.delete_objects(self._bucket, (self._checked(key) for key in keys))

    def _checked(self, key: str) -> str:
        split_key(key)
        return self._bucket.object_key(key)

    def remove_directory(self, key: str) -> None:
        """Delete the marker, if it is all there is.

        Also one that is not listed: SeaweedFS keeps a directory that a name once implied. But
        never on a server that would take `name/` for the file `name`.
        """
        split_key(key)
        below = [item["Key"] for item in self._below(key, 2)]
        marker = self._bucket.object_key(f"{key}/")
        if below in ([], [marker]) and self._holds_markers():
            with s3_errors(key):
                self._bucket.client.delete_object(Bucket=self._bucket.name, Key=marker)

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Abort a multipart upload; one that is gone is fine."""
        split_key(key)
        if upload_id:
            abort_upload(self._bucket, key, upload_id)
        else:
            abort_uploads(self._bucket, key)

    def capacity(self) -> Capacity | None:
        """S3 has no such number."""
        return None

    def close(self) -> None:
        """Close the connections."""
        self._bucket.close()


def _temporary_name() -> str:
    return f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
