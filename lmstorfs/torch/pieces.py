"""What a checkpoint file is made of, in the order of its bytes: text of ours, and tensors' memory.

A layout gives pieces whose sizes are known before a byte of a tensor is read. So a file can be
written from its beginning to its end while tensors are still on their way from a GPU.
"""

import ctypes
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec
import torch

WRITTEN_IN_PLACE = ("cpu",)
"""Types of devices whose memory write(2) can read."""


Touch = Callable[[memoryview], None]
"""Reads bytes of the file as they are about to be written, or fills them in."""


class Late(msgspec.Struct, frozen=True):
    """`nbytes` of text that depends on tensors' bytes before it: `fill` writes it, in its turn."""

    nbytes: int
    fill: Touch


class Piece(msgspec.Struct, frozen=True):
    """`nbytes` bytes of a tensor's storage, from `offset` on."""

    storage: torch.UntypedStorage
    offset: int
    nbytes: int
    seen: Touch | None = None
    """Called with the bytes, one stretch after the other, when they are about to be written."""

    @property
    def is_local(self) -> bool:
        """Whether the bytes lie in this process's own memory."""
        return self.storage.device.type in WRITTEN_IN_PLACE

    def tensor(self) -> torch.Tensor:
        """Return the bytes as a tensor of uint8 that shares the memory."""
        tensor = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        tensor.set_(self.storage, self.offset, (self.nbytes,))  # type: ignore[call-overload]
        return tensor

    def view(self) -> memoryview:
        """Return local bytes as a view; the caller keeps the storage alive."""
        return view_of(self.storage, self.offset, self.nbytes)


class Layout(Protocol):
    """One file to be: its pieces, each byte of it in exactly one."""

    def pieces(self) -> Iterator[bytes | Piece | Late]:
        """Give the file from the beginning to the end."""
        ...


def view_of(storage: torch.UntypedStorage, offset: int, nbytes: int) -> memoryview:
    """Return the memory of a storage on the CPU, without a copy, as writable bytes."""
    if not nbytes:
        return memoryview(bytearray())
    array = (ctypes.c_char * nbytes).from_address(storage.data_ptr() + offset)
    return memoryview(array).cast("B")
