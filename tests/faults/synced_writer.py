"""A program that saves files, each with fsync, until its filesystem dies, and tells of each.

    python synced_writer.py FOLDER SEED

Each line on standard output is `begin DIGEST NAME`, before NAME gets this content, or `synced
DIGEST NAME`, once nothing may take it away any more: an fsync returned, and where NAME came by a
rename, the directory's fsync, too. `gone - NAME` comes before an unlink.
"""

import contextlib
import os
import random
import sys
from pathlib import Path

from lmstorfs.digest import digest_bytes

WRITE_BYTES = 512 << 10
FILE_MAX_BYTES = 10 << 20
LINE_MAX_BYTES = 200_000
LOG_MAX_BYTES = 4 << 20
FILES_KEPT = 6


class SyncedWriter:
    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.kept: list[str] = []
        self.logged = b""
        self.round = 0
        folder.mkdir(exist_ok=True)

    def tell(self, word: str, digest: str, name: str) -> None:
        os.write(1, f"{word} {digest} {name}\n".encode())

    def go_round(self) -> None:
        self.round += 1
        self.fresh(f"file-{self.random.getrandbits(32)}")
        self.renamed(f"slot-{self.random.randrange(3)}")
        self.append(f"log-{self.random.randrange(2)}")

    def data(self) -> bytes:
        return self.random.randbytes(self.random.randint(1, FILE_MAX_BYTES))

    def write(self, name: str, content: bytes, flags: int) -> None:
        fd = os.open(self.folder / name, flags | os.O_WRONLY, 0o644)
        try:
            for start in range(0, len(content), WRITE_BYTES):
                os.write(fd, content[start : start + WRITE_BYTES])
            os.fsync(fd)
        finally:
            os.close(fd)

    def fresh(self, name: str) -> None:
        content = self.data()
        digest = digest_bytes(content)
        self.tell("begin", digest, name)
        self.write(name, content, os.O_CREAT | os.O_EXCL)
        self.tell("synced", digest, name)
        self.kept.append(name)
        while len(self.kept) > FILES_KEPT:
            self.tell("gone", "-", self.kept[0])
            (self.folder / self.kept.pop(0)).unlink()

    def renamed(self, name: str) -> None:
        """Save as careful savers do."""
        content = self.data()
        digest = digest_bytes(content)
        self.tell("begin", digest, name)
        self.write("next.tmp", content, os.O_CREAT | os.O_TRUNC)
        (self.folder / "next.tmp").rename(self.folder / name)
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        self.tell("synced", digest, name)

    def append(self, name: str) -> None:
        path = self.folder / name
        before = path.read_bytes() if path.exists() else b""
        if len(before) > LOG_MAX_BYTES:
            return
        line = self.random.randbytes(self.random.randint(1, LINE_MAX_BYTES))
        digest = digest_bytes(before + line)
        self.tell("begin", digest, name)
        self.write(name, line, os.O_CREAT | os.O_APPEND)
        self.tell("synced", digest, name)


def main() -> None:
    writer = SyncedWriter(Path(sys.argv[1]), int(sys.argv[2]))
    with contextlib.suppress(OSError):  # the node is dead
        while True:
            writer.go_round()


if __name__ == "__main__":
    main()
