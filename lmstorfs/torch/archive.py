"""The file that `torch.save` writes, laid out without writing it.

Source: `torch/serialization.py` (`_save`) for the records and the pickle, `caffe2/serialize/
inline_container.cc` (`getPadding`, `PyTorchStreamWriter`) for their order and alignment, APPNOTE
6.3 for the headers. A test holds the result against `torch.save`'s own bytes.

Without checksums, tensors' records have none, as after `torch.serialization.set_crc32_options(
False)`: `torch.load` does not look at them, and they cost more than all the rest; `zipfile`
complains. With them the file is `torch.save`'s own, to the last bit.
"""

import io
import pickle
import struct
import sys
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from torch.serialization import location_tag

from lmstorfs.torch.pieces import Late, Piece

_ALIGNMENT = 64
_PROTOCOL = 2
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF
_UTF8, _DESCRIBED = 0x0800, 0x0008  # names; checksum and size follow the bytes
_LOCAL, _DESCRIPTOR, _CENTRAL = 0x04034B50, 0x08074B50, 0x02014B50
_END64, _LOCATOR, _END = 0x06064B50, 0x07064B50, 0x06054B50
_LOCAL_BYTES = 30
_IDENTIFIER, _IDENTIFIER_BYTES = b".data/serialization_id", 40
_ZIP64 = 1  # the extra field's number


class _Record(msgspec.Struct):
    """One file of the archive."""

    name: bytes
    content: Any  # bytes, or a torch.UntypedStorage
    size: int
    offset: int = 0
    checksum: int = 0

    @property
    def flags(self) -> int:
        return _UTF8 | (_DESCRIBED if self.size else 0)

    def see(self, view: memoryview) -> None:
        self.checksum = zlib.crc32(view, self.checksum)


class Archive:
    """`obj` as `torch.save` would write it to a file whose name without suffix is `stem`.

    The pickle is made now: what is not a tensor's memory is as it is at this call.
    """

    def __init__(self, obj: Any, stem: str, *, checksums: bool = False) -> None:
        """Raise what pickle raises for an object that it cannot take."""
        self._checksums = checksums
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
        names = [name for name, _, _ in contents]
        if checksums:
            contents.append((_IDENTIFIER, None, _IDENTIFIER_BYTES))
            self._names_hash = _names_hash(names)
        folder = stem.encode("utf-8", "surrogateescape")
        self._records = [
            _Record(folder + b"/" + name, content, size) for name, content, size in contents
        ]

    def pieces(self) -> Iterator[bytes | Piece | Late]:
        """Give the file from its beginning to its end."""
        position = 0
        for record in self._records:
            record.offset = position
            head = _local_header(record)
            yield head
            yield from self._content(record)
            position += len(head) + record.size + len(_descriptor(record))
        if self._checksums:
            nbytes = len(self._directory(position))
            yield Late(nbytes, lambda view: _fill(view, self._directory(position)))
        else:
            yield self._directory(position)

    def _content(self, record: _Record) -> Iterator[bytes | Piece | Late]:
        """Give a record's bytes and what follows them."""
        if isinstance(record.content, bytes):
            record.see(memoryview(record.content))
            yield record.content
        elif record.content is None:
            yield Late(record.size, lambda view: self._identify(record, view))
        elif record.size:
            yield Piece(record.content, 0, record.size, record.see if self._checksums else None)
        if self._checksums and not isinstance(record.content, bytes):
            nbytes = len(_descriptor(record))
            yield Late(nbytes, lambda view: _fill(view, _descriptor(record)))
        else:
            yield _descriptor(record)

    def _identify(self, record: _Record, view: memoryview) -> None:
        """Fill in the archive's fingerprint, of the names and the checksums of all records."""
        combined = 0
        for other in self._records[:-1]:
            if other.size:
                combined = _hash_combine(combined, other.checksum)
        _fill(view, b"%020d%020d" % (self._names_hash, combined))
        record.see(view)

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


def _fill(view: memoryview, text: bytes) -> None:
    view[:] = text


def _hash_combine(seed: int, value: int) -> int:
    """Do `at::hash_combine` (`c10/util/hash.h`)."""
    mask = 0xFFFFFFFFFFFFFFFF
    return seed ^ ((value + 0x9E3779B9 + ((seed << 6) & mask) + (seed >> 2)) & mask)


def _names_hash(names: list[bytes]) -> int:
    """Return torch's hash of the records' names, which only torch itself can compute.

    Its order is that of a C++ hash table: an archive with these records, empty, tells.
    """
    buffer = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(buffer)
    for name in names:
        writer.write_record(name.decode(), b"", 0)
    writer.write_end_of_file()
    with zipfile.ZipFile(buffer) as archive:
        (found,) = (name for name in archive.namelist() if name.endswith(_IDENTIFIER.decode()))
        return int(archive.read(found)[:20])


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
