"""Whose close it is: the writer's, or that of a copy of its descriptor in another process."""

from pathlib import Path

import pytest

from lmstorfs.fuse.closers import Closers
from lmstorfs.fuse.handle import make_handle

WRITER = make_handle(7, 1)
READER = make_handle(7, 0)


class Processes:
    """A /proc of threads, each with its process and state."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def has(self, thread: int, process: int, state: str = "S (sleeping)") -> None:
        (self.folder / str(thread)).mkdir(exist_ok=True)
        text = f"Name:\tpython\nState:\t{state}\nTgid:\t{process}\n"
        (self.folder / str(thread) / "status").write_text(text)


@pytest.fixture
def processes(tmp_path: Path) -> Processes:
    made = Processes(tmp_path)
    made.has(100, 100)
    made.has(101, 100)
    made.has(200, 200)
    return made


@pytest.mark.parametrize(
    ("closer", "foreign"), [(100, False), (101, False), (200, True), (0, False), (999, False)]
)
def test_the_process_that_opened_the_file_closes_it(
    processes: Processes, closer: int, foreign: bool
) -> None:
    closers = Closers(processes.folder)
    closers.opened(WRITER, 100)
    assert closers.is_foreign(WRITER, closer) is foreign


def test_whoever_inherits_from_a_dead_writer_is_the_writer(processes: Processes) -> None:
    closers = Closers(processes.folder)
    closers.opened(WRITER, 100)
    processes.has(100, 100, "Z (zombie)")
    assert not closers.is_foreign(WRITER, 200)


def test_each_of_several_openers_may_close(processes: Processes) -> None:
    processes.has(300, 300)
    closers = Closers(processes.folder)
    closers.opened(WRITER, 100)
    closers.opened(WRITER, 200)
    assert not closers.is_foreign(WRITER, 100)
    assert not closers.is_foreign(WRITER, 200)
    assert closers.is_foreign(WRITER, 300)
    closers.released(WRITER, 1)
    assert closers.is_foreign(WRITER, 300)
    closers.released(WRITER, 0)
    assert not closers.is_foreign(WRITER, 300)  # nothing is known of it any more


def test_what_was_opened_before_this_daemon_counts_as_its_own(processes: Processes) -> None:
    closers = Closers(processes.folder)
    closers.opened(READER, 100)
    assert not closers.is_foreign(WRITER, 200)
    assert not closers.is_foreign(READER, 200)
