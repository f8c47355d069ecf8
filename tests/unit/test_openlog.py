"""What a daemon writes down of the kernel's opens, read by the one that comes after."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from lmstorfs.fuse.handle import make_handle
from lmstorfs.fuse.openlog import OpenLog

FIRST, SECOND = make_handle(7, 1), make_handle(8, 0)


def reopened(path: Path) -> OpenLog:
    """Return the log as a daemon finds it whose predecessor was killed."""
    return OpenLog(path, adopted=True)


def test_opens_and_releases_are_known_again(tmp_path: Path) -> None:
    log = OpenLog(tmp_path / "opens", adopted=False)
    log.opened(2, FIRST, 5)
    log.opened(4, SECOND, 0)
    log.released(6, SECOND)
    found = reopened(tmp_path / "opens").survivors
    assert [(o.unique, o.handle, o.backing_id) for o in found.opens] == [(2, FIRST, 5)]
    assert found.released == {6}
    assert (found.handle_of(2), found.handle_of(4)) == (FIRST, None)
    assert found.highest_backing_id == 5
    assert list(found.by_inode()) == [7]


def test_of_equal_opens_the_newest_is_the_one_whose_answer_may_be_lost(tmp_path: Path) -> None:
    log = OpenLog(tmp_path / "opens", adopted=False)
    log.opened(2, FIRST, 5)
    log.opened(4, FIRST, 5)
    log.released(6, FIRST)
    found = reopened(tmp_path / "opens").survivors
    assert (found.handle_of(2), found.handle_of(4)) == (None, FIRST)


def test_another_kernel_connection_begins_with_nothing(tmp_path: Path) -> None:
    OpenLog(tmp_path / "opens", adopted=False).opened(2, FIRST, 5)
    assert OpenLog(tmp_path / "opens", adopted=False).survivors.opens == []
    assert reopened(tmp_path / "opens").survivors.opens == []


def test_a_record_cut_in_the_middle_is_left_out(tmp_path: Path) -> None:
    log = OpenLog(tmp_path / "opens", adopted=False)
    log.opened(2, FIRST, 5)
    log.opened(4, SECOND, 6)
    path = tmp_path / "opens"
    path.write_bytes(path.read_bytes()[:-1])
    assert [o.unique for o in reopened(path).survivors.opens] == [2]


def test_ids_about_to_be_closed_are_known(tmp_path: Path) -> None:
    log = OpenLog(tmp_path / "opens", adopted=False)
    log.opened(2, FIRST, 5)
    log.closing(7, 5)
    log.released(4, FIRST)
    found = reopened(tmp_path / "opens").survivors
    assert (found.closing, found.opens, found.highest_backing_id) == ([5], [], 5)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=60), st.integers(1, 8))
def test_any_history_survives_any_number_of_daemons(
    steps: list[tuple[bool, int]], every: int
) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "opens"
        log = OpenLog(path, adopted=False)
        wanted: list[int] = []
        for number, (opens, ino) in enumerate(steps):
            handle = make_handle(ino, 0)
            if opens:
                log.opened(2 * number, handle, ino)
                wanted.append(handle)
            elif handle in wanted:
                log.released(2 * number, handle)
                wanted.remove(handle)
            if number % every == 0:
                log.close()
                log = reopened(path)
        assert sorted(o.handle for o in reopened(path).survivors.opens) == sorted(wanted)


def test_the_file_stays_small_and_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "opens"
    log = OpenLog(path, adopted=False)
    log.opened(2, FIRST, 9)
    for number in range(100_000):
        log.opened(10 + 4 * number, SECOND, 0)
        log.released(12 + 4 * number, SECOND)
    assert path.stat().st_size < 4 << 20
    found = reopened(path).survivors
    assert [o.unique for o in found.opens] == [2]
    assert 12 + 4 * 99_999 in found.released
