"""The file that `safetensors.torch.save_file` writes, laid out without writing it.

Source: https://github.com/huggingface/safetensors (`safetensors/src/tensor.rs`, `prepare`): eight
bytes with the header's length, the header in JSON padded with spaces to a multiple of eight, and
the tensors, those with the larger elements first, then by name.
"""

import itertools
import json
from collections.abc import Iterator, Mapping

import torch

from lmstorfs.errors import UnsavableError
from lmstorfs.torch.pieces import Piece

# From the largest to the smallest, as the format sorts them.
_NAMES: dict[torch.dtype, str] = {
    torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64", torch.complex64: "C64",
    torch.float32: "F32", torch.uint32: "U32", torch.int32: "I32",
    torch.bfloat16: "BF16", torch.float16: "F16", torch.uint16: "U16", torch.int16: "I16",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_ALIGNMENT = 8


class SafetensorsFile:
    """`tensors` as `save_file` would write them."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
    ) -> None:
        """Raise `UnsavableError` for what the format cannot hold."""
        _check(tensors)
        order = list(_NAMES)
        chosen = sorted(tensors.items(), key=lambda item: (order.index(item[1].dtype), item[0]))
        self._tensors = [(name, tensor.detach()) for name, tensor in chosen]
        self._metadata = dict(metadata) if metadata else None

    def pieces(self) -> Iterator[bytes | Piece]:
        """Give the file from its beginning to its end."""
        header: dict[str, object] = {}
        if self._metadata is not None:
            header["__metadata__"] = self._metadata
        position = 0
        for name, tensor in self._tensors:
            end = position + tensor.nbytes
            header[name] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [position, end],
            }
            position = end
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        yield len(text).to_bytes(8, "little") + text
        for _, tensor in self._tensors:
            if tensor.nbytes:
                storage = tensor.untyped_storage()
                offset = int(tensor.storage_offset()) * tensor.element_size()
                yield Piece(storage, offset, tensor.nbytes)


def _check(tensors: Mapping[str, torch.Tensor]) -> None:
    owners: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise UnsavableError("safetensors holds a flat dict of names and tensors")
        if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in _NAMES:
            raise UnsavableError(f"{name}: safetensors does not hold {tensor.dtype} like this")
        if not tensor.is_contiguous():
            raise UnsavableError(f"{name} is not contiguous: save its contiguous() copy")
        if tensor.nbytes:
            start = tensor.data_ptr()
            owners.setdefault(tensor.untyped_storage()._cdata, []).append(
                (start, start + tensor.nbytes, name)
            )
    for spans in owners.values():
        spans.sort()
        for (_, end, one), (start, _, other) in itertools.pairwise(spans):
            if start < end:
                raise UnsavableError(
                    f"{one} and {other} share memory, which safetensors does not hold: save one"
                )
