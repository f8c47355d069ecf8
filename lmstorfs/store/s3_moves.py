"""Moving, relabelling and deleting objects at the server: no content passes through here."""

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from typing import Any

from botocore.exceptions import ClientError

from lmstorfs.errors import NotInStoreError, StoreError
from lmstorfs.store.keys import printable
from lmstorfs.store.s3_client import Bucket, code_of, s3_error, s3_errors
from lmstorfs.store.s3_metadata import DIRECTORY_TYPE
from lmstorfs.store.s3_transfer import abort_upload, complete_upload, part_size, run_threads

MAX_COPY_BYTES = 5 << 30  # S3 copies no more than this by one request
_COPY_PART_BYTES = 512 << 20  # copied inside the server, several at once
_DELETE_BATCH = 1000  # S3's limit
_THREADS = 16  # requests at once for a tree of many small objects
_TRANSIENT = frozenset({"InternalError", "ServiceUnavailable", "SlowDown", "500", "502", "503"})


def list_keys(bucket: Bucket, directory: str) -> Iterator[tuple[str, int]]:
    """Yield (object key below the bucket, size) of everything below `directory`."""
    pages = bucket.client.get_paginator("list_objects_v2")
    with s3_errors(directory):
        for page in pages.paginate(Bucket=bucket.name, Prefix=bucket.object_key(f"{directory}/")):
            for item in page.get("Contents", ()):
                yield item["Key"], item["Size"]


def copy_object(bucket: Bucket, source: str, target: str, size: int, extra: Any) -> None:
    """Copy an object (object keys). `extra` replaces its metadata; empty keeps it."""
    origin = {"Bucket": bucket.name, "Key": source}
    with s3_errors(source):
        if size <= MAX_COPY_BYTES:
            replace = {"MetadataDirective": "REPLACE", **extra} if extra else {}
            bucket.client.copy_object(Bucket=bucket.name, Key=target, CopySource=origin, **replace)
            return
        if not extra:
            head = bucket.client.head_object(**origin)
            extra = {"Metadata": head["Metadata"], "ContentType": head["ContentType"]}
        _copy_parts(bucket, origin, target, size, extra)


def _copy_parts(bucket: Bucket, origin: Any, target: str, size: int, extra: Any) -> None:
    """Copy an object that is too large for one request."""
    client, place = bucket.client, {"Bucket": bucket.name, "Key": target}
    upload_id = client.create_multipart_upload(**place, **extra)["UploadId"]
    step = part_size(size, _COPY_PART_BYTES)
    starts = iter(range(0, size, step))
    lock, failed = threading.Lock(), threading.Event()
    parts: list[dict[str, Any]] = []

    def copy_some() -> None:
        while not failed.is_set():
            with lock:
                start = next(starts, None)
            if start is None:
                return
            number = start // step + 1
            answer = client.upload_part_copy(
                **place,
                UploadId=upload_id,
                PartNumber=number,
                CopySource=origin,
                CopySourceRange=f"bytes={start}-{min(start + step, size) - 1}",
            )
            parts.append({"PartNumber": number, "ETag": answer["CopyPartResult"]["ETag"]})

    key = bucket.own_key(target) or target
    try:
        run_threads(_THREADS, copy_some, failed)
        parts.sort(key=lambda part: part["PartNumber"])
        complete_upload(bucket, key, upload_id, parts, size)
    except BaseException:
        abort_upload(bucket, key, upload_id)
        raise


def move_tree(bucket: Bucket, old: str, new: str, *, markers: bool) -> bool:
    """Move everything below `old` to below `new`; returns whether there was anything.

    `markers` says whether the server holds objects whose names end in a slash.

    First every copy, then every delete. A crash anywhere leaves each object at its old place, at
    its new place or at both, so that the same call made again finishes the work: what is still
    at the old place is copied again and deleted.
    """
    source, target = bucket.object_key(f"{old}/"), bucket.object_key(f"{new}/")
    found = list(list_keys(bucket, old))

    def copy(item: tuple[str, int]) -> None:
        key, size = item
        new_key = target + key.removeprefix(source)
        with suppress(NotInStoreError):  # deleted since it was listed
            if key.endswith("/"):
                _copy_marker(bucket, key, new_key)
            else:
                copy_object(bucket, key, new_key, size, {})

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="copy") as threads:
        for _ in threads.map(copy, found):
            pass
    delete_objects(bucket, (key for key, _ in found))
    if markers:
        delete_objects(bucket, _directories(source, [key for key, _ in found]))
    return bool(found)


def _directories(top: str, keys: list[str]) -> list[str]:
    """Return the markers of `top` and of every directory on the way to `keys`, deepest first.

    Some servers (SeaweedFS) keep a directory of their own for what a name only implied, and go
    on listing it when it is empty. Elsewhere these deletes find nothing.
    """
    found = {top}
    for key in keys:
        end = len(key.rstrip("/"))
        while (end := key.rfind("/", len(top), end)) >= 0:
            found.add(key[: end + 1])
    return sorted(found, key=lambda marker: (-marker.count("/"), marker))


def _copy_marker(bucket: Bucket, source: str, target: str) -> None:
    """Make the same marker again: not every server copies an object without content."""
    with s3_errors(source):
        head = bucket.client.head_object(Bucket=bucket.name, Key=source)
        bucket.client.put_object(
            Bucket=bucket.name,
            Key=target,
            Body=b"",
            ContentType=DIRECTORY_TYPE,
            Metadata=head["Metadata"],
        )


def delete_objects(bucket: Bucket, keys: Iterable[str]) -> None:
    """Delete objects (object keys) in batches; what is not there is fine.

    Raises for the first object that stays; all others are gone by then.
    """
    rest = iter(keys)
    while batch := list(islice(rest, _DELETE_BATCH)):
        if len(batch) == 1 or not _delete_batch(bucket, batch):
            _delete_each(bucket, batch)


def _delete_batch(bucket: Bucket, batch: list[str]) -> bool:
    """Delete by one request; returns False where the server does not take such a request."""
    request = {"Objects": [{"Key": key} for key in batch], "Quiet": True}
    try:
        with s3_errors(bucket.name):
            response = bucket.client.delete_objects(Bucket=bucket.name, Delete=request)
    except StoreError as error:
        cause = error.__cause__
        if isinstance(cause, ClientError) and code_of(cause) not in _TRANSIENT:
            return False  # not implemented, or a name that its XML cannot hold
        raise
    for failure in response.get("Errors", ()):
        code = failure.get("Code", "unknown")
        if code not in ("NoSuchKey", "404"):
            raise s3_error(ClientError({"Error": {"Code": code}}, "DeleteObjects"), failure["Key"])
    return True


def _delete_each(bucket: Bucket, batch: list[str]) -> None:
    def delete(key: str) -> None:
        try:
            with s3_errors(printable(key)):
                bucket.client.delete_object(Bucket=bucket.name, Key=key)
        except NotInStoreError:
            return

    if len(batch) == 1:
        delete(batch[0])
        return
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="delete") as threads:
        for _ in threads.map(delete, batch):
            pass
