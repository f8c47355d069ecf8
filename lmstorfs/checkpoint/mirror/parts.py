"""A replica on its way: a file that fills in any order, and the digests of the blocks it has."""

import os
from pathlib import Path

import xxhash

from lmstorfs.checkpoint.mirror.messages import Offer
from lmstorfs.digest import BLOCK_BYTES, BLOCK_DIGEST_BYTES

_BUFFER_BYTES = 1 << 20


class Part:
    """One file `INO.part`."""

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self.fd = os.open(path, flags, 0o600)
        self.path = path
        self.room_bytes = 0
        """What it takes of the budget."""
        self.offered: Offer | None = None
        self._digests: dict[int, tuple[int, bytes]] = {}  # block → its length and digest

    def arrived(self, offset: int, count: int) -> None:
        """These bytes have just come."""
        first, last = offset // BLOCK_BYTES, (offset + count - 1) // BLOCK_BYTES
        for number in range(first, last + 1):
            self._digests.pop(number, None)
            start = number * BLOCK_BYTES
            if offset <= start and start + BLOCK_BYTES <= offset + count:
                self._digest(number, BLOCK_BYTES)

    def has(self, number: int, offer: Offer) -> bool:
        """Whether block `number` is what `offer` says."""
        length = min(BLOCK_BYTES, offer.size - number * BLOCK_BYTES)
        known = self._digests.get(number)
        if known is None or known[0] != length:
            if os.fstat(self.fd).st_size < number * BLOCK_BYTES + length:
                return False
            known = self._digest(number, length)
        return known[1] == _offered(offer.blocks, number)

    def _digest(self, number: int, length: int) -> tuple[int, bytes]:
        found = length, _digest_range(self.fd, number * BLOCK_BYTES, length)
        self._digests[number] = found
        return found

    def copy_from(
        self, replica: Path, blocks: bytes, missing: list[int], offer: Offer
    ) -> list[int]:
        """Copy blocks that `replica`, whose digests are `blocks`, has; return those still missing.

        Half a million appends to a log must not send the whole log each time.
        """
        left = []
        with replica.open("rb") as file:
            for number in missing:
                start = number * BLOCK_BYTES
                length = min(BLOCK_BYTES, offer.size - start)
                if _offered(blocks, number) != _offered(offer.blocks, number):
                    left.append(number)
                    continue
                _copy(file.fileno(), self.fd, start, length)
                self._digest(number, length)
                if not self.has(number, offer):
                    left.append(number)
        return left

    def is_whole(self, offer: Offer) -> bool:
        """Whether every block is what was offered."""
        return all(self.has(number, offer) for number in range(-(-offer.size // BLOCK_BYTES)))

    def finish(self, size: int, target: Path) -> None:
        """Put the whole file in its place."""
        os.ftruncate(self.fd, size)
        self.path.replace(target)
        self.close()

    def remove(self) -> None:
        """Nobody needs it."""
        self.close()
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self.fd)


def _offered(blocks: bytes, number: int) -> bytes:
    return blocks[number * BLOCK_DIGEST_BYTES : (number + 1) * BLOCK_DIGEST_BYTES]


def _digest_range(fd: int, start: int, length: int) -> bytes:
    state = xxhash.xxh3_128()
    with memoryview(bytearray(min(_BUFFER_BYTES, max(1, length)))) as buffer:
        end = start + length
        while start < end:
            with buffer[: end - start] as window:
                got = os.preadv(fd, [window], start)
                if got == 0:
                    return b""  # shorter than thought: no block's digest
                with window[:got] as read:
                    state.update(read)
            start += got
    return state.digest()


def _copy(source: int, target: int, start: int, length: int) -> None:
    end = start + length
    while start < end:
        got = os.copy_file_range(source, target, end - start, start, start)
        if got == 0:
            return  # its digest will tell
        start += got
