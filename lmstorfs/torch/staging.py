"""Brings the pieces of a file, in order, to where a thread can write them from: host memory.

Small pieces and text are gathered. Memory of the host is copied into the pool, or lent to the
writer where the caller promised not to change it; memory of a GPU is copied into pinned chunks on
a stream of its own, beside the kernels of the training.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec
import torch

from lmstorfs.torch.pieces import Late, Piece, Touch, view_of
from lmstorfs.torch.pool import Chunk, Pool

_cuda: Any = torch.cuda  # its streams and events have no types

SMALL_BYTES = 64 << 10  # not worth a promise, a chunk or a copy by several threads
_BY_THREADS_BYTES = 1 << 20
_GATHERED_BYTES = 1 << 20


class Stretch(msgspec.Struct):
    """The next bytes of a file."""

    view: memoryview
    chunk: Chunk | None = None
    """Where they lie in the pool, to be given back."""
    lender: Piece | None = None
    """Whose own memory they are."""
    events: list[Any] = []
    """CUDA events after which they are right."""
    touches: list[tuple[int, int, Touch]] = []
    """What is to see, or to fill in, the bytes from one position to another before the write."""


class Streams:
    """The copying stream of each GPU, made at its first use."""

    def __init__(self) -> None:
        self._made: dict[torch.device, Any] = {}

    def of(self, device: torch.device) -> Any:
        """Return the stream for copies from `device`."""
        if device not in self._made:
            self._made[device] = _cuda.Stream(device)
        return self._made[device]


class Stager:
    """Stages one file after the other; `put` takes the stretches."""

    def __init__(self, pool: Pool, streams: Streams, *, timeout_s: float) -> None:
        self._pool = pool
        self._streams = streams
        self._timeout_s = timeout_s

    def stage(
        self,
        pieces: Iterable[bytes | Piece | Late],
        put: Callable[[Stretch], None],
        *,
        in_place: bool,
        after: Any = None,
        starved: Callable[[], None] = lambda: None,
    ) -> dict[torch.device, Any]:
        """Hand all pieces to `put`; return each GPU's CUDA event after which it is not read.

        `in_place`: local memory is lent and not copied. `after` maps a device to the event that
        copies from it wait for; None: all that its current stream was given so far. `starved` is
        called where the pool is used up before the end. Raises `PoolFullError`.
        """
        take = partial(self._pool.take, self._timeout_s, starved)
        fill = _Fill(self._pool, self._streams, put, take, after)
        try:
            for piece in pieces:
                if isinstance(piece, bytes):
                    fill.text(piece)
                elif isinstance(piece, Late):
                    fill.text(bytes(piece.nbytes), piece.fill)
                elif not piece.is_local:
                    fill.copy(piece)
                elif piece.nbytes < SMALL_BYTES:
                    fill.text(bytes(piece.view()), piece.seen)
                elif in_place:
                    fill.flush()
                    touches = [(0, piece.nbytes, piece.seen)] if piece.seen else []
                    put(Stretch(piece.view(), lender=piece, touches=touches))
                else:
                    fill.copy(piece)
            fill.flush()
        finally:
            fill.abandon()
        return fill.last


class _Fill:
    """The chunk that is being filled, or the text that needs none yet."""

    def __init__(
        self,
        pool: Pool,
        streams: Streams,
        put: Callable[[Stretch], None],
        take: Callable[[], Chunk],
        after: Any,
    ) -> None:
        self._pool = pool
        self._streams = streams
        self._put = put
        self._take = take
        self._after = after
        self._text = bytearray()
        self._chunk: Chunk | None = None
        self._used = 0
        self._touches: list[tuple[int, int, Touch]] = []
        self._devices: set[torch.device] = set()
        self._ordered: set[torch.device] = set()
        self.last: dict[torch.device, Any] = {}

    def text(self, text: bytes, touch: Touch | None = None) -> None:
        if self._chunk is not None and len(text) > self._pool.chunk_bytes - self._used:
            self.flush()
        if self._chunk is None and len(self._text) >= _GATHERED_BYTES:
            self.flush()
            self._chunk = self._take()  # so that text is bounded, too
        start = self._used
        if self._chunk is not None:
            self._chunk.view[start : start + len(text)] = text
        else:
            self._text += text
        self._used += len(text)
        if touch is not None and text:
            self._touches.append((start, self._used, touch))

    def copy(self, piece: Piece) -> None:
        source = piece.tensor()
        done = 0
        while done < piece.nbytes:
            if self._chunk is None:
                self.flush()
                self._chunk = self._take()
            count = min(piece.nbytes - done, self._pool.chunk_bytes - self._used)
            self._copy(piece, done, source[done : done + count], self._chunk)
            if piece.seen is not None:
                self._touches.append((self._used, self._used + count, piece.seen))
            done += count
            self._used += count
            if self._used == self._pool.chunk_bytes:
                self.flush()

    def _copy(self, piece: Piece, done: int, source: torch.Tensor, chunk: Chunk) -> None:
        target = chunk.memory[self._used : self._used + source.numel()]
        device = source.device
        if piece.is_local or device.type != "cuda":
            if piece.is_local and source.numel() < _BY_THREADS_BYTES:
                found = view_of(piece.storage, piece.offset + done, source.numel())
                chunk.view[self._used : self._used + source.numel()] = found
            else:
                target.copy_(source)  # by several threads; other devices' own, which waits
            return
        side = self._streams.of(device)
        if device not in self._ordered:
            self._ordered.add(device)
            if self._after is None:
                side.wait_stream(torch.cuda.current_stream(device))
            else:
                side.wait_event(self._after[device])
        with torch.cuda.stream(side):
            target.copy_(source, non_blocking=True)
        source.record_stream(side)  # whoever frees it meanwhile must not have it reused
        self._devices.add(device)

    def flush(self) -> None:
        """Hand over what there is."""
        touches, self._touches = self._touches, []
        if self._text:
            text, self._text = self._text, bytearray()
            self._put(Stretch(memoryview(text), touches=touches))
        if self._chunk is not None and self._used:
            chunk, self._chunk = self._chunk, None
            events = []
            for device in self._devices:
                event = _cuda.Event()
                event.record(self._streams.of(device))
                events.append(event)
                self.last[device] = event
            view = chunk.view[: self._used]
            self._put(Stretch(view, chunk, events=events, touches=touches))
        self._used = 0
        self._devices = set()

    def abandon(self) -> None:
        """Give back the chunk that nobody was handed."""
        if self._chunk is not None:
            for device in self._devices:
                self._streams.of(device).synchronize()
            self._pool.give_back(self._chunk)
            self._chunk = None


def events_now(devices: Iterable[torch.device]) -> dict[torch.device, Any]:
    """Return, for each GPU, the event that its current stream reaches after all it was given."""
    found = {}
    for device in devices:
        event = _cuda.Event()
        event.record(torch.cuda.current_stream(device))
        found[device] = event
    return found


def order_after(events: dict[torch.device, Any]) -> None:
    """Let later kernels on the current streams wait for these events; the host goes on."""
    for device, event in events.items():
        torch.cuda.current_stream(device).wait_event(event)
