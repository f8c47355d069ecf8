"""The journal: what the store must still be told, in order, whatever happens in between."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lmstorfs.catalog.database import Database
from lmstorfs.catalog.journal import Journal


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    made = Database(tmp_path / "catalog.db")
    yield made
    made.close()


@pytest.fixture
def journal(db: Database) -> Journal:
    return Journal(db)


def words(journal: Journal) -> list[tuple[str, str, str | None]]:
    return [(entry.op, entry.key, entry.new_key) for entry in journal.entries()]


def test_entries_survive_the_daemon_in_order(db: Database, journal: Journal) -> None:
    journal.delete("a")
    journal.rename("b", "c", is_dir=False)
    journal.remove_directory("d")
    journal.abort("e", "upload")
    journal.delete("first", ahead=True)
    wanted = [
        ("delete", "first", None),
        ("delete", "a", None),
        ("rename", "b", "c"),
        ("rmdir", "d", None),
        ("abort", "e", "upload"),
    ]
    assert words(journal) == wanted
    assert words(Journal(db)) == wanted


def test_what_is_done_is_gone_and_blocks_nothing(db: Database, journal: Journal) -> None:
    journal.delete("a/b")
    journal.delete("a/b")
    first, second = journal.entries()
    journal.done([first.seq])
    assert journal.blocks("a/b")
    journal.done([second.seq])
    assert not journal.blocks("a/b")
    assert len(journal) == len(Journal(db)) == 0


@pytest.mark.parametrize(
    ("key", "blocked"),
    [
        ("a", True),  # above
        ("a/b", True),
        ("a/b/c", True),  # below
        ("a/bc", False),
        ("x/y", True),
        ("x", True),
        ("x/z", False),
        ("upload", False),  # an abort's id is no key
        ("e", True),
    ],
)
def test_an_upload_waits_for_what_touches_its_name(
    journal: Journal, key: str, blocked: bool
) -> None:
    journal.rename("a/b", "x/y", is_dir=True)
    journal.abort("e", "upload")
    assert journal.blocks(key) == blocked


def test_an_object_is_followed_through_renames(journal: Journal) -> None:
    journal.rename("a", "b", is_dir=False)
    journal.rename("b", "d/c", is_dir=False)
    journal.rename("d", "e", is_dir=True)
    assert journal.future_key("a") == "e/c"
    assert journal.future_key("d/x") == "e/x"
    assert journal.future_key("other") == "other"
    journal.delete("e/c")
    assert journal.future_key("a") is None


def test_an_object_that_a_rename_replaces_is_gone(journal: Journal) -> None:
    journal.rename("a", "b", is_dir=False)
    assert journal.future_key("b") is None
    assert not journal.in_the_way("b")


def test_an_object_where_a_directory_is_moved_to_is_in_the_way(journal: Journal) -> None:
    journal.rename("d", "e", is_dir=True)
    assert journal.in_the_way("e/x")
    assert not journal.in_the_way("d/x")


def test_whoever_works_it_off_hears_of_new_entries(journal: Journal) -> None:
    heard: list[int] = []
    journal.on_added = lambda: heard.append(len(journal))
    journal.delete("a")
    journal.rename("b", "c", is_dir=False)
    assert heard == [1, 2]
