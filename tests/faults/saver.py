"""A trainer that saves checkpoints and tells of each file what it is about to be and that it is.

    python saver.py FOLDER LOG SEED

Each line on standard input asks for one save. Each line of LOG is `begin|closed|synced DIGEST
PATH`, written before a file's first byte and after its close or fsync returned.
"""

import io
import os
import random
import sys
from pathlib import Path

import torch

from lmstorfs.digest import digest_bytes

WRITE_BYTES = 256 << 10


class Saver:
    def __init__(self, folder: Path, log: Path, seed: int) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell(self, word: str, digest: str, path: str) -> None:
        os.write(self.log, f"{word} {digest} {path}\n".encode())

    def plain(self, path: str, data: bytes, *, sync: bool = False) -> None:
        digest = digest_bytes(data)
        self.tell("begin", digest, path)
        fd = os.open(self.folder / path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view[:WRITE_BYTES]) :]
            if sync:
                os.fsync(fd)
                self.tell("synced", digest, path)
        finally:
            os.close(fd)
        self.tell("closed", digest, path)

    def torch(self, path: str, data: bytes) -> None:
        state = {"w": torch.frombuffer(bytearray(data), dtype=torch.uint8)}
        whole = io.BytesIO()
        torch.save(state, whole)
        digest = digest_bytes(whole.getvalue())
        self.tell("begin", digest, path)
        with (self.folder / path).open("wb") as file:
            torch.save(state, file)
        self.tell("closed", digest, path)

    def renamed(self, path: str, data: bytes) -> None:
        """Save as careful savers do: a temporary name, then a rename over the last one."""
        digest = digest_bytes(data)
        self.tell("begin", digest, path)
        self.plain(path + ".tmp", data)
        (self.folder / (path + ".tmp")).rename(self.folder / path)
        self.tell("closed", digest, path)

    def data(self, most: int) -> bytes:
        return self.random.randbytes(self.random.randint(1, most))

    def save(self, step: int) -> None:
        folder = f"step-{step}"
        (self.folder / folder).mkdir(exist_ok=True)
        self.plain(f"{folder}/shard-0.bin", self.data(8 << 20))
        self.torch(f"{folder}/model.pt", self.data(4 << 20))
        self.plain(f"{folder}/optimizer.bin", self.data(2 << 20), sync=True)
        self.plain(f"{folder}/shard-1.bin", self.data(8 << 20))
        for number in range(4):
            self.plain(f"{folder}/rng-{number}", self.data(4000))
        self.renamed("latest", f"{folder} {self.random.random()}\n".encode())
        self.plain("rewritten.bin", self.data(1 << 20))


def main() -> None:
    saver = Saver(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            saver.save(int(line))
        except OSError as error:
            print(f"failed {error.strerror}", flush=True)
        else:
            print("saved", flush=True)


if __name__ == "__main__":
    main()
