"""Adopting: what catalog and tier say after a crash, case by case."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmstorfs.catalog import ROOT_INO, Inode, SqliteCatalog
from lmstorfs.checkpoint.recovery import Adopted, adopt
from lmstorfs.store import Kind, ObjectInfo
from lmstorfs.tiers import Placement, Tier
from lmstorfs.tiers.files import reserve


class Digests:
    """Stands in for the digester: remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def add(self, ino: int, version: int) -> None:
        self.asked.append((ino, version))


class World:
    """A catalog and a tier as a dead daemon left them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "ram").mkdir()
        self.catalog = SqliteCatalog(folder / "catalog.db")
        self.digests = Digests()

    def file(self, name: str, content: bytes | None, *, writing: bool = False) -> Inode:
        """Make a file; with `content` its tier file."""
        inode = self.catalog.create(
            ROOT_INO, name.encode(), mode=stat.S_IFREG | 0o644, uid=0, gid=0, writing=writing,
            tier="ram",
        )  # fmt: skip
        if content is not None:
            self.path(inode.ino).write_bytes(content)
        return inode

    def path(self, ino: int) -> Path:
        return self.folder / "ram" / str(ino)

    def found(self, ino: int) -> tuple[int, int]:
        status = self.path(ino).stat()
        return status.st_size, status.st_mtime_ns

    def close(self, inode: Inode, *, writing: bool = False) -> int:
        """Make what the tier holds a version."""
        return self.catalog.contents.close_version(
            inode.ino, *self.found(inode.ino), writing=writing
        )

    def stored(self, inode: Inode, version: int) -> None:
        name = self.catalog.path(inode.ino)
        assert name is not None
        info = ObjectInfo(key=name, kind=Kind.FILE, size=1, etag="e", mtime_ns=1)
        self.catalog.contents.stored(inode.ino, version, name, info, attributes_changed=False)

    def adopt(self) -> Adopted:
        """Come back as another daemon."""
        self.catalog.close()
        self.catalog = SqliteCatalog(self.folder / "catalog.db")
        self.digests = Digests()
        placement = Placement(
            [Tier("ram", self.folder / "ram", 1 << 30)], self.catalog, lambda ino: False
        )
        self.tier = placement.tiers[0]
        return adopt(self.catalog, placement, self.digests)  # type: ignore[arg-type]

    def flushable(self) -> list[int]:
        return [inode.ino for inode in self.catalog.contents.dirty(-1) if inode.is_file]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.catalog.close()


def test_a_closed_file_is_adopted_and_flushed(world: World) -> None:
    inode = world.file("model", b"x" * 10_000, writing=True)
    version = world.close(inode)
    adopted = world.adopt()
    assert (adopted.files, adopted.missing, adopted.torn) == (1, [], [])
    assert world.digests.asked == [(inode.ino, version)]
    assert world.flushable() == [inode.ino]
    assert world.tier.used_bytes >= 10_000


def test_a_tier_file_without_a_row_is_dropped(world: World) -> None:
    world.path(99).write_bytes(b"x" * 1000)
    adopted = world.adopt()
    assert (adopted.files, adopted.dropped) == (0, 1)
    assert not world.path(99).exists()
    assert world.tier.used_bytes == 0


def test_a_stored_file_without_its_tier_copy_is_read_from_the_store(world: World) -> None:
    inode = world.file("model", b"x", writing=True)
    world.stored(inode, world.close(inode))
    world.path(inode.ino).unlink()
    adopted = world.adopt()
    assert (adopted.files, adopted.missing) == (0, [])
    assert world.catalog.get(inode.ino).tier is None
    assert world.flushable() == []


def test_a_file_whose_only_copy_is_gone_is_named_and_not_flushed(world: World) -> None:
    inode = world.file("model", b"x", writing=True)
    world.close(inode)
    world.path(inode.ino).unlink()
    adopted = world.adopt()
    assert adopted.missing == [inode.ino]
    assert world.catalog.get(inode.ino).tier is None
    assert world.flushable() == []


def test_a_file_that_was_never_closed_is_torn_and_readable_and_not_flushed(world: World) -> None:
    inode = world.file("model", b"half", writing=True)
    adopted = world.adopt()
    assert adopted.torn == ["model"]
    assert world.catalog.get(inode.ino).torn
    assert world.catalog.get(inode.ino).tier == "ram"
    assert world.flushable() == []
    assert world.adopt().torn == ["model"]  # adopted again, it still is


def test_a_closed_or_fsynced_file_whose_release_never_came_is_whole(world: World) -> None:
    inode = world.file("model", b"synced", writing=True)
    version = world.close(inode, writing=True)
    adopted = world.adopt()
    assert adopted.torn == []
    row = world.catalog.get(inode.ino)
    assert (row.version, row.writing) == (version, 0)
    assert world.flushable() == [inode.ino]


def test_an_fsynced_file_that_was_written_to_since_is_torn(world: World) -> None:
    inode = world.file("model", b"synced", writing=True)
    world.stored(inode, world.close(inode, writing=True))
    with world.path(inode.ino).open("ab") as file:
        file.write(b" and more")
    assert world.adopt().torn == ["model"]
    assert world.flushable() == []


def test_a_stored_file_that_was_opened_and_not_written_is_whole(world: World) -> None:
    inode = world.file("model", b"whole", writing=True)
    world.stored(inode, world.close(inode))
    world.catalog.contents.begin_writing(inode.ino, "ram")
    assert world.adopt().torn == []
    row = world.catalog.get(inode.ino)
    assert (row.writing, row.dirty) == (0, False)


def test_a_reservation_left_behind_is_given_back(world: World) -> None:
    inode = world.file("model", b"whole", writing=True)
    fd = os.open(world.path(inode.ino), os.O_RDWR)
    assert reserve(fd, 0, 4 << 20)
    os.close(fd)
    world.close(inode, writing=True)
    world.adopt()
    assert world.path(inode.ino).stat().st_blocks * 512 < 1 << 20
    assert world.tier.held(inode.ino) < 1 << 20


def test_a_daemon_that_died_while_giving_room_back_did_not_touch_the_version(world: World) -> None:
    inode = world.file("model.pt", b"whole", writing=True)
    version = world.close(inode)
    size, mtime_ns = world.found(inode.ino)
    fd = os.open(world.path(inode.ino), os.O_RDWR)
    reserve(fd, size, 64 << 20)
    os.close(fd)
    os.utime(world.path(inode.ino), ns=(1, 1))  # as a hole that is punched moves it
    assert world.adopt().torn == []
    assert world.found(inode.ino) == (size, mtime_ns)
    assert world.path(inode.ino).stat().st_blocks * 512 < 4 << 20
    assert world.digests.asked == [(inode.ino, version)]
    assert world.flushable() == [inode.ino]


def test_unlinked_files_are_forgotten_with_their_content(world: World) -> None:
    inode = world.file("model", b"x" * 1000, writing=True)
    world.close(inode)
    world.catalog.unlink(ROOT_INO, b"model")
    adopted = world.adopt()
    assert adopted.dropped == 1
    assert not world.path(inode.ino).exists()
    assert world.catalog.find(inode.ino) is None


def test_a_torn_file_holds_up_nothing_else_in_its_directory(world: World) -> None:
    torn = world.file("model", b"half", writing=True)
    world.close(torn, writing=True)
    world.path(torn.ino).write_bytes(b"half and more")
    assert world.catalog.contents.awaits_children(ROOT_INO)
    assert world.adopt().torn == ["model"]
    assert not world.catalog.contents.awaits_children(ROOT_INO)
    whole = world.file("other", b"whole", writing=True)
    world.close(whole)
    assert world.catalog.contents.awaits_children(ROOT_INO)


# --- uploads that were under way -----------------------------------------------------------------


def entries(world: World) -> list[tuple[str, str, str | None]]:
    return [(entry.op, entry.key, entry.new_key) for entry in world.catalog.journal.entries()]


def test_an_upload_under_way_is_aborted_and_its_object_counts_as_there(world: World) -> None:
    inode = world.file("model", b"x", writing=True)
    world.close(inode)
    world.catalog.contents.upload_began(inode.ino, "model", "upload-7")
    world.adopt()
    assert entries(world) == [("abort", "model", "upload-7")]
    assert world.catalog.contents.uploads() == []
    world.catalog.unlink(ROOT_INO, b"model")
    assert entries(world)[-1] == ("delete", "model", None)


def test_an_upload_that_told_no_id_is_looked_for(world: World) -> None:
    inode = world.file("model", b"x", writing=True)
    world.close(inode)
    world.catalog.contents.upload_began(inode.ino, "model")
    world.adopt()
    assert entries(world) == [("abort", "model", "")]


def test_an_upload_of_a_file_renamed_since_may_have_left_the_old_name(world: World) -> None:
    inode = world.file("model.tmp", b"x", writing=True)
    world.close(inode)
    world.catalog.contents.upload_began(inode.ino, "model.tmp", "upload-7")
    world.catalog.rename(ROOT_INO, b"model.tmp", ROOT_INO, b"model")
    world.adopt()
    assert sorted(entries(world)) == [
        ("abort", "model.tmp", "upload-7"),
        ("delete", "model.tmp", None),
    ]
    assert world.flushable() == [inode.ino]
