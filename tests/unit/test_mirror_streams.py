"""What is sent of files while they are being written, against a clock that the test turns."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmstorfs.catalog import ROOT_INO, SqliteCatalog
from lmstorfs.checkpoint.mirror.streams import Growing, Streams
from lmstorfs.tiers import Placement, Tier
from lmstorfs.units import GIB, MIB

LINK = GIB  # bytes a second
LOOK_S = 0.01


class Writer:
    """One program that writes one file, and the mirror's client that looks again and again."""

    def __init__(self, folder: Path) -> None:
        (folder / "ram").mkdir()
        self.catalog = SqliteCatalog(folder / "catalog.db")
        tier = Tier("ram", folder / "ram", GIB)
        inode = self.catalog.create(
            ROOT_INO, b"f", mode=stat.S_IFREG | 0o644, uid=0, gid=0, writing=True, tier="ram"
        )
        self.ino = inode.ino
        self.fd = tier.open(self.ino, create=True)
        self.open = self.waits = True
        self.now = 100.0
        self.sent: list[tuple[int, int]] = []
        placement = Placement([tier], self.catalog, lambda ino: True)
        self.streams = Streams(
            self.catalog, placement, self._growing, lambda ino: self.waits, lambda: self.now
        )

    def _growing(self) -> list[Growing]:
        return [Growing(self.ino, self.size, anew=True)] if self.open else []

    @property
    def size(self) -> int:
        return os.fstat(self.fd).st_size

    @property
    def end(self) -> int:
        """How far it was sent, each byte once."""
        reached = 0
        for start, count in self.sent:
            assert start == reached
            reached += count
        return reached

    def writes(self, bytes_per_s: int, seconds: float) -> None:
        """Write at this speed for so long; meanwhile the client looks and sends."""
        until = self.now + seconds
        while self.now < until:
            before = self.now
            self.looks()
            self.now += LOOK_S
            os.ftruncate(self.fd, self.size + int(bytes_per_s * (self.now - before)))

    def looks(self) -> None:
        for piece in self.streams.slices():
            self.now += piece.count / LINK
            self.sent.append((piece.start, piece.count))

    def close(self) -> None:
        self.streams.clear()
        self.catalog.close()
        os.close(self.fd)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    made = Writer(tmp_path)
    yield made
    made.close()


def test_a_writer_that_the_link_follows_is_followed(writer: Writer) -> None:
    writer.writes(GIB // 2, 1.0)
    assert writer.size - writer.end < 64 * MIB


def test_a_writer_that_outruns_the_link_is_left_alone_until_it_pauses(writer: Writer) -> None:
    writer.writes(2 * GIB, 0.2)  # the link's speed gets known
    began = writer.end
    writer.writes(8 * GIB, 0.3)
    assert writer.end - began <= 64 * MIB
    size = writer.size
    for _ in range(200):
        writer.now += LOOK_S
        writer.looks()
    assert (writer.size, writer.end) == (size, size // (8 * MIB) * (8 * MIB))


def test_it_is_sent_when_it_was_closed(writer: Writer) -> None:
    writer.writes(2 * GIB, 0.2)
    writer.writes(8 * GIB, 0.3)
    writer.open = False
    for _ in range(200):
        writer.now += LOOK_S
        writer.looks()
    assert writer.end == writer.size // (8 * MIB) * (8 * MIB)


def test_a_writer_that_never_pauses_is_followed_after_a_second(writer: Writer) -> None:
    writer.writes(2 * GIB, 0.2)
    began = writer.end
    writer.writes(8 * GIB, 3.0)
    assert writer.end - began > GIB
