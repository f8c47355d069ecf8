"""What only a directory store has to promise: other programs write in the same directory."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from lmstorfs.digest import digest_bytes
from lmstorfs.errors import (
    NotInStoreError,
    SetupError,
    StoreError,
    StoreUnreachableError,
)
from lmstorfs.store import Attributes, Kind, ObjectInfo, Unwatched
from lmstorfs.store.directory import DirectoryStore
from lmstorfs.store.directory_files import temporary_name

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a tmpfs")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    path.mkdir()
    return path


@pytest.fixture
def store(root: Path) -> DirectoryStore:
    return DirectoryStore(str(root))


def put(store: DirectoryStore, key: str, content: bytes, source: Path) -> ObjectInfo:
    source.write_bytes(content)
    attributes = Attributes(
        mode=stat.S_IFREG | 0o644,
        uid=os.getuid(),
        gid=os.getgid(),
        mtime_ns=10**18,
        digest=digest_bytes(content),
    )
    with source.open("rb") as file:
        return store.put_file(key, file.fileno(), len(content), attributes, Unwatched())


def test_what_is_stored_is_a_plain_file(store: DirectoryStore, root: Path, tmp_path: Path) -> None:
    put(store, "run/step-1/model", b"weights", tmp_path / "source")
    assert (root / "run/step-1/model").read_bytes() == b"weights"
    assert (root / "run/step-1/model").stat().st_mtime_ns == 10**18
    assert [path.name for path in (root / "run/step-1").iterdir()] == ["model"]


def test_a_digest_is_not_believed_after_the_file_was_rewritten_in_place(
    store: DirectoryStore, root: Path, tmp_path: Path
) -> None:
    put(store, "file", b"old!", tmp_path / "source")
    before = store.head("file")
    assert before.attributes is not None
    if before.attributes.digest is None:
        pytest.skip("no xattrs on this filesystem")
    (root / "file").write_bytes(b"new!")
    after = store.head("file")
    assert after.attributes is not None
    assert after.attributes.digest is None
    assert after.etag != before.etag


def test_a_chmod_is_no_new_content(store: DirectoryStore, root: Path, tmp_path: Path) -> None:
    put(store, "file", b"content", tmp_path / "source")
    before = store.head("file")
    (root / "file").chmod(0o600)
    after = store.head("file")
    assert after.etag == before.etag
    assert after.attributes is not None
    assert before.attributes is not None
    assert after.attributes.digest == before.attributes.digest
    assert stat.S_IMODE(after.attributes.mode) == 0o600


@pytest.mark.parametrize("link", ["parent", "file"])
def test_no_symlink_leads_out_of_the_store(
    store: DirectoryStore, root: Path, tmp_path: Path, link: str
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"secret")
    if link == "parent":
        (root / "dir").symlink_to(outside)
    else:
        (root / "dir").mkdir()
        (root / "dir/file").symlink_to(outside / "file")
    with pytest.raises(StoreError):
        store.read("dir/file", 0, 6)
    if link == "parent":
        for call in (
            lambda: put(store, "dir/file", b"overwritten", tmp_path / "source"),
            lambda: store.head("dir/file"),
            lambda: list(store.list("dir")),
        ):
            with pytest.raises(StoreError):
                call()
        store.delete(["dir/file"])
    else:
        put(store, "dir/file", b"replaces the link", tmp_path / "source")
        assert store.head("dir/file").kind is Kind.FILE
    assert (outside / "file").read_bytes() == b"secret"


def test_temporary_files_are_not_shown_and_those_of_the_dead_are_swept(
    store: DirectoryStore, root: Path
) -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    living = temporary_name()
    dead = living.replace(f"-{os.getpid()}-", f"-{process.pid}-")
    elsewhere = dead.replace("tmp-", "tmp-0", 1)  # the number of a process on another host
    for name in (living, dead, elsewhere):
        (root / name).write_bytes(b"half")
    assert list(store.list("")) == []
    assert store.sweep() == 1
    assert {path.name for path in root.iterdir()} == {living, elsewhere}


def test_a_directory_with_only_dead_temporary_files_can_be_removed(
    store: DirectoryStore, root: Path
) -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    (root / "dir").mkdir()
    name = temporary_name().replace(f"-{os.getpid()}-", f"-{process.pid}-")
    (root / "dir" / name).write_bytes(b"half")
    store.remove_directory("dir")
    assert not (root / "dir").exists()


def test_a_root_that_is_gone_is_out_of_reach_and_not_empty(
    store: DirectoryStore, root: Path, tmp_path: Path
) -> None:
    root.rmdir()
    for call in (
        lambda: store.head("file"),
        lambda: list(store.list("")),
        lambda: store.delete(["file"]),
        lambda: put(store, "file", b"x", tmp_path / "source"),
        lambda: store.rename("a", "b", Kind.FILE),
    ):
        with pytest.raises(StoreUnreachableError):
            call()


@needs_root
def test_a_mount_point_without_its_mount_is_out_of_reach(root: Path, tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "lmstorfs-test", str(root)], check=True)
    mounted = True
    try:
        store = DirectoryStore(str(root))
        put(store, "file", b"x", tmp_path / "source")
        subprocess.run(["umount", str(root)], check=True)
        mounted = False
        with pytest.raises(StoreUnreachableError):
            store.head("file")
        with pytest.raises(StoreUnreachableError):
            put(store, "file", b"x", tmp_path / "source")
        assert list(root.iterdir()) == []
    finally:
        if mounted:
            subprocess.run(["umount", str(root)], check=True)


@needs_root
def test_a_full_store_says_so_and_keeps_the_old_object(root: Path, tmp_path: Path) -> None:
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "lmstorfs-test", str(root)], check=True
    )
    try:
        store = DirectoryStore(str(root))
        put(store, "file", b"old", tmp_path / "source")
        with pytest.raises(StoreError, match="full"):
            put(store, "file", bytes(2 << 20), tmp_path / "source")
        assert (root / "file").read_bytes() == b"old"
        assert [path.name for path in root.iterdir()] == ["file"]
    finally:
        subprocess.run(["umount", str(root)], check=True)


def test_devices_and_pipes_are_no_objects(store: DirectoryStore, root: Path) -> None:
    os.mkfifo(root / "pipe")
    assert list(store.list("")) == []
    with pytest.raises(NotInStoreError):
        store.head("pipe")


def test_a_directory_does_not_move_over_a_file(
    store: DirectoryStore, root: Path, tmp_path: Path
) -> None:
    put(store, "dir/file", b"x", tmp_path / "source")
    put(store, "other", b"y", tmp_path / "source")
    with pytest.raises(StoreError):
        store.rename("dir", "other", Kind.DIRECTORY)
    assert (root / "dir/file").read_bytes() == b"x"
    assert (root / "other").read_bytes() == b"y"


def test_only_a_temporary_file_can_be_aborted(
    store: DirectoryStore, root: Path, tmp_path: Path
) -> None:
    put(store, "file", b"x", tmp_path / "source")
    for upload_id in ("file", "../outside", ".lmstorfs-tmp-../x"):
        with pytest.raises(StoreError):
            store.abort_upload("file", upload_id)
    assert (root / "file").exists()


def test_the_probe_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="create it"):
        DirectoryStore(str(tmp_path / "missing")).probe(write=True)
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match="no directory"):
        DirectoryStore(str(tmp_path / "file")).probe(write=False)
