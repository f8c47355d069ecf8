"""Tiers never hand out more than their budget, and never give away what the store lacks."""

import mmap
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmstorfs.catalog import ROOT_INO, SqliteCatalog
from lmstorfs.store import Kind, ObjectInfo
from lmstorfs.tiers import Placement, Tier, files

MIB = 1 << 20
BUDGET = 64 * MIB

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs needs root")


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of its own, as the RAM tier is."""
    path = tmp_path / "ram"
    path.mkdir()
    options = f"huge=within_size,size={2 * BUDGET},nr_inodes=0"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@pytest.fixture
def tier(directory: Path) -> Tier:
    return Tier("ram", directory, BUDGET)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[SqliteCatalog]:
    made = SqliteCatalog(tmp_path / "catalog.db")
    yield made
    made.close()


class Open(set[int]):
    """The inodes that somebody has open."""

    def __call__(self, ino: int) -> bool:
        return ino in self


@pytest.fixture
def opened() -> Open:
    return Open()


@pytest.fixture
def placement(tier: Tier, catalog: SqliteCatalog, opened: Open) -> Placement:
    return Placement([tier], catalog, opened)


def add(placement: Placement, catalog: SqliteCatalog, name: str, size: int, *, stored: bool) -> int:
    """Put a closed file of `size` bytes into the tier."""
    (tier,) = placement.tiers
    inode = catalog.create(
        ROOT_INO, name.encode(), mode=stat.S_IFREG | 0o644, uid=0, gid=0, writing=True, tier="ram"
    )
    fd = tier.open(inode.ino, create=True)
    assert tier.reserve(inode.ino, fd, size)
    os.write(fd, b"x" * size)
    tier.settle(inode.ino, fd)
    mtime_ns = os.fstat(fd).st_mtime_ns
    os.close(fd)
    version = catalog.contents.close_version(inode.ino, size, mtime_ns, writing=False)
    if stored:
        info = ObjectInfo(key=name, kind=Kind.FILE, size=size, etag="e", mtime_ns=1)
        catalog.contents.stored(inode.ino, version, name, info, attributes_changed=False)
    return inode.ino


# --- the books ---------------------------------------------------------------------------------


@needs_root
def test_a_reservation_takes_memory_and_budget_and_leaves_the_size(tier: Tier) -> None:
    fd = tier.open(7, create=True)
    try:
        assert tier.reserve(7, fd, 8 * MIB)
        found = os.fstat(fd)
        assert (found.st_size, found.st_blocks * 512) == (0, 8 * MIB)
        assert (tier.used_bytes, tier.held(7)) == (8 * MIB, 8 * MIB)
        assert tier.reserve(7, fd, 4 * MIB)  # has it already
        assert tier.used_bytes == 8 * MIB
        assert not tier.reserve(7, fd, BUDGET + 1)
        assert tier.used_bytes == 8 * MIB
    finally:
        os.close(fd)


@needs_root
def test_settling_gives_back_what_was_reserved_and_keeps_size_time_and_content(tier: Tier) -> None:
    fd = tier.open(7, create=True)
    try:
        assert tier.reserve(7, fd, 32 * MIB)
        os.write(fd, b"abc" * 1000)
        before = os.fstat(fd)
        assert tier.settle(7, fd) == 3000
        after = os.fstat(fd)
        assert (after.st_size, after.st_mtime_ns) == (3000, before.st_mtime_ns)
        assert tier.used_bytes == tier.held(7) == after.st_blocks * 512
        assert after.st_blocks * 512 <= 2 * MIB  # a huge page at most
        assert os.pread(fd, 4000, 0) == b"abc" * 1000
    finally:
        os.close(fd)


@needs_root
def test_cutting_a_reservation_that_ends_before_the_size_changes_nothing(tier: Tier) -> None:
    fd = tier.open(7, create=True)
    try:
        os.write(fd, b"x" * (3 * MIB))
        before = os.fstat(fd)
        files.cut_reservation(fd, MIB)
        assert os.fstat(fd) == before
        assert os.pread(fd, 4 * MIB, 0) == b"x" * (3 * MIB)
    finally:
        os.close(fd)


@needs_root
def test_a_full_filesystem_refuses_a_reservation_and_the_books_stay(directory: Path) -> None:
    tier = Tier("ram", directory, 100 * BUDGET)
    fd = tier.open(7, create=True)
    try:
        assert not tier.reserve(7, fd, 50 * BUDGET)
        assert (tier.used_bytes, tier.held(7)) == (0, 0)
    finally:
        os.close(fd)


@needs_root
def test_a_scan_takes_what_is_there_into_the_books(tier: Tier) -> None:
    for ino, size in ((3, 10_000), (4, 2 * MIB)):
        tier.path(ino).write_bytes(b"x" * size)
    (tier.directory / "probe").touch()
    again = Tier("ram", tier.directory, BUDGET)
    assert sorted(again.scan()) == [3, 4]
    assert again.used_bytes >= 10_000 + 2 * MIB
    again.drop(3)
    again.drop(4)
    again.drop(4)
    assert (again.used_bytes, again.statistics().files) == (0, 0)


# --- eviction ----------------------------------------------------------------------------------


@needs_root
def test_the_least_recently_used_stored_file_goes_first(
    placement: Placement, catalog: SqliteCatalog, tier: Tier
) -> None:
    inos = [add(placement, catalog, f"f{n}", 16 * MIB, stored=True) for n in range(3)]
    for ino in inos:
        placement.touched(ino)
    placement.touched(inos[0])
    assert placement.make_room(tier, 20 * MIB)
    assert [catalog.get(ino).tier for ino in inos] == ["ram", None, "ram"]
    assert not tier.path(inos[1]).exists()


@needs_root
def test_nothing_is_evicted_where_it_would_not_be_enough(
    placement: Placement, catalog: SqliteCatalog, tier: Tier
) -> None:
    stored = add(placement, catalog, "stored", 16 * MIB, stored=True)
    add(placement, catalog, "dirty", 16 * MIB, stored=False)
    assert not placement.make_room(tier, BUDGET)
    assert catalog.get(stored).tier == "ram"


@needs_root
@pytest.mark.parametrize("why", ["dirty", "open", "writing", "has a writer", "rewritten"])
def test_what_is_in_use_or_not_stored_is_never_evicted(
    placement: Placement, catalog: SqliteCatalog, tier: Tier, opened: Open, why: str
) -> None:
    ino = add(placement, catalog, "model", 40 * MIB, stored=why != "dirty")
    fd = -1
    if why == "open":
        opened.add(ino)
    elif why == "writing":
        catalog.contents.begin_writing(ino, "ram")
    elif why == "has a writer":
        fd = tier.open(ino)
    elif why == "rewritten":
        catalog.contents.close_version(ino, 40 * MIB, 1, writing=False)
    try:
        assert not placement.make_room(tier, 32 * MIB)
        assert tier.path(ino).stat().st_size == 40 * MIB
        assert catalog.get(ino).tier == "ram"
    finally:
        if fd >= 0:
            os.close(fd)


@needs_root
def test_a_mapping_that_outlived_its_descriptor_is_a_writer(tier: Tier) -> None:
    path = tier.path(9)
    path.write_bytes(b"x" * 4096)
    assert not files.has_writers(path)
    fd = os.open(path, os.O_RDWR)
    mapping = mmap.mmap(fd, 4096)
    os.close(fd)
    assert files.has_writers(path)
    mapping.close()
    assert not files.has_writers(path)
    reader = os.open(path, os.O_RDONLY)
    assert not files.has_writers(path)
    os.close(reader)
    assert not files.has_writers(tier.path(10))  # not there


# --- what to expect ----------------------------------------------------------------------------


def test_files_of_one_kind_repeat_their_sizes(tmp_path: Path, catalog: SqliteCatalog) -> None:
    placement = Placement([Tier("ram", tmp_path, BUDGET)], catalog, Open())
    assert placement.expect(b"step-1.pt") is None
    placement.learn(b"step-1.pt", 100 * MIB)
    expected = placement.expect(b"step-2000.pt")
    assert expected is not None
    assert 100 * MIB < expected < 110 * MIB
    assert placement.expect(b"step.pt") is None


@pytest.mark.parametrize("size", [0, 5, 4096, 3 * MIB])
def test_a_reservation_on_a_disk_is_given_back_too(tmp_path: Path, size: int) -> None:
    tier = Tier("ssd0", tmp_path, BUDGET)
    fd = tier.open(7, create=True)
    try:
        os.write(fd, b"x" * size)
        assert tier.reserve(7, fd, 16 * MIB)
        before = os.fstat(fd)
        assert tier.settle(7, fd) == size
        after = os.fstat(fd)
        assert (after.st_size, after.st_mtime_ns) == (size, before.st_mtime_ns)
        assert after.st_blocks * 512 < size + MIB
        assert tier.held(7) == after.st_blocks * 512
    finally:
        os.close(fd)
