"""Many programs look into a directory that only the store knows, at once."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.mounting import mounted

pytestmark = [
    pytest.mark.mounted,
    pytest.mark.skipif(
        os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs root and /dev/fuse"
    ),
]

PROGRAMS = 16
ROUNDS = 20


def test_all_of_them_are_answered(tmp_path: Path) -> None:
    objects = tmp_path / "objects"
    for number in range(ROUNDS):
        (objects / f"dir-{number}").mkdir(parents=True)
        (objects / f"dir-{number}" / "file").write_bytes(b"%d" % number)
    with (
        mounted(tmp_path, "--store", objects, "-o", "attr_timeout=0") as mount,
        ThreadPoolExecutor(PROGRAMS) as programs,
    ):
        for number in range(ROUNDS):
            together = threading.Barrier(PROGRAMS)
            path = mount.path / f"dir-{number}" / "file"

            def look(path: Path = path, together: threading.Barrier = together) -> bytes:
                together.wait()
                path.stat()
                return path.read_bytes()

            found = [programs.submit(look) for _ in range(PROGRAMS)]
            assert [each.result() for each in found] == [b"%d" % number] * PROGRAMS
