"""The deletion guard's decisions: what is kept, and when it goes."""

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmstorfs.catalog import ROOT_INO, Inode, SqliteCatalog
from lmstorfs.catalog.guarded import DELETED
from lmstorfs.checkpoint.guard import Guard
from lmstorfs.checkpoint.survey import Sighting, judge
from lmstorfs.checkpoint.surveyor import Surveyor
from lmstorfs.store import Kind, ObjectInfo
from lmstorfs.tiers import Placement, Tier

MIB = 1 << 20


class Flushes:
    """Stands in for the flusher."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def is_overtaken(self, inode: Inode) -> bool:
        return False

    def announce(self) -> None:
        pass

    def cancel(self, ino: int) -> None:
        pass

    def urgent(self, ino: int) -> None:
        self.asked.append(ino)


class World:
    """A catalog, a RAM tier and a guard, and what a mount does to them."""

    def __init__(self, folder: Path, *, enabled: bool = True) -> None:
        (folder / "ram").mkdir(exist_ok=True)
        self.folder = folder
        self.enabled = enabled
        self.mirrored: set[tuple[int, int]] = set()
        self.opened: set[int] = set()
        self.begin()

    def begin(self) -> None:
        """Be a new daemon."""
        self.catalog = SqliteCatalog(self.folder / "catalog.db")
        self.tier = Tier("ram", self.folder / "ram", 64 * MIB)
        list(self.tier.scan())
        self.placement = Placement([self.tier], self.catalog, self.opened.__contains__)
        self.flushes = Flushes()
        self.surveyor = Surveyor(
            self.catalog,
            self.flushes,  # type: ignore[arg-type]
            lambda ino, version: (ino, version) in self.mirrored,
        )
        self.guard = Guard(
            self.catalog,
            self.placement,
            self.flushes,  # type: ignore[arg-type]
            self.surveyor,
            self.opened.__contains__,
            lambda ino, version: None,
            enabled=self.enabled,
        )

    def again(self) -> None:
        self.catalog.close()
        self.begin()

    # --- what a mount does -------------------------------------------------------------------

    def folder_of(self, path: str) -> int:
        ino = ROOT_INO
        for part in path.split("/")[:-1]:
            found = self.catalog.lookup(ino, part.encode())
            if found is None:
                found = self.catalog.create(
                    ino, part.encode(), mode=stat.S_IFDIR | 0o755, uid=0, gid=0
                )
            ino = found.ino
        return ino

    def write(self, path: str, size: int = 1000, *, stored: bool = False) -> int:
        """Write a file as a trainer does, anew or over the one that is there."""
        found = self.catalog.resolve(path)
        if found is None:
            name = path.rpartition("/")[2].encode()
            found = self.catalog.create(
                self.folder_of(path), name, mode=stat.S_IFREG | 0o644, uid=0, gid=0,
                writing=True, tier="ram",
            )  # fmt: skip
        else:
            self.guard.losing_content(found)
            self.catalog.contents.begin_writing(found.ino, "ram")
        self.tier.path(found.ino).write_bytes(os.urandom(size))
        self.tier.hold(found.ino, size)
        shown = self.tier.path(found.ino).stat()
        self.catalog.contents.close_version(
            found.ino, shown.st_size, shown.st_mtime_ns, writing=False
        )
        time.sleep(0.001)  # versions are closed at different times
        if stored:
            self.store(path)
        return found.ino

    def save(self, checkpoint: str, *, stored: bool = False, size: int = 1000) -> list[int]:
        return [
            self.write(f"{checkpoint}/{name}", size, stored=stored)
            for name in ("config.json", "model.pt", "optimizer.pt")
        ]

    def store(self, path: str) -> None:
        inode = self.catalog.resolve(path)
        assert inode is not None
        info = ObjectInfo(key=path, kind=Kind.FILE, size=inode.size, etag="e", mtime_ns=1)
        self.catalog.contents.stored(inode.ino, inode.version, path, info, attributes_changed=False)
        self.catalog.contents.set_digest(inode.ino, inode.version, "d")

    def unlink(self, path: str) -> None:
        inode = self.catalog.resolve(path)
        assert inode is not None
        parent, name = self.folder_of(path), path.rpartition("/")[2].encode()
        with self.catalog.db.transaction():
            self.guard.losing_name(inode)
            self.catalog.unlink(parent, name)
        if not self.guard.keeps(inode.ino):
            self.placement.drop(inode.ino, inode.tier)
            self.catalog.purge(inode.ino)

    def delete(self, checkpoint: str) -> None:
        found = self.catalog.resolve(checkpoint)
        assert found is not None
        if found.is_file:
            self.unlink(checkpoint)
            return
        for entry in self.catalog.children(found.ino):
            self.unlink(f"{checkpoint}/{entry.name.decode()}")
        self.catalog.rmdir(self.folder_of(checkpoint), checkpoint.rpartition("/")[2].encode())
        self.catalog.purge(found.ino)

    # --- what is there -----------------------------------------------------------------------

    def kept(self) -> dict[str, int]:
        """Return checkpoint → how many files of it are kept."""
        found: dict[str, int] = {}
        for row in self.catalog.guarded.rows():
            if row.deleted_at:
                found[row.checkpoint] = found.get(row.checkpoint, 0) + 1
        return found

    def in_tier(self) -> int:
        return len(list((self.folder / "ram").iterdir()))

    def journal(self) -> list[tuple[str, str, str | None]]:
        return [(entry.op, entry.key, entry.new_key) for entry in self.catalog.journal.entries()]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.catalog.close()


# --- what is kept --------------------------------------------------------------------------------


def test_the_only_checkpoint_is_kept_until_a_newer_one_is_stored(world: World) -> None:
    world.save("step_1")
    world.delete("step_1")
    assert world.kept() == {"step_1": 3}
    assert world.in_tier() == 3
    world.save("step_2")
    world.guard.look()
    assert world.kept() == {"step_1": 3}  # that one has one copy, too
    for name in ("config.json", "model.pt", "optimizer.pt"):
        world.store(f"step_2/{name}")
    world.guard.look()
    assert world.kept() == {}
    assert world.in_tier() == 3
    assert [inode.ino for inode in world.catalog.db.inodes("WHERE nlink = 0")] == []


def test_a_copy_at_the_mirror_is_a_second_copy(world: World) -> None:
    world.save("step_1")
    world.delete("step_1")
    for ino in world.save("step_2"):
        world.mirrored.add((ino, world.catalog.get(ino).version))
    world.guard.look()
    assert world.kept() == {}


def test_an_older_one_goes_where_a_newer_one_is_stored(world: World) -> None:
    world.save("step_1")
    world.save("step_2", stored=True)
    world.delete("step_1")
    assert world.kept() == {}
    assert world.in_tier() == 3


def test_nothing_is_kept_where_the_guard_is_off(tmp_path: Path) -> None:
    world = World(tmp_path, enabled=False)
    world.save("step_1")
    world.delete("step_1")
    assert (world.kept(), world.in_tier()) == ({}, 0)


@pytest.mark.parametrize("name", ["run/train.log", "latest", "step_1/notes.txt", "x.tmp"])
def test_what_has_no_weights_is_not_kept(world: World, name: str) -> None:
    world.write(name)
    world.unlink(name)
    assert world.kept() == {}


def test_a_temporary_name_is_no_checkpoint(world: World) -> None:
    world.save("step_1.tmp")
    world.delete("step_1.tmp")
    assert world.kept() == {}


def test_what_is_decided_at_the_first_file_holds_for_the_rest_and_the_next_daemon(
    world: World,
) -> None:
    world.save("step_1")
    world.unlink("step_1/config.json")
    world.again()
    world.save("step_2", stored=True)
    world.unlink("step_1/model.pt")
    assert world.kept() == {"step_1": 2}
    world.guard.look()
    assert world.kept() == {}
    world.unlink("step_1/optimizer.pt")
    assert world.kept() == {}  # step_2 is safe


def test_a_set_that_is_stored_stays_beside_a_newer_one_that_is_not(world: World) -> None:
    world.save("step_1", stored=True)
    world.delete("step_1")
    for step in (2, 3):
        world.save(f"step_{step}")
        world.delete(f"step_{step}")
        world.guard.look()
    assert world.kept() == {"step_1": 3, "step_3": 3}


# --- broken saves --------------------------------------------------------------------------------


def test_a_half_checkpoint_does_not_count_though_it_is_stored(world: World) -> None:
    world.save("step_1", stored=True)
    world.delete("step_1")
    world.write("step_2/config.json", stored=True)
    world.write("step_2/model.pt", stored=True)  # and then the trainer died
    world.guard.look()
    assert world.kept() == {"step_1": 3}
    world.delete("step_2")
    world.guard.look()
    assert world.kept()["step_1"] == 3
    world.save("step_3", stored=True)
    world.guard.look()
    assert world.kept() == {}


def test_smaller_weights_do_not_count_until_another_one_is_like_them(world: World) -> None:
    world.save("step_1", stored=True, size=3 * MIB)
    world.delete("step_1")
    world.save("step_2", stored=True, size=2 * MIB)
    world.guard.look()
    assert "step_1" in world.kept()
    world.save("step_3", stored=True, size=2 * MIB)
    world.guard.look()
    assert world.kept() == {}


def test_best_weights_alone_do_not_stand_for_a_checkpoint(world: World) -> None:
    world.save("step_1", stored=True)
    world.write("best.pt", stored=True)
    world.delete("step_1")
    assert world.kept() == {"step_1": 3}


# --- written over --------------------------------------------------------------------------------


def test_a_file_that_is_truncated_gives_its_content_to_another_inode(world: World) -> None:
    ino = world.write("last.pt", 5000)
    before = world.tier.path(ino).read_bytes()
    world.write("last.pt", 10)
    (row,) = world.catalog.guarded.rows()
    assert row.ino != ino
    assert world.tier.path(row.ino).read_bytes() == before
    kept = world.catalog.get(row.ino)
    assert (kept.nlink, kept.size, kept.dirty) == (0, 5000, True)
    world.write("last.pt", 5000, stored=True)
    world.guard.look()
    assert world.kept() == {}
    assert world.in_tier() == 1


def test_a_directory_that_is_written_over_is_kept_as_it_was(world: World) -> None:
    for name in ("a.pt", "b.pt"):
        world.write(f"last/{name}", 2 * MIB)
    world.write("last/a.pt", 2 * MIB)
    world.store("last/a.pt")
    world.store("last/b.pt")
    world.guard.look()
    assert world.kept() == {"last": 1}  # the one there is of two saves
    (remains,) = [each for each in world.surveyor.survey() if each.number is None]
    assert remains.lacks == ["a.pt"]
    world.write("last/b.pt", 2 * MIB, stored=True)
    world.guard.look()
    assert world.kept() == {}


def test_weights_that_no_save_writes_again_do_not_hold_it_for_ever(world: World) -> None:
    world.write("last/base.pt", stored=True)
    for _ in range(4):
        world.write("last/adapter.pt", stored=True)
        world.guard.look()
    assert len(world.kept()) <= 1
    (there,) = [each for each in world.surveyor.survey() if each.number is None]
    assert there.lacks == []


def test_a_content_that_somebody_has_mapped_is_not_moved(world: World) -> None:
    ino = world.write("last.pt")
    with world.tier.path(ino).open("r+b"):
        assert not world.guard.losing_content(world.catalog.get(ino))
    assert world.kept() == {}


# --- objects -------------------------------------------------------------------------------------


def test_the_store_keeps_its_object_under_its_name_and_then_deletes_it(world: World) -> None:
    world.write("step_1/model.pt", stored=True)
    world.delete("step_1")
    assert world.journal() == [("rmdir", "step_1", None)]  # it waits for what `holds` tells
    assert world.catalog.guarded.holds("step_1/model.pt")
    assert world.catalog.guarded.holds("step_1")
    assert not world.catalog.guarded.holds("step_10")
    world.guard.let_go(1)
    assert ("delete", "step_1/model.pt", None) in world.journal()
    assert ("rmdir", "step_1", None) in world.journal()


def test_an_object_makes_way_for_what_is_to_lie_there(world: World) -> None:
    for name in ("model.pt", "sub/optimizer.pt"):
        world.write(f"step_1/{name}", stored=True)
    world.unlink("step_1/model.pt")
    world.write("step_1/model.pt")
    ((op, key, new_key),) = world.journal()
    assert (op, key) == ("rename", "step_1/model.pt")
    assert new_key is not None
    assert new_key.startswith(f"{DELETED}/")


def test_a_single_file_leaves_its_object_to_be_replaced(world: World) -> None:
    ino = world.write("last.pt", stored=True)
    world.write("last.pt")
    assert world.journal() == []
    there = world.catalog.get(ino)
    assert (there.stored_key, there.stored_version) == ("last.pt", 0)
    (row,) = world.catalog.guarded.rows()
    assert world.catalog.get(row.ino).stored_key is None


def test_a_directory_that_is_moved_takes_kept_objects_along(world: World) -> None:
    world.save("step_1", stored=True)
    world.unlink("step_1/model.pt")
    world.catalog.rename(ROOT_INO, b"step_1", ROOT_INO, b"first")
    (row,) = [row for row in world.catalog.guarded.rows() if row.deleted_at]
    assert world.catalog.get(row.ino).stored_key == "first/model.pt"


# --- room ----------------------------------------------------------------------------------------


def test_what_is_kept_and_stored_is_evicted_first(world: World) -> None:
    inodes = world.save("step_1", stored=True, size=10 * MIB)
    other = world.write("other.bin", 10 * MIB, stored=True)
    world.delete("step_1")
    assert world.placement.make_room(world.tier, 30 * MIB)
    assert sorted(str(world.catalog.get(ino).tier) for ino in inodes) == ["None", "ram", "ram"]
    assert world.catalog.get(other).tier == "ram"
    assert world.kept() == {"step_1": 3}


def test_what_only_the_tier_has_goes_to_the_store_where_nothing_newer_is_whole(
    world: World,
) -> None:
    inodes = world.save("step_1", size=10 * MIB)
    world.delete("step_1")
    assert not world.placement.make_room(world.tier, 50 * MIB)
    assert sorted(world.flushes.asked) == inodes
    assert world.kept() == {"step_1": 3}
    key = world.catalog.key(inodes[0])
    assert key is not None
    assert key.startswith(f"{DELETED}/")


def test_it_makes_way_where_something_newer_is_whole(world: World) -> None:
    world.save("step_1", size=10 * MIB)
    world.delete("step_1")
    world.save("step_2", size=10 * MIB)
    assert not world.placement.make_room(world.tier, 20 * MIB, urgent=False)
    assert world.kept() == {"step_1": 3}
    assert world.placement.make_room(world.tier, 20 * MIB)
    assert world.kept() == {}
    assert world.in_tier() == 3


# --- what is whole -------------------------------------------------------------------------------


def seen(path: str, closed_at: float, **sizes: int) -> Sighting:
    shape = {name: [size * MIB] for name, size in sizes.items()}
    return Sighting(path=path, closed_at=closed_at, weights=True, shape=shape)


def test_a_checkpoint_is_compared_with_the_last_whole_one_of_its_series() -> None:
    first = seen("run/step_1", 1, a=10, b=10)
    broken = seen("run/step_2", 2, a=10)
    other = seen("other/step_3", 3, a=5)
    broken_too = seen("run/step_4", 4, a=10, b=3)
    last = seen("run/step_5", 5, a=10, b=11)
    judge([last, broken_too, other, broken, first])
    assert [each.lacks for each in (first, broken, other, broken_too, last)] == [
        [], ["b"], [], [], [],
    ]  # fmt: skip
