"""Small objects of our own in a store, and the one that says whose the store is.

The owner record is one line, `ORIGIN EPOCH`, and words for people. It is written by mounts that
have a mirror: only there another node may take a dead one's place, and the dead one may come back.
"""

import os

from lmstorfs.digest import digest_bytes
from lmstorfs.errors import ChangedInStoreError, FencedError, NotInStoreError
from lmstorfs.store.keys import OWN_PREFIX
from lmstorfs.store.store import Attributes, Store, Unwatched

OWNER_KEY = OWN_PREFIX + "owner"
_RECORD_MAX_BYTES = 64 << 10


def read_record(store: Store, key: str) -> bytes | None:
    """Return a small object's content; None where there is none. Raises `StoreError`."""
    try:
        return store.read(key, 0, _RECORD_MAX_BYTES)
    except (NotInStoreError, ChangedInStoreError):
        return None


def write_record(store: Store, key: str, content: bytes) -> None:
    """Write a small object. Raises `StoreError`."""
    fd = os.memfd_create("lmstorfs-record")
    try:
        os.write(fd, content)
        attributes = Attributes(
            mode=0o100600,
            uid=os.geteuid(),
            gid=os.getegid(),
            mtime_ns=os.fstat(fd).st_mtime_ns,
            digest=digest_bytes(content),
            version=1,
            xattrs={},
        )
        store.put_file(key, fd, len(content), attributes, Unwatched())
    finally:
        os.close(fd)


def owner_of(record: bytes | None) -> str | None:
    """Return the `ORIGIN EPOCH` that an owner record names."""
    if record is None:
        return None
    words = record.decode(errors="replace").split()
    return " ".join(words[:2]) if len(words) >= 2 else None


def check_owner(store: Store, owner: str) -> None:
    """Raise `FencedError` where the store says that somebody else is its owner by now."""
    record = read_record(store, OWNER_KEY)
    found = owner_of(record)
    if record is not None and found != owner:
        who = " ".join(record.decode(errors="replace").split()[2:])
        raise FencedError(f"another node has taken this one's place at the store ({who})")
