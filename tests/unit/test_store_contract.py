"""What every store promises, proven on a directory and on two real S3 servers."""

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from lmstorfs.digest import digest_bytes
from lmstorfs.errors import (
    ChangedInStoreError,
    NotInStoreError,
    StoreDeniedError,
    StoreError,
    SupersededError,
)
from lmstorfs.store import (
    Attributes,
    Cancelled,
    Kind,
    ObjectInfo,
    Store,
    StoreConfig,
    Unwatched,
    Watch,
    open_store,
)
from tests.s3servers import S3Server, rclone_s3, weed_s3

MIB = 1 << 20
PART_BYTES = 5 * MIB
LARGE = bytes(range(256)) * (12 * MIB // 256) + b"tail"  # three parts, the last one odd
NAMES = [
    "plain",
    "with space",
    "ünïcode-名",
    "plus+percent%41&amp;",
    "stray\udcff\udc80",
    "q\u201bq",
]


class Place:
    """A store of one kind, fresh for each test, and what is known of its kind."""

    def __init__(self, kind: str, store: Store, server: S3Server | None, prefix: str) -> None:
        self.kind = kind
        self.store = store
        self.server = server
        self.prefix = prefix

    @property
    def holds_empty_directories(self) -> bool:
        return self.kind != "rclone"

    @property
    def keeps_directory_attributes(self) -> bool:
        return self.kind == "directory"

    def leftovers(self) -> list[str]:
        """Return what lies in the store besides published objects."""
        if self.server is None:
            root = Path(self.store.url)
            return [str(path) for path in root.rglob(".lmstorfs-tmp-*")]
        return self.server.uploads() + [
            key for key in self.server.keys(self.prefix) if "-tmp-" in key
        ]


@pytest.fixture(scope="module")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with rclone_s3(tmp_path_factory.mktemp("rclone") / "data") as server:
        yield server


@pytest.fixture(scope="module")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with weed_s3(tmp_path_factory.mktemp("weed")) as server:
        yield server


@pytest.fixture(params=["directory", "rclone", "weed"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    kind: str = request.param
    if kind == "directory":
        root = tmp_path / "store"
        root.mkdir()
        store = open_store(StoreConfig(url=str(root)))
        yield Place(kind, store, None, "")
        store.close()
        return
    server: S3Server = request.getfixturevalue(kind)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    prefix = hashlib.sha256(request.node.name.encode()).hexdigest()[:12]
    url = f"s3://{server.bucket}/{prefix}"
    store = open_store(StoreConfig(url=url, endpoint=server.endpoint, part_bytes=PART_BYTES))
    yield Place(kind, store, server, prefix)
    store.close()


@pytest.fixture
def store(place: Place) -> Store:
    return place.store


@pytest.fixture
def source(tmp_path: Path) -> Callable[[bytes], int]:
    """A function that returns a descriptor of a file with the given content."""

    def make(content: bytes) -> int:
        path = tmp_path / "source"
        path.write_bytes(content)
        return os.open(path, os.O_RDONLY)

    return make


Put = Callable[..., ObjectInfo]


@pytest.fixture
def put(store: Store, source: Callable[[bytes], int]) -> Put:
    def put_content(
        key: str, content: bytes = b"content", watch: Watch | None = None
    ) -> ObjectInfo:
        fd = source(content)
        try:
            return store.put_file(key, fd, len(content), attributes(content), watch or Unwatched())
        finally:
            os.close(fd)

    return put_content


def attributes(content: bytes = b"", **changes: object) -> Attributes:
    base = Attributes(
        mode=stat.S_IFREG | 0o640,
        uid=os.getuid(),
        gid=os.getgid(),
        mtime_ns=1_700_000_000_123_456_789,
        digest=digest_bytes(content),
        version=7,
        xattrs={"user.note": b"\x00\xffbytes"},
    )
    return msgspec.structs.replace(base, **changes)


def names(store: Store, directory: str = "") -> dict[str, Kind]:
    return {info.key: info.kind for info in store.list(directory)}


def test_a_store_that_works_passes_the_probe_and_stays_empty(place: Place) -> None:
    place.store.probe(write=True)
    assert names(place.store) == {}
    assert place.leftovers() == []


@pytest.mark.parametrize("content", [b"", b"small", LARGE], ids=["empty", "small", "large"])
def test_a_file_comes_back_as_it_was_put(
    store: Store, put: Put, tmp_path: Path, content: bytes
) -> None:
    info = put("run/step-1/model.bin", content)
    assert (info.kind, info.size) == (Kind.FILE, len(content))
    target = tmp_path / "target"
    with target.open("wb") as file:
        store.fetch(info.key, file.fileno(), info.size, Unwatched(), etag=info.etag)
    assert target.read_bytes() == content


@pytest.mark.parametrize("content", [b"small", LARGE], ids=["small", "large"])
def test_head_tells_all_attributes(store: Store, put: Put, content: bytes) -> None:
    info = put("a/file", content)
    head = store.head("a/file")
    assert head.attributes == attributes(content)
    assert (head.etag, head.size) == (info.etag, len(content))


def test_a_listing_shows_one_level_with_the_same_etags(store: Store, put: Put) -> None:
    top, deep = put("top", b"1"), put("a/b/deep", b"22")
    assert names(store) == {"top": Kind.FILE, "a": Kind.DIRECTORY}
    assert names(store, "a") == {"a/b": Kind.DIRECTORY}
    assert {info.key: (info.size, info.etag) for info in store.list("a/b")} == {
        "a/b/deep": (2, deep.etag)
    }
    assert [info.etag for info in store.list("") if info.key == "top"] == [top.etag]


def test_what_is_not_there_is_said_so(place: Place) -> None:
    store = place.store
    if place.holds_empty_directories:  # elsewhere it may have been an empty one
        with pytest.raises(NotInStoreError):
            store.rename("no", "other", Kind.DIRECTORY)
    for call in (
        lambda: store.head("no/such"),
        lambda: list(store.list("no")),
        lambda: store.read("no", 0, 1),
        lambda: store.rename("no", "other", Kind.FILE),
        lambda: store.set_attributes("no", Kind.FILE, attributes()),
    ):
        with pytest.raises(NotInStoreError):
            call()


@pytest.mark.parametrize("name", NAMES)
def test_any_name_round_trips(store: Store, put: Put, name: str) -> None:
    key = f"dir {name}/{name}"
    put(key, b"x")
    assert store.read(key, 0, 10) == b"x"
    assert names(store) == {f"dir {name}": Kind.DIRECTORY}
    assert names(store, f"dir {name}") == {key: Kind.FILE}
    store.rename(key, f"{name}2", Kind.FILE)
    assert store.head(f"{name}2").key == f"{name}2"
    store.delete([f"{name}2"])
    assert names(store) in ({}, {f"dir {name}": Kind.DIRECTORY})


@pytest.mark.parametrize("key", ["../out", "a/../../out", "/etc/passwd", "a//b", "", "a/", "."])
def test_no_key_leaves_the_store(store: Store, put: Put, key: str) -> None:
    for call in (
        lambda: put(key),
        lambda: store.head(key),
        lambda: store.read(key, 0, 1),
        lambda: store.delete([key]),
        lambda: store.rename("a", key, Kind.FILE),
        lambda: store.put_symlink(key, "x", attributes()),
        lambda: store.put_directory(key, attributes()),
    ):
        with pytest.raises(StoreDeniedError):
            call()


def test_replacing_changes_the_etag_and_a_reader_of_the_old_one_is_told(
    store: Store, put: Put, tmp_path: Path
) -> None:
    old = put("file", b"old!")
    new = put("file", b"new!")
    assert new.etag != old.etag
    assert store.read("file", 0, 4, etag=new.etag) == b"new!"
    with pytest.raises(ChangedInStoreError):
        store.read("file", 0, 4, etag=old.etag)
    with (tmp_path / "t").open("wb") as file, pytest.raises(ChangedInStoreError):
        store.fetch("file", file.fileno(), 4, Unwatched(), etag=old.etag)


def test_a_file_of_another_size_is_not_fetched(store: Store, put: Put, tmp_path: Path) -> None:
    put("file", b"four")
    with (tmp_path / "t").open("wb") as file, pytest.raises(ChangedInStoreError):
        store.fetch("file", file.fileno(), 5, Unwatched(), etag=None)


def test_reads_are_short_only_at_the_end(store: Store, put: Put) -> None:
    put("file", b"0123456789")
    assert store.read("file", 2, 3) == b"234"
    assert store.read("file", 8, 100) == b"89"
    assert store.read("file", 10, 5) == b""
    assert store.read("file", 100, 5) == b""


@pytest.mark.parametrize("content", [b"small", LARGE], ids=["small", "large"])
def test_a_content_with_another_digest_is_not_published(
    place: Place, source: Callable[[bytes], int], content: bytes
) -> None:
    fd = source(content)
    wrong = attributes(b"something else")
    with pytest.raises(SupersededError):
        place.store.put_file("file", fd, len(content), wrong, Unwatched())
    with pytest.raises(SupersededError):
        place.store.put_file("file", fd, len(content) + 1, attributes(content), Unwatched())
    os.close(fd)
    assert names(place.store) == {}
    assert place.leftovers() == []


class Objecting(Unwatched):
    """Says at the last moment that the file is not to be published."""

    def about_to_publish(self) -> None:
        raise SupersededError("written again")


class CancelledAfter(Unwatched):
    """Gives the transfer up once `count` bytes are through."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.uploads: list[tuple[str, str]] = []

    def cancelled(self) -> bool:
        return self.left <= 0

    def moved(self, count: int) -> None:
        self.left -= count

    def began_upload(self, key: str, upload_id: str) -> None:
        self.uploads.append((key, upload_id))


@pytest.mark.parametrize("content", [b"small", LARGE], ids=["small", "large"])
def test_a_version_superseded_on_the_way_leaves_the_old_object(
    place: Place, put: Put, content: bytes
) -> None:
    old = put("file", b"old")
    with pytest.raises(SupersededError):
        put("file", content, Objecting())
    assert place.store.head("file").etag == old.etag
    assert place.leftovers() == []


@pytest.mark.parametrize("count", [0, 1], ids=["before", "in the middle"])
def test_a_cancelled_put_leaves_nothing(place: Place, put: Put, count: int) -> None:
    with pytest.raises(Cancelled):
        put("file", LARGE, CancelledAfter(count))
    assert names(place.store) == {}
    assert place.leftovers() == []


def test_a_cancelled_fetch_ends(place: Place, put: Put, tmp_path: Path) -> None:
    info = put("file", LARGE)
    # this much is one step for a kernel that copies, and many for a connection
    count = 0 if place.kind == "directory" else 1
    with (tmp_path / "t").open("wb") as file, pytest.raises(Cancelled):
        place.store.fetch("file", file.fileno(), info.size, CancelledAfter(count), etag=info.etag)


def test_an_upload_is_announced_and_aborting_it_again_is_fine(store: Store, put: Put) -> None:
    watch = CancelledAfter(1)
    with pytest.raises(Cancelled):
        put("file", LARGE, watch)
    ((key, upload_id),) = watch.uploads
    assert key == "file"
    store.abort_upload(key, upload_id)
    store.abort_upload(key, upload_id)


@pytest.mark.parametrize("content", [b"small", LARGE], ids=["small", "large"])
def test_new_attributes_leave_the_content(store: Store, put: Put, content: bytes) -> None:
    put("file", content)
    wanted = attributes(content, mode=stat.S_IFREG | 0o400, mtime_ns=5_000_000_007, xattrs={})
    info = store.set_attributes("file", Kind.FILE, wanted)
    assert info.attributes == wanted
    assert store.head("file") == msgspec.structs.replace(info, mtime_ns=store.head("file").mtime_ns)
    assert store.read("file", 0, len(content)) == content


def test_a_symlink_is_one(store: Store) -> None:
    target = "../somewhere/else\udcff"
    made = store.put_symlink("dir/link", target, attributes(mode=stat.S_IFLNK | 0o777))
    assert made.kind is Kind.SYMLINK
    assert store.head("dir/link").kind is Kind.SYMLINK
    assert store.head("dir/link").size == len(os.fsencode(target))
    assert store.read_link("dir/link") == target
    store.put_symlink("dir/link", "new", attributes(mode=stat.S_IFLNK | 0o777))
    assert store.read_link("dir/link") == "new"
    store.delete(["dir/link"])
    with pytest.raises(NotInStoreError):
        store.head("dir/link")


def test_a_directory_can_be_made_filled_and_removed(place: Place, put: Put) -> None:
    store = place.store
    wanted = attributes(mode=stat.S_IFDIR | 0o750, digest=None, version=None, xattrs={})
    assert store.put_directory("a/dir", wanted).kind is Kind.DIRECTORY
    if place.holds_empty_directories:
        assert names(store, "a") == {"a/dir": Kind.DIRECTORY}
        assert store.head("a/dir").kind is Kind.DIRECTORY
    if place.keeps_directory_attributes:
        assert store.head("a/dir").attributes == wanted
    put("a/dir/file")
    store.remove_directory("a/dir")
    assert names(store, "a/dir") == {"a/dir/file": Kind.FILE}
    store.delete(["a/dir/file"])
    store.remove_directory("a/dir")
    store.remove_directory("a/dir")
    with pytest.raises(NotInStoreError):
        store.head("a/dir")


def test_an_implied_directory_is_a_directory(store: Store, put: Put) -> None:
    put("a/b/file")
    assert store.head("a").kind is Kind.DIRECTORY
    assert store.head("a/b").kind is Kind.DIRECTORY


@pytest.mark.parametrize("content", [b"small", LARGE], ids=["small", "large"])
def test_a_renamed_file_keeps_everything_and_replaces(
    store: Store, put: Put, content: bytes
) -> None:
    put("there", b"replaced")
    put("dir/old", content)
    store.rename("dir/old", "there", Kind.FILE)
    assert store.head("there").attributes == attributes(content)
    assert store.read("there", 0, len(content)) == content
    with pytest.raises(NotInStoreError):
        store.head("dir/old")
    store.rename("dir/old", "there", Kind.FILE)  # again: done already


def test_a_renamed_directory_takes_everything_along(place: Place, put: Put) -> None:
    store = place.store
    keys = {f"old/sub {n % 3}/file {n}" for n in range(25)}
    for key in keys:
        put(key, key.encode())
    store.put_directory("old/empty", attributes(mode=stat.S_IFDIR | 0o755))
    store.put_symlink("old/link", "target", attributes(mode=stat.S_IFLNK | 0o777))
    store.rename("old", "new/place", Kind.DIRECTORY)
    for key in keys:
        moved = key.replace("old", "new/place", 1)
        assert store.read(moved, 0, 100) == key.encode()
    assert store.read_link("new/place/link") == "target"
    if place.holds_empty_directories:
        assert store.head("new/place/empty").kind is Kind.DIRECTORY
    with pytest.raises(NotInStoreError):
        list(store.list("old"))
    store.rename("old", "new/place", Kind.DIRECTORY)  # again: done already


def test_a_directory_rename_cut_off_half_way_is_finished_by_the_next(
    place: Place, put: Put
) -> None:
    """Half of the objects at both places, as a crash between copies and deletes leaves them."""
    if place.kind == "directory":
        pytest.skip("the kernel's rename has no half way")
    for n in range(4):
        put(f"old/{n}", b"%d" % n)
    put("new/0", b"0")
    place.store.delete(["old/0"])
    put("new/1", b"1")
    place.store.rename("old", "new", Kind.DIRECTORY)
    assert {key: place.store.read(key, 0, 9) for key in names(place.store, "new")} == {
        f"new/{n}": b"%d" % n for n in range(4)
    }


def test_many_are_deleted_at_once_and_absent_ones_are_fine(store: Store, put: Put) -> None:
    keys = [f"dir/{n}" for n in range(20)]
    for key in keys:
        put(key, b"x")
    put("dir/kept")
    store.delete([*keys, "dir/never", "no/where"])
    store.delete(keys)
    assert names(store, "dir") == {"dir/kept": Kind.FILE}


def test_a_name_too_long_for_the_store_is_an_error_that_says_so(store: Store, put: Put) -> None:
    with pytest.raises(StoreError, match=r"1024|File name too long"):
        put("/".join(["n" * 300] * 4))


def test_room_is_told_or_unknown(store: Store) -> None:
    room = store.capacity()
    assert room is None or 0 < room.free <= room.total
