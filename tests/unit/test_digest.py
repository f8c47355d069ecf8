"""Digests of whole versions."""

import os
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from lmstorfs.digest import (
    DigestCancelledError,
    FollowingDigest,
    digest_bytes,
    digest_fd,
    digest_file,
)


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 5_000_000])
def test_the_digest_is_that_of_the_whole_content(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    path = tmp_path / "file"
    path.write_bytes(content)
    assert digest_file(path) == digest_bytes(content) == xxhash.xxh3_128_hexdigest(content)


def test_only_the_first_bytes_count_where_a_size_is_given(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"versionbeyond")
    assert digest_file(path, 7) == digest_bytes(b"version")
    assert digest_file(path, 0) == digest_bytes(b"")


def test_a_file_that_is_too_short_has_no_digest(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"short")
    with pytest.raises(EOFError, match="file has 5 bytes, not 6"):
        digest_file(path, 6)


def test_the_descriptors_position_does_not_matter_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    with path.open("rb", buffering=0) as file:
        file.seek(3)
        assert digest_fd(file.fileno()) == digest_bytes(b"content")
        assert file.tell() == 3


def test_nobody_wants_it_any_more(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * (3 << 20))
    asked: list[None] = []

    def cancelled() -> bool:
        asked.append(None)
        return len(asked) > 1

    with pytest.raises(DigestCancelledError):
        digest_file(path, cancelled=cancelled)
    assert len(asked) == 2


@given(
    pieces=st.lists(st.binary(min_size=1, max_size=50), max_size=12).flatmap(
        lambda pieces: st.tuples(
            st.just(pieces),
            st.permutations(range(len(pieces))),
            st.integers(0, len(pieces)),
        )
    )
)
def test_a_file_filled_in_any_order_has_the_digest_of_its_content(
    tmp_path_factory: pytest.TempPathFactory, pieces: tuple[list[bytes], list[int], int]
) -> None:
    contents, order, told = pieces
    whole = b"".join(contents)
    starts = [sum(map(len, contents[:number])) for number in range(len(contents))]
    path = tmp_path_factory.mktemp("following") / "file"
    with path.open("wb+", buffering=0) as file, FollowingDigest(file.fileno()) as following:
        for nth, number in enumerate(order):
            os.pwrite(file.fileno(), contents[number], starts[number])
            if nth < told:  # of the rest it only hears that all is there
                following.came(starts[number], len(contents[number]))
        assert following.result(len(whole)) == digest_bytes(whole)


def test_what_follows_a_file_tells_of_bytes_that_did_not_come(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"short")
    with path.open("rb") as file, FollowingDigest(file.fileno()) as following:
        following.came(0, 9)
        with pytest.raises(EOFError):
            following.result(12)


def test_what_follows_a_file_stops_when_nobody_wants_it_any_more(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    with (
        path.open("rb") as file,
        FollowingDigest(file.fileno(), lambda: True) as following,
        pytest.raises(DigestCancelledError),
    ):
        following.result(7)
