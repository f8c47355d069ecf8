"""The file that `torch.save` writes, laid out without writing it.

Source: `torch/serialization.py` (`_save`) for the records and the pickle, `caffe2/serialize/
inline_container.cc` (`getPadding`, `PyTorchStreamWriter`) for their order and alignment, APPNOTE
6.3 for the headers. A test holds the result against `torch.save`'s own bytes.

As after `torch.serialization.set_crc32_options(False)`, tensors' records have no checksum:
`torch.load` does not look at it, and it would cost more than all the rest. `zipfile` complains.
"""

import io
import pickle
import struct
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from torch.serialization import location_tag

from lmstorfs.torch.pieces import Piece

_ALIGNMENT = 64
_PROTOCOL = 2
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF
_UTF8, _DESCRIBED = 0x0800, 0x0008  # names; checksum and size follow the bytes
_LOCAL, _DESCRIPTOR, _CENTRAL = 0x04034B50, 0x08074B50, 0x02014B50
_END64, _LOCATOR, _END = 0x06064B50, 0x07064B50, 0x06054B50
_LOCAL_BYTES = 30
_ZIP64 = 1  # the extra field's number


class _Record(msgspec.Struct):
    """One file of the archive."""

    name: bytes
    content: Any  # bytes, or a torch.UntypedStorage
    size: int
    offset: int = 0

    @property
    def flags(self) -> int:
        return _UTF8 | (_DESCRIBED if self.size else 0)

    @property
    def checksum(self) -> int:
        return zlib.crc32(self.content) if isinstance(self.content, bytes) else 0


class Archive:
    """`obj` as `torch.save` would write it to a file whose name without suffix is `stem`.

    The pickle is made now: what is not a tensor's memory is as it is at this call.
    """

    def __init__(self, obj: Any, stem: str) -> None:
        """Raise what pickle raises for an object that it cannot take."""
        data, storages = _pickled(obj)
        contents: list[tuple[bytes, Any, int]] = [
            (name, text, len(text))
            for name, text in (
                (b"data.pkl", data),
                (b".format_version", b"1"),
                (b".storage_alignment", b"%d" % _ALIGNMENT),
                (b"byteorder", sys.byteorder.encode()),
            )
        ]
        for key, storage in enumerate(storages):
            contents.append((b"data/%d" % key, storage, storage.nbytes()))
        contents.append((b"version", b"3\n", 2))
        folder = stem.encode("utf-8", "surrogateescape")
        self._records = [
            _Record(folder + b"/" + name, content, size) for name, content, size in contents
        ]
        self.nbytes = sum(storage.nbytes() for storage in storages)

    def pieces(self) -> Iterator[bytes | Piece]:
        """Give the file from its beginning to its end."""
        position = 0
        for record in self._records:
            record.offset = position
            head, tail = _local_header(record), _descriptor(record)
            yield head
            if isinstance(record.content, bytes):
                yield record.content
            elif record.size:
                yield Piece(record.content, 0, record.size)
            yield tail
            position += len(head) + record.size + len(tail)
        yield self._directory(position)

    def _directory(self, position: int) -> bytes:
        entries = b"".join(map(_central_header, self._records))
        count, size = len(self._records), len(entries)
        return (
            entries
            + struct.pack(
                "<IQHHIIQQQQ", _END64, 44, 0x031E, 45, 0, 0, count, count, size, position
            )
            + struct.pack("<IIQI", _LOCATOR, 0, position + size, 1)
            + struct.pack(
                "<IHHHHIIH", _END, 0, 0, min(count, _MAX16), min(count, _MAX16),
                min(size, _MAX32), min(position, _MAX32), 0,
            )
        )  # fmt: skip


def _zip64(record: _Record) -> bytes:
    numbers = [record.size] * 2 if record.size >= _MAX32 else []
    if record.offset >= _MAX32:
        numbers.append(record.offset)
    if not numbers:
        return b""
    return struct.pack(f"<HH{len(numbers)}Q", _ZIP64, 8 * len(numbers), *numbers)


def _local_header(record: _Record) -> bytes:
    """Return the header and what it is padded with, so that the bytes begin at a multiple of 64."""
    extra = _zip64(record)
    start = record.offset + _LOCAL_BYTES + len(record.name) + len(extra) + 4
    padding = -start % _ALIGNMENT
    extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    header = struct.pack(
        "<IHHHHHIIIHH", _LOCAL, 0, record.flags, 0, 0, 0, 0, 0, 0, len(record.name), len(extra)
    )
    return header + record.name + extra


def _descriptor(record: _Record) -> bytes:
    if not record.flags & _DESCRIBED:
        return b""
    wide = "QQ" if _zip64(record) else "II"
    return struct.pack(f"<II{wide}", _DESCRIPTOR, record.checksum, record.size, record.size)


def _central_header(record: _Record) -> bytes:
    extra = _zip64(record)
    size, offset = min(record.size, _MAX32), min(record.offset, _MAX32)
    return (
        struct.pack(
            "<IHHHHHHIIIHHHHHII", _CENTRAL, 0, 0, record.flags, 0, 0, 0, record.checksum,
            size, size, len(record.name), len(extra), 0, 0, 0, 0, offset,
        )
        + record.name
        + extra
    )  # fmt: skip


def _pickled(obj: Any) -> tuple[bytes, list[torch.UntypedStorage]]:
    """Return the pickle, in which storages are numbers, and those storages in their order."""
    keys: dict[int, str] = {}  # the very strings: pickle refers to one that it has seen
    dtypes: dict[int, torch.dtype] = {}
    storages: list[torch.UntypedStorage] = []

    def name_of(found: Any) -> tuple[Any, ...] | None:
        storage: torch.UntypedStorage = found
        if isinstance(found, torch.storage.TypedStorage):
            typed: Any = found
            storage, dtype = typed._untyped_storage, typed.dtype
            kind, numel = getattr(torch, typed._pickle_storage_type()), typed._size()
        elif torch.is_storage(found):
            dtype, kind, numel = torch.uint8, torch.UntypedStorage, storage.nbytes()
        else:
            return None
        address = storage.data_ptr() if storage.device.type != "meta" else 0
        if address and dtypes.setdefault(address, dtype) != dtype:
            raise RuntimeError(
                "Cannot save multiple tensors or storages that view the same data as"
                " different types"
            )
        key = keys.get(storage._cdata)
        if key is None:
            key = keys[storage._cdata] = str(len(storages))
            storages.append(storage)
        return ("storage", kind, key, location_tag(storage), numel)

    class Pickler(pickle.Pickler):
        def persistent_id(self, found: Any) -> tuple[Any, ...] | None:
            return name_of(found)

    buffer = io.BytesIO()
    Pickler(buffer, protocol=_PROTOCOL).dump(obj)
    return buffer.getvalue(), storages
