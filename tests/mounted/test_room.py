"""Budgets hold, room is made by evicting what is stored, and writers wait instead of failing."""

import os
import threading
from pathlib import Path

import pytest

from lmstorfs.units import MIB
from tests.mounting import Mount, mounted

RAM = 96 * MIB


@pytest.fixture(params=["auto", "userspace"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> "Mount":
    """A mount whose RAM tier is far smaller than what the tests write."""
    (tmp_path / "objects").mkdir()
    options = ["--store", tmp_path / "objects", "--ram", str(RAM)]
    options += ["-o", f"flush_delay=0.05,data_path={request.param}"]
    with mounted(tmp_path, *options) as mount:
        yield mount


def used(mount: Mount) -> int:
    tier = mount.status()["tiers"][0]
    assert tier["budget_bytes"] == RAM
    return int(tier["used_bytes"])


def test_checkpoints_of_four_times_the_budget_are_stored_whole(
    small: Mount, tmp_path: Path
) -> None:
    contents = {}
    for step in range(12):
        folder = small.path / f"step_{step}"
        folder.mkdir()
        contents[step] = os.urandom(32 * MIB)
        (folder / "model.pt").write_bytes(contents[step])
        assert used(small) <= RAM
    small.sync()
    for step, content in contents.items():
        assert (tmp_path / "objects" / f"step_{step}" / "model.pt").read_bytes() == content
        assert (small.path / f"step_{step}" / "model.pt").read_bytes() == content
        assert used(small) <= RAM


def test_many_writers_at_once_wait_for_room(small: Mount, tmp_path: Path) -> None:
    contents = [os.urandom(24 * MIB) for _ in range(8)]
    failures: list[BaseException] = []

    def write(number: int) -> None:
        try:
            with (small.path / f"shard_{number}").open("wb") as file:
                for start in range(0, len(contents[number]), MIB):
                    file.write(contents[number][start : start + MIB])
        except OSError as error:
            failures.append(error)

    write(0)  # so that the kind's size is known
    threads = [threading.Thread(target=write, args=(number,)) for number in range(1, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    small.sync()
    for number, content in enumerate(contents):
        assert (tmp_path / "objects" / f"shard_{number}").read_bytes() == content


def test_a_file_larger_than_the_tier_in_the_store_is_read_right(
    small: Mount, tmp_path: Path
) -> None:
    content = os.urandom(RAM + 5 * MIB)
    (tmp_path / "objects" / "huge.bin").write_bytes(content)
    with (small.path / "huge.bin").open("rb") as file:
        assert file.read() == content
        file.seek(RAM)
        assert file.read(100) == content[RAM : RAM + 100]
    assert used(small) <= RAM


def test_open_files_are_not_evicted(small: Mount) -> None:
    first = os.urandom(8 * MIB)
    (small.path / "first").write_bytes(first)
    small.sync()
    with (small.path / "first").open("rb") as file:
        for number in range(8):
            (small.path / f"other_{number}").write_bytes(os.urandom(20 * MIB))
        assert file.read() == first
