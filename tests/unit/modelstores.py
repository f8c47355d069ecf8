"""Stores for the machine in `test_catalog_store.py`: a directory, and one as S3 keeps objects."""

import os
import shutil
import tempfile
from pathlib import Path

from lmstorfs.digest import digest_bytes
from lmstorfs.errors import NotInStoreError
from lmstorfs.store import Attributes, Kind, ObjectInfo
from lmstorfs.store.directory import DirectoryStore
from lmstorfs.store.store import Unwatched

Tree = dict[str, bytes | None]
"""What lies at each path: a file's content, or None for a directory."""


class ObjectStore:
    """Keeps objects as S3 does: a flat list of keys; a directory is a marker that ends with /."""

    directory_times_drift = False

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}

    def put(self, key: str, content: bytes, attributes: Attributes) -> ObjectInfo:
        self._objects[key] = content
        return info_of(key, Kind.FILE, content, attributes)

    def put_directory(self, key: str, attributes: Attributes) -> ObjectInfo:
        self._objects[key + "/"] = b""
        return info_of(key, Kind.DIRECTORY, b"", attributes)

    def set_attributes(self, key: str, kind: Kind, attributes: Attributes) -> ObjectInfo:
        if kind is Kind.DIRECTORY:
            return self.put_directory(key, attributes)
        if key not in self._objects:
            raise NotInStoreError(key)
        return info_of(key, kind, self._objects[key], attributes)

    def rename(self, old: str, new: str, kind: Kind) -> None:
        if kind is Kind.FILE:
            if old in self._objects:
                self._objects[new] = self._objects.pop(old)
            elif new not in self._objects:
                raise NotInStoreError(old)
            return
        found = [key for key in self._objects if key.startswith(old + "/")]
        for key in found:
            self._objects[new + key[len(old) :]] = self._objects.pop(key)
        if not found and not any(key.startswith(new + "/") for key in self._objects):
            raise NotInStoreError(old)

    def delete(self, keys: list[str]) -> None:
        for key in keys:
            self._objects.pop(key, None)

    def remove_directory(self, key: str) -> None:
        if not any(key + "/" < other and other.startswith(key + "/") for other in self._objects):
            self._objects.pop(key + "/", None)

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Nothing of an upload is seen."""

    def tree(self) -> Tree:
        return {
            key.rstrip("/"): None if key.endswith("/") else content
            for key, content in self._objects.items()
        }

    def close(self) -> None:
        """Nothing is held."""


class FolderStore(DirectoryStore):
    """The real one, with content that comes as bytes."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="lmstorfs-store-", dir=SHARED))
        super().__init__(str(self.folder))

    def put(self, key: str, content: bytes, attributes: Attributes) -> ObjectInfo:
        with tempfile.TemporaryFile(dir=SHARED) as source:
            source.write(content)
            source.flush()
            return self.put_file(key, source.fileno(), len(content), attributes, Unwatched())

    def tree(self) -> Tree:
        return {
            str(path.relative_to(self.folder)): None if path.is_dir() else path.read_bytes()
            for path in self.folder.rglob("*")
        }

    def close(self) -> None:
        shutil.rmtree(self.folder)


SHARED = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def info_of(key: str, kind: Kind, content: bytes, attributes: Attributes | None) -> ObjectInfo:
    etag = digest_bytes(content)
    return ObjectInfo(
        key=key, kind=kind, size=len(content), etag=etag, mtime_ns=1, attributes=attributes
    )
