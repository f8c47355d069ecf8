"""A writer's memory limit does not count what it saves: the room is reserved by the daemon."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmstorfs.digest import digest_file
from tests.mounting import mounted

V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup")
LIMIT_BYTES = 300 << 20
PEAK_MAX_BYTES = 100 << 20
MIB = 1 << 20

pytestmark = [
    pytest.mark.mounted,
    pytest.mark.skipif(
        os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs root and /dev/fuse"
    ),
]

# Joins the group before it holds anything, says the digest of what it wrote. Writes the same
# 16 MiB of noise again and again, shifted by one byte each time, so that no two are alike.
WRITER = """
import os, sys, xxhash
group, path, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
with open(group + "/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
noise = os.urandom(16 << 20)
digest = xxhash.xxh3_128()
fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
written = 0
while written < size:
    shift = written >> 24 & 0xffff
    view = memoryview(noise)[shift : shift + min(8 << 20, size - written)]
    count = os.write(fd, view)
    digest.update(view[:count])
    written += count
os.close(fd)
print(digest.hexdigest())
"""


class MemoryGroup:
    """A memory cgroup with a limit, of whichever version this host has."""

    def __init__(self) -> None:
        self.v1 = (V1 / "memory.limit_in_bytes").exists() or (V1 / "memory.usage_in_bytes").exists()
        self.path = (V1 if self.v1 else V2) / f"lmstorfs-test-{os.getpid()}"
        try:
            self.path.mkdir()
            name = "memory.limit_in_bytes" if self.v1 else "memory.max"
            (self.path / name).write_text(str(LIMIT_BYTES))
        except OSError as error:
            if self.path.exists():
                self.path.rmdir()
            pytest.skip(f"no memory cgroup to be had: {error}")

    def peak_bytes(self) -> int:
        name = "memory.max_usage_in_bytes" if self.v1 else "memory.peak"
        return int((self.path / name).read_text())


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    made = MemoryGroup()
    yield made
    made.path.rmdir()


def write(group: MemoryGroup, path: Path, size: int) -> "subprocess.Popen[str]":
    words = [sys.executable, "-c", WRITER, str(group.path), str(path), str(size)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("files", "size"), [(1, 2048 * MIB), (4, 512 * MIB)], ids=["one-of-2G", "four-of-512M"]
)
def test_a_writer_in_a_small_memory_cgroup_saves_more_than_its_limit(
    tmp_path: Path, group: MemoryGroup, files: int, size: int
) -> None:
    with mounted(tmp_path, "--ram", "4G", "-o", "flush_delay=600") as mount:
        if mount.status()["data_path"] != "passthrough":
            pytest.skip("no passthrough on this kernel")
        paths = [mount.path / f"model-{number}.bin" for number in range(files)]
        writers = [write(group, path, size) for path in paths]
        said = [writer.communicate(timeout=200)[0].strip() for writer in writers]
        peak = group.peak_bytes()
        codes = [writer.returncode for writer in writers]
        assert codes == [0] * files, f"killed? peak {peak / MIB:.0f} MiB"
        assert peak < PEAK_MAX_BYTES, f"peak {peak / MIB:.0f} MiB of {LIMIT_BYTES / MIB:.0f}"
        assert [digest_file(path, size) for path in paths] == said
        mount.kill()  # its 2 GiB are not worth bringing to the store
