"""What pool and workers say to each other: length-prefixed msgpack frames, and the jobs.

No pickle: a worker that went wrong can make the daemon fail a call, and nothing worse. msgpack
knows only UTF-8, so every text is quoted on the way (`keys.quote_name`), as names may be any
bytes.
"""

from typing import Any, TypeVar

import msgspec

from lmstorfs import errors
from lmstorfs.store.keys import quote_name, unquote_name
from lmstorfs.store.store import Attributes, ObjectInfo, StoreConfig

LENGTH_BYTES = 4  # big-endian length before each frame
MAX_FRAME_BYTES = 16 << 20  # attributes and xattrs; content never travels here

_RAISABLE: dict[str, type[errors.LmstorfsError]] = {
    kind.__name__: kind
    for kind in (
        errors.SetupError,
        errors.UsageError,
        errors.NoRoomError,
        errors.DeadlineError,
        errors.StoreError,
        errors.StoreUnreachableError,
        errors.StoreDeniedError,
        errors.NotInStoreError,
        errors.ChangedInStoreError,
        errors.FencedError,
        errors.SupersededError,
        errors.CorruptCopyError,
    )
}


class Digest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Digest the first `size` bytes of a file."""

    source: str
    size: int


class Upload(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Bring one version to the store."""

    key: str
    source: str
    size: int
    attributes: Attributes
    """Its digest may be None: the worker computes it first."""
    mtime_ns: int | None = None
    """The source's mtime when the version was closed; another one means it is superseded."""
    verify: bool = False
    """Read the source twice even if its digest is known: a writer may hold it mapped."""
    owner: str | None = None
    """Publish only where the store's owner record names this owner; None: whoever it is."""


class Fetch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Bring one object into a file of a tier."""

    key: str
    target: str
    """Made (mode 0600) or truncated; removed again where the fetch fails."""
    size: int
    etag: str | None
    digest: str | None
    """What the content must have; None takes any."""


Job = Digest | Upload | Fetch


class Uploaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The version is in the store."""

    info: ObjectInfo
    digest: str


class Fetched(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The object is in the target file."""

    digest: str


class Digested(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to `Digest`."""

    digest: str


Result = Uploaded | Fetched | Digested


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first frame to a worker: the store that it serves."""

    config: StoreConfig


class Call(msgspec.Struct, frozen=True, tag=True):
    """Do `job`; several calls may be under way."""

    number: int
    job: Job


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Give the call up; it is answered all the same."""

    number: int


class Moved(msgspec.Struct, frozen=True, tag=True):
    """`count` more bytes of a call are through."""

    number: int
    count: int


class Began(msgspec.Struct, frozen=True, tag=True):
    """A call began an upload at the store that can be aborted by its id."""

    number: int
    key: str
    upload_id: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """A call succeeded."""

    number: int
    result: Result


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A call raised one of our errors."""

    number: int
    kind: str
    message: str


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """A call was given up, and nothing of it is left."""

    number: int


ToWorker = Start | Call | Cancel
FromWorker = Moved | Began | Done | Failed | Stopped
_Message = TypeVar("_Message", bound=ToWorker | FromWorker)


def encode(message: ToWorker | FromWorker) -> bytes:
    """Return `message` as a whole frame, its length included."""
    plain = msgspec.to_builtins(message, builtin_types=(bytes,))
    body = msgspec.msgpack.encode(_each_text(plain, quote_name))
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def decode_to_worker(body: bytes) -> ToWorker:
    """Return the message that a frame to a worker holds."""
    message: ToWorker = _decode(body, ToWorker)
    return message


def decode_from_worker(body: bytes) -> FromWorker:
    """Return the message that a frame from a worker holds."""
    message: FromWorker = _decode(body, FromWorker)
    return message


def _decode(body: bytes, kind: Any) -> Any:
    plain = _each_text(msgspec.msgpack.decode(body), unquote_name)
    return msgspec.convert(plain, kind, builtin_types=(bytes,))


def _each_text(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_each_text(k, change): _each_text(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_each_text(item, change) for item in value]
    return value


def error_of(failed: Failed) -> errors.LmstorfsError:
    """Return the error that a worker's call raised."""
    return _RAISABLE.get(failed.kind, errors.StoreError)(failed.message)
