"""At the edges of a small RAM tier: a file that outgrows it, and one that was dropped from it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounted.conftest import check_data_path
from tests.mounting import Mount, mounted, wait_for

MIB = 1 << 20


@pytest.fixture(params=["passthrough", "userspace"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Mount]:
    """Yield a mount whose RAM tier takes 64 MiB."""
    options: list[object] = ["--ram", "64M", "-o", "flush_delay=0.05"]
    if request.param == "userspace":
        options += ["-o", "data_path=userspace"]
    with mounted(tmp_path, *options) as mount:
        check_data_path(mount, request.param)
        yield mount


def used_bytes(mount: Mount) -> int:
    (tier,) = mount.status()["tiers"]
    room = os.statvfs(mount.state / "ram")
    held = (room.f_blocks - room.f_bfree) * room.f_frsize
    assert max(held, tier["used_bytes"]) <= tier["budget_bytes"] == 64 * MIB
    return int(tier["used_bytes"])


def write_piecewise(path: Path, pieces: int) -> None:
    with path.open("wb", buffering=0) as file:
        for _ in range(pieces):
            file.write(bytes(MIB))


def test_a_file_that_outgrows_the_tier_is_refused_and_the_mount_stays_well(small: Mount) -> None:
    with pytest.raises(OSError, match="No space left"):
        write_piecewise(small.path / "huge.pt", 100)
    (small.path / "huge.pt").unlink()
    content = os.urandom(20 * MIB)
    (small.path / "next.pt").write_bytes(content)  # what is kept of the other makes way
    small.sync()
    assert small.run("undelete", small.path, "--discard").returncode == 0
    wait_for(lambda: used_bytes(small) < 21 * MIB, "the room is given back")
    assert (small.store / "next.pt").read_bytes() == content


def test_a_dropped_file_can_be_appended_to(small: Mount) -> None:
    (small.path / "log").write_bytes(b"first")
    small.sync()
    for number in range(5):
        (small.path / f"step_{number}.pt").write_bytes(os.urandom(20 * MIB))
        used_bytes(small)
    with (small.path / "log").open("ab") as file:
        file.write(b", second")
    small.sync()
    assert (small.path / "log").read_bytes() == b"first, second"
    assert (small.store / "log").read_bytes() == b"first, second"
