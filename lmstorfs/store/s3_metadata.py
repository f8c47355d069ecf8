"""A file's attributes as an object's metadata, under the names that s3fs and rclone use.

Written so that both read it: `mode` in decimal with the type bits, `uid`, `gid`, `mtime` as
`seconds.nanoseconds`, `xattr` as s3fs has it. Read from whatever wrote it: rclone's `-M` writes
`mode` in octal and `mtime` as RFC 3339, some servers change the case of names, and an object of
another tool has none of it.
"""

import base64
import binascii
import json
import logging
import os
import re
import stat
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, unquote

from lmstorfs.store.keys import quote_name, unquote_name
from lmstorfs.store.store import Attributes, Kind, ObjectInfo

log = logging.getLogger(__name__)

DIRECTORY_TYPE = "application/x-directory"
MAX_METADATA_BYTES = 2048  # S3's limit: names and values together
_DIGEST_KIND = "xxh3-128"
_NS_PER_S = 1_000_000_000
_SECONDS = re.compile(r"(-?)(\d+)(?:\.(\d*))?")
_FRACTION = re.compile(r"\.(\d+)")
_DIGEST = re.compile(rf"{_DIGEST_KIND}:([0-9a-f]{{32}})")
_DEFAULT_MODES = {
    Kind.FILE: stat.S_IFREG | 0o644,
    Kind.DIRECTORY: stat.S_IFDIR | 0o755,
    Kind.SYMLINK: stat.S_IFLNK | 0o777,
}
_TYPE_BITS = {
    Kind.FILE: stat.S_IFREG,
    Kind.DIRECTORY: stat.S_IFDIR,
    Kind.SYMLINK: stat.S_IFLNK,
}


def write_metadata(attributes: Attributes, kind: Kind) -> dict[str, str]:
    """Return the metadata for `attributes`; the type bits are always those of `kind`.

    Xattrs that S3 has no room for are left out, the longest first, and the log says so: a
    version in the store without them is worth more than none.
    """
    metadata = {
        "mode": str(stat.S_IMODE(attributes.mode) | _TYPE_BITS[kind]),
        "uid": str(attributes.uid),
        "gid": str(attributes.gid),
        "mtime": _write_time(attributes.mtime_ns),
    }
    if attributes.digest is not None:
        metadata["lmstorfs-digest"] = f"{_DIGEST_KIND}:{attributes.digest}"
    if attributes.version is not None:
        metadata["lmstorfs-version"] = str(attributes.version)
    xattrs = dict(attributes.xattrs)
    while xattrs:
        metadata["xattr"] = _write_xattrs(xattrs)
        if sum(len(name) + len(value) for name, value in metadata.items()) <= MAX_METADATA_BYTES:
            break
        longest = max(xattrs, key=lambda name: len(name) + len(xattrs[name]))
        log.warning("S3 has no room for the attribute %s; it is not stored", quote_name(longest))
        del xattrs[longest], metadata["xattr"]
    return metadata


def read_info(key: str, response: Mapping[str, Any], kind: Kind = Kind.FILE) -> ObjectInfo:
    """Return what a `HeadObject` answer says; `kind` is what to take it for where it does not."""
    metadata = {name.lower(): value for name, value in response.get("Metadata", {}).items()}
    mode = _read_mode(metadata.get("mode", ""))
    size: int = response["ContentLength"]
    empty_directory = response.get("ContentType") == DIRECTORY_TYPE and not size
    if kind is not Kind.DIRECTORY:
        if mode is not None and stat.S_ISLNK(mode):
            kind = Kind.SYMLINK
        elif empty_directory or (mode is not None and stat.S_ISDIR(mode)):
            kind = Kind.DIRECTORY
    if mode is None:
        mode = _DEFAULT_MODES[kind]
    modified_ns = time_ns(response["LastModified"])
    mtime_ns = _read_time(metadata.get("mtime", ""))
    digest = _DIGEST.fullmatch(metadata.get("lmstorfs-digest", ""))
    version = metadata.get("lmstorfs-version", "")
    return ObjectInfo(
        key=key,
        kind=kind,
        size=0 if kind is Kind.DIRECTORY else size,
        etag="" if kind is Kind.DIRECTORY else read_etag(response),
        mtime_ns=modified_ns,
        attributes=Attributes(
            mode=stat.S_IMODE(mode) | _TYPE_BITS[kind],
            uid=_read_number(metadata.get("uid", ""), os.getuid()),
            gid=_read_number(metadata.get("gid", ""), os.getgid()),
            mtime_ns=modified_ns if mtime_ns is None else mtime_ns,
            digest=digest[1] if digest else None,
            version=int(version) if version.isdecimal() else None,
            xattrs=_read_xattrs(metadata.get("xattr", "")),
        ),
    )


def directory_info(key: str, mtime_ns: int) -> ObjectInfo:
    """Return what is said of a directory that no object stands for."""
    return ObjectInfo(
        key=key,
        kind=Kind.DIRECTORY,
        size=0,
        etag="",
        mtime_ns=mtime_ns,
        attributes=Attributes(
            mode=_DEFAULT_MODES[Kind.DIRECTORY],
            uid=os.getuid(),
            gid=os.getgid(),
            mtime_ns=mtime_ns,
        ),
    )


def read_etag(response: Mapping[str, Any]) -> str:
    """Return an answer's ETag without its quotes, which some servers leave out."""
    return str(response.get("ETag", "")).strip('"')


def time_ns(moment: datetime) -> int:
    """Return nanoseconds since the epoch, exactly."""
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86400 + since.seconds) * _NS_PER_S + since.microseconds * 1000


def _write_time(time: int) -> str:
    seconds, nanoseconds = divmod(abs(time), _NS_PER_S)
    return f"{'-' if time < 0 else ''}{seconds}.{nanoseconds:09}"


def _read_time(text: str) -> int | None:
    """Return the time that `text` tells, in nanoseconds; no digit is lost to a float."""
    if match := _SECONDS.fullmatch(text):
        sign, seconds, fraction = match.groups("")
        time = int(seconds) * _NS_PER_S + int(fraction[:9].ljust(9, "0"))
        return -time if sign else time
    fraction = _FRACTION.search(text)[1] if _FRACTION.search(text) else ""  # type: ignore[index]
    try:
        whole = datetime.fromisoformat(_FRACTION.sub("", text))
    except ValueError:
        return None
    if whole.tzinfo is None:
        return None
    return time_ns(whole) + int(fraction[:9].ljust(9, "0"))


def _read_mode(text: str) -> int | None:
    """Return a mode written in decimal (s3fs) or in octal (rclone).

    Which of the two it is shows in the type bits: read as decimal, no octal mode that rclone
    writes is one that s3fs would write, if a symlink's permissions are always 0777.
    """
    if not text.isascii() or not text.isdigit():
        return None
    decimal = int(text)
    if not text.startswith("0") and decimal <= 0o177777:
        kind = stat.S_IFMT(decimal)
        if kind in (stat.S_IFREG, stat.S_IFDIR) or decimal == stat.S_IFLNK | 0o777:
            return decimal
    try:
        octal = int(text, 8)
    except ValueError:
        return None
    return octal if octal <= 0o177777 else None


def _read_number(text: str, default: int) -> int:
    return int(text) if text.isascii() and text.isdigit() else default


def _write_xattrs(xattrs: Mapping[str, bytes]) -> str:
    """Return s3fs's form: JSON of names and base64 values, percent-encoded."""
    encoded = {quote_name(name): base64.b64encode(value).decode() for name, value in xattrs.items()}
    return quote(json.dumps(encoded, ensure_ascii=False, separators=(",", ":")))


def _read_xattrs(text: str) -> dict[str, bytes]:
    try:
        found = json.loads(unquote(text)) if text else {}
        return {
            unquote_name(name): base64.b64decode(value, validate=True)
            for name, value in found.items()
            if name.startswith("user.")
        }
    except (ValueError, TypeError, AttributeError, binascii.Error):
        log.warning("an object's metadata 'xattr' is not in s3fs's form; it is not read")
        return {}
