"""A program that never stops: writes, fsyncs, renames, reads back, and compares all it sees.

    python busy_writer.py FOLDER SEED

Runs until its standard input ends, then prints what FOLDER is to hold: a line `DIGEST PATH` for
each file. Any call that fails, any wrong byte or `stat`, ends it with a traceback.
"""

import os
import random
import select
import sys
from pathlib import Path

from lmstorfs.digest import digest_bytes

WRITE_BYTES = 128 << 10
FILE_MAX_BYTES = 3 << 20


class BusyWriter:
    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.files: dict[str, bytes] = {}
        self.round = 0
        folder.mkdir()

    def data(self) -> bytes:
        return self.random.randbytes(self.random.randint(1, FILE_MAX_BYTES))

    def go_round(self) -> None:
        """Do one of everything."""
        self.round += 1
        name = f"file-{self.random.randrange(6)}"
        self.save(name, self.data(), sync=self.random.random() < 0.3)
        self.save("next.tmp", self.data(), sync=False)
        self.rename("next.tmp", f"renamed-{self.random.randrange(3)}")
        self.append("log", b"round %d\n" % self.round)
        self.directory(f"dir-{self.round}")
        os.setxattr(self.folder / name, "user.round", b"%d" % self.round)
        assert os.getxattr(self.folder / name, "user.round") == b"%d" % self.round
        os.removexattr(self.folder / name, "user.round")
        self.read_back(self.random.choice(sorted(self.files)))
        if self.round % 5 == 0:
            self.remove(self.random.choice(sorted(self.files)))
        assert sorted(os.listdir(self.folder)) == sorted(self.files)  # noqa: PTH208

    def save(self, name: str, content: bytes, *, sync: bool) -> None:
        fd = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o640)
        try:
            for at in range(0, len(content), WRITE_BYTES):
                piece = content[at : at + WRITE_BYTES]
                assert os.write(fd, piece) == len(piece)
            assert os.fstat(fd).st_size == len(content)
            if sync:
                os.fsync(fd)
            assert os.pread(fd, len(content), 0) == content
        finally:
            os.close(fd)
        self.files[name] = content
        self.look(name)

    def look(self, name: str) -> None:
        found = (self.folder / name).stat()
        assert (found.st_size, found.st_nlink) == (len(self.files[name]), 1)
        assert found.st_mode & 0o777 in (0o640, 0o644)

    def rename(self, old: str, new: str) -> None:
        (self.folder / old).rename(self.folder / new)
        self.files[new] = self.files.pop(old)
        assert not (self.folder / old).exists()
        self.look(new)

    def append(self, name: str, line: bytes) -> None:
        with (self.folder / name).open("ab") as file:
            file.write(line)
        self.files[name] = self.files.get(name, b"") + line

    def directory(self, name: str) -> None:
        path = self.folder / name
        path.mkdir()
        (path / "link").symlink_to("../nowhere")
        assert (path / "link").readlink() == Path("../nowhere")
        (path / "link").unlink()
        path.rmdir()

    def read_back(self, name: str) -> None:
        assert (self.folder / name).read_bytes() == self.files[name]

    def remove(self, name: str) -> None:
        with (self.folder / name).open("rb") as file:
            (self.folder / name).unlink()
            assert file.read() == self.files.pop(name)  # who has it open keeps it


def main() -> None:
    writer = BusyWriter(Path(sys.argv[1]), int(sys.argv[2]))
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        writer.go_round()
    for name, content in writer.files.items():
        print(digest_bytes(content), name)


if __name__ == "__main__":
    main()
