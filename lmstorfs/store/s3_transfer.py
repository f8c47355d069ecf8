"""Content to and from S3: multipart uploads and ranged downloads, on threads of our own.

Not by `s3transfer`: an upload here must be cancellable within a part, must be aborted before a
cancellation is acknowledged, must tell its id for whoever cleans up after a crash, and must
digest exactly the bytes that it sends. The parts are read in order, under a lock, so that this
one digest comes for free and proves what is published.
"""

import base64
import hashlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import xxhash
from botocore.exceptions import BotoCoreError, ClientError

from lmstorfs.errors import ChangedInStoreError, StoreError, StoreUnreachableError
from lmstorfs.store.content import check_cancelled, check_digest, read_exactly, write_exactly
from lmstorfs.store.keys import printable
from lmstorfs.store.s3_client import Bucket, code_of, s3_error, s3_errors
from lmstorfs.store.s3_metadata import read_etag
from lmstorfs.store.store import Cancelled, Watch

log = logging.getLogger(__name__)

MAX_PARTS = 10_000  # S3's limit
MIN_PART_BYTES = 5 << 20  # S3's limit, but for the last part
_MIB = 1 << 20
_SEND_BYTES = 256 << 10  # given to the socket at once: long enough for speed, short to cancel
_RECEIVE_BYTES = 1 << 20
_NO_UPLOADS = ("NoSuchUpload", "404", "405", "501", "NotImplemented", "MethodNotAllowed")
_FETCH_ATTEMPTS = 3  # of one range in a row without a byte of progress


def part_size(size: int, wanted: int) -> int:
    """Return the part size for `size` bytes: at least `wanted`, and never too many parts."""
    least = -(-size // MAX_PARTS)
    return max(wanted, MIN_PART_BYTES, -(-least // _MIB) * _MIB)


class _Body:
    """Bytes in memory as botocore wants to read them, stopping where the transfer is given up.

    `read` returns a view and not a copy, and more at once than urllib3's 16 KiB: it sends
    whatever it is given.
    """

    def __init__(self, view: memoryview, stopped: Callable[[], bool]) -> None:
        self._view = view
        self._stopped = stopped
        self._at = 0

    def __len__(self) -> int:
        return len(self._view)

    def read(self, amount: int | None = None) -> memoryview | bytes:
        if self._stopped():
            raise Cancelled
        if self._at >= len(self._view):
            return b""
        count = len(self._view) if amount is None or amount < 0 else max(amount, _SEND_BYTES)
        piece = self._view[self._at : self._at + count]
        self._at += len(piece)
        return piece

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, len(self._view))[whence]
        return self._at

    def tell(self) -> int:
        return self._at


def put_small(
    bucket: Bucket, key: str, fd: int, size: int, digest: str | None, watch: Watch, extra: Any
) -> str:
    """Publish `size` bytes by one request; returns the ETag."""
    buffer = memoryview(bytearray(size))
    read_exactly(fd, buffer, 0)
    check_digest(xxhash.xxh3_128_hexdigest(buffer), digest)
    check_cancelled(watch)
    watch.about_to_publish()
    body = _Body(buffer, watch.cancelled) if size else b""
    try:
        response = bucket.client.put_object(
            Bucket=bucket.name,
            Key=bucket.object_key(key),
            Body=body,
            # Without it SeaweedFS makes an empty object of a request that breaks off before its
            # body, in place of the whole one that was there.
            ContentMD5=_content_md5(buffer),
            **extra,
        )
    except (ClientError, BotoCoreError) as error:
        check_cancelled(watch)
        raise s3_error(error, key) from error
    watch.moved(size)
    return read_etag(response)


def _content_md5(content: memoryview) -> str:
    return base64.b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode()


def put_large(
    bucket: Bucket,
    key: str,
    fd: int,
    size: int,
    part_bytes: int,
    digest: str | None,
    watch: Watch,
    extra: Any,
) -> None:
    """Publish by a multipart upload, aborted on whatever goes wrong before its completion."""
    with s3_errors(key):
        response = bucket.client.create_multipart_upload(
            Bucket=bucket.name, Key=bucket.object_key(key), **extra
        )
    upload_id = response["UploadId"]
    try:
        watch.began_upload(key, upload_id)
        sender = _PartSender(bucket, key, upload_id, fd, size, part_size(size, part_bytes), watch)
        parts, sent = sender.send()
        check_digest(sent, digest)
        check_cancelled(watch)
        watch.about_to_publish()
        complete_upload(bucket, key, upload_id, parts, size)
    except BaseException as cause:
        try:
            abort_upload(bucket, key, upload_id)
        except StoreError as error:
            if isinstance(cause, Cancelled):
                raise
            log.warning("an upload of %s could not be aborted: %s", printable(key), error)
        raise


class _PartSender:
    """The parts of one upload, sent by several threads and digested in their order."""

    def __init__(
        self,
        bucket: Bucket,
        key: str,
        upload_id: str,
        fd: int,
        size: int,
        part_bytes: int,
        watch: Watch,
    ) -> None:
        self._bucket = bucket
        self._target = {
            "Bucket": bucket.name,
            "Key": bucket.object_key(key),
            "UploadId": upload_id,
        }
        self._key = key
        self._fd = fd
        self._size = size
        self._part_bytes = part_bytes
        self._watch = watch
        self._lock = threading.Lock()
        self._offset = 0
        self._digest = xxhash.xxh3_128()
        self._etags: dict[int, str] = {}
        self._failed = threading.Event()

    def send(self) -> tuple[list[dict[str, Any]], str]:
        """Send all parts; returns what completes the upload, and the digest of what was sent."""
        run_threads(self._bucket.connections, self._send_some, self._failed)
        parts = [{"PartNumber": n, "ETag": etag} for n, etag in sorted(self._etags.items())]
        return parts, self._digest.hexdigest()

    def _stopped(self) -> bool:
        return self._failed.is_set() or self._watch.cancelled()

    def _send_some(self) -> None:
        buffer = memoryview(bytearray(min(self._part_bytes, self._size)))
        while (part := self._read_next(buffer)) is not None:
            number, view = part
            try:
                response = self._bucket.client.upload_part(
                    **self._target, PartNumber=number, Body=_Body(view, self._stopped)
                )
            except (ClientError, BotoCoreError) as error:
                if self._stopped():
                    raise Cancelled from error
                raise s3_error(error, self._key) from error
            self._etags[number] = response["ETag"]
            self._watch.moved(len(view))

    def _read_next(self, buffer: memoryview) -> tuple[int, memoryview] | None:
        """Read the next part into `buffer`; None once there is none left."""
        with self._lock:
            if self._stopped():
                raise Cancelled
            offset = self._offset
            view = buffer[: min(self._part_bytes, self._size - offset)]
            if not view:
                return None
            read_exactly(self._fd, view, offset)
            self._digest.update(view)
            self._offset += len(view)
            return offset // self._part_bytes + 1, view


def run_threads(count: int, work: Callable[[], None], failed: threading.Event) -> None:
    """Run `work` in `count` threads; the first to fail sets `failed`, and its error is raised.

    Returns only when all threads are done: no request is on its way any more.
    """

    def guarded() -> None:
        try:
            work()
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(count, thread_name_prefix="part") as threads:
        futures = [threads.submit(guarded) for _ in range(count)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, Cancelled):
            raise error
    if errors:
        raise errors[0]


def complete_upload(
    bucket: Bucket, key: str, upload_id: str, parts: list[dict[str, Any]], size: int
) -> None:
    """Publish an upload's parts as the object; one that is complete already is fine.

    The answer to a completion may be lost, and the repeated request then hears of no upload.
    """
    full = bucket.object_key(key)
    try:
        bucket.client.complete_multipart_upload(
            Bucket=bucket.name, Key=full, UploadId=upload_id, MultipartUpload={"Parts": parts}
        )
    except (ClientError, BotoCoreError) as error:
        gone = isinstance(error, ClientError) and code_of(error) == "NoSuchUpload"
        if not gone or _size_of(bucket, key) != size:
            raise s3_error(error, key) from error
    stored = _size_of(bucket, key)
    if stored != size:
        raise StoreError(f"{printable(key)}: the store holds {stored} bytes after {size} were sent")


def _size_of(bucket: Bucket, key: str) -> int:
    with s3_errors(key):
        response = bucket.client.head_object(Bucket=bucket.name, Key=bucket.object_key(key))
    size: int = response["ContentLength"]
    return size


def abort_upload(bucket: Bucket, key: str, upload_id: str) -> None:
    """Drop a multipart upload and its parts; one that is gone is fine."""
    try:
        bucket.client.abort_multipart_upload(
            Bucket=bucket.name, Key=bucket.object_key(key), UploadId=upload_id
        )
    except (ClientError, BotoCoreError) as error:
        if not isinstance(error, ClientError) or code_of(error) not in ("NoSuchUpload", "404"):
            raise s3_error(error, key) from error


def abort_uploads(bucket: Bucket, key: str) -> None:
    """Drop all multipart uploads to `key`; a server that cannot list them keeps none."""
    name = bucket.object_key(key)
    pages = bucket.client.get_paginator("list_multipart_uploads")
    found: list[str] = []
    try:
        for page in pages.paginate(Bucket=bucket.name, Prefix=name):
            found += [u["UploadId"] for u in page.get("Uploads", ()) if u["Key"] == name]
    except (ClientError, BotoCoreError) as error:
        if not isinstance(error, ClientError) or code_of(error) not in _NO_UPLOADS:
            raise s3_error(error, key) from error
    for upload_id in found:
        abort_upload(bucket, key, upload_id)


class Fetcher:
    """A download of one object by ranges, each on its own connection."""

    def __init__(
        self, bucket: Bucket, key: str, fd: int, size: int, part_bytes: int, etag: str, watch: Watch
    ) -> None:
        self._bucket = bucket
        self._key = key
        self._fd = fd
        self._size = size
        self._part_bytes = part_bytes
        self._etag = etag
        self._watch = watch
        self._lock = threading.Lock()
        self._offset = 0
        self._failed = threading.Event()

    def fetch(self) -> None:
        """Write the whole object to the file; raises where it is another one."""
        count = min(self._bucket.connections, -(-self._size // self._part_bytes))
        if count:
            run_threads(count, self._fetch_some, self._failed)

    def _fetch_some(self) -> None:
        buffer = memoryview(bytearray(min(_RECEIVE_BYTES, self._part_bytes)))
        while True:
            with self._lock:
                start = self._offset
                end = self._offset = min(start + self._part_bytes, self._size)
            if start == end:
                return
            attempts = 0
            while start < end:
                before = start
                try:
                    for count in self._fetch_range(start, end, buffer):
                        start += count
                except StoreUnreachableError:
                    attempts = 1 if start > before else attempts + 1
                    if attempts >= _FETCH_ATTEMPTS:
                        raise

    def _fetch_range(self, start: int, end: int, buffer: memoryview) -> Any:
        """Yield how many bytes more are in the file, until all of the range are."""
        with s3_errors(self._key):
            response = get_range(self._bucket, self._key, start, end - start, self._etag)
            if response is None:
                raise ChangedInStoreError(f"{printable(self._key)} became shorter")
            with closing(response["Body"]) as body:
                while start < end:
                    if self._failed.is_set():
                        raise Cancelled
                    check_cancelled(self._watch)
                    count = body.readinto(buffer[: end - start])
                    if not count:
                        raise StoreUnreachableError(f"{printable(self._key)}: cut off")
                    write_exactly(self._fd, buffer[:count], start)
                    self._watch.came(start, count)
                    self._watch.moved(count)
                    start += count
                    yield count


def get_range(bucket: Bucket, key: str, offset: int, length: int, etag: str | None) -> Any:
    """Ask for `length` bytes from `offset`; None where the object ends before them.

    The ETag is compared here as well, as some servers do not know conditions.
    """
    condition = {} if etag is None else {"IfMatch": f'"{etag}"'}
    try:
        response = bucket.client.get_object(
            Bucket=bucket.name,
            Key=bucket.object_key(key),
            Range=f"bytes={offset}-{offset + length - 1}",
            **condition,
        )
    except ClientError as error:
        if code_of(error) in ("InvalidRange", "416"):
            return None
        raise
    if etag not in (None, read_etag(response)):
        response["Body"].close()
        raise ChangedInStoreError(f"{printable(key)} changed in the store")
    return response
