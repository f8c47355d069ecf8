"""A full S3 server: multipart uploads leave nothing behind, other tools' objects are understood."""

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mounted.conftest import FAST
from tests.mounting import Mount, mounted, wait_for
from tests.s3servers import S3Server

MIB = 1 << 20
PREFIX = "run"


@pytest.fixture(scope="module")
def mount(weed: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mount]:
    store = ("--store", f"s3://{weed.bucket}/{PREFIX}")
    options = ("-o", f"endpoint={weed.endpoint},part_size=5M", "--no-guard")  # what goes is gone
    folder = tmp_path_factory.mktemp("seaweedfs")
    with mounted(folder, *FAST, *store, *options, environment=weed.environment) as made:
        yield made


def keys(weed: S3Server, below: str) -> list[str]:
    """Return the keys below a directory of the mount."""
    return sorted(key.removeprefix(f"{PREFIX}/") for key in weed.keys(f"{PREFIX}/{below}/"))


def uploading(mount: Mount, weed: S3Server) -> bool:
    return bool(weed.uploads()) or not mount.status()["store"]["pending_files"]


def put(weed: S3Server, name: str, content: bytes, **more: Any) -> None:
    weed.client().put_object(Bucket=weed.bucket, Key=f"{PREFIX}/{name}", Body=content, **more)


def test_a_checkpoint_removed_while_it_is_uploaded_leaves_nothing(
    mount: Mount, weed: S3Server
) -> None:
    folder = mount.path / "removed" / "step_1"
    folder.mkdir(parents=True)
    for rank in range(6):
        (folder / f"rank_{rank}.pt").write_bytes(os.urandom(32 * MIB))
    wait_for(lambda: uploading(mount, weed), "the upload has begun")
    shutil.rmtree(folder)
    (mount.path / "removed" / "kept").write_bytes(b"kept")
    mount.sync()
    assert [key for key in keys(weed, "removed") if not key.endswith("/")] == ["removed/kept"]
    wait_for(lambda: not weed.uploads(), "no multipart upload is left")
    mount.sync()
    assert [key for key in keys(weed, "removed") if not key.endswith("/")] == ["removed/kept"]


def test_a_rewrite_while_it_is_uploaded_ends_with_the_newest(mount: Mount, weed: S3Server) -> None:
    path = mount.path / "rewritten.pt"
    path.write_bytes(os.urandom(64 * MIB))
    wait_for(lambda: uploading(mount, weed), "the upload has begun")
    newest = os.urandom(33 * MIB)
    path.write_bytes(newest)
    mount.sync()
    stored = weed.client().get_object(Bucket=weed.bucket, Key=f"{PREFIX}/rewritten.pt")
    assert stored["Body"].read() == newest
    wait_for(lambda: not weed.uploads(), "no multipart upload is left")


def test_a_stored_tree_is_renamed_with_its_directories(mount: Mount, weed: S3Server) -> None:
    folder = mount.path / "trees" / "step_1.tmp"
    (folder / "empty").mkdir(parents=True)
    content = os.urandom(12 * MIB)
    (folder / "model.pt").write_bytes(content)
    mount.sync()
    folder.rename(folder.with_name("step_1"))
    mount.sync()
    assert keys(weed, "trees") == [
        "trees/",
        "trees/step_1/",
        "trees/step_1/empty/",
        "trees/step_1/model.pt",
    ]
    assert (mount.path / "trees" / "step_1" / "model.pt").read_bytes() == content


def test_directory_markers_and_symlinks_of_s3fs_are_understood(
    mount: Mount, weed: S3Server
) -> None:
    put(weed, "s3fs/", b"", ContentType="application/x-directory")
    put(weed, "s3fs/target", b"content", Metadata={"mode": "33184", "mtime": "1600000001"})
    put(weed, "s3fs/link", b"target", Metadata={"mode": str(stat.S_IFLNK | 0o777)})
    wait_for((mount.path / "s3fs").exists, "the directory is seen")
    folder = mount.path / "s3fs"
    assert folder.is_dir()
    assert {path.name for path in folder.iterdir()} == {"target", "link"}
    assert (folder / "link").is_symlink()
    assert (folder / "link").readlink() == Path("target")
    assert (folder / "link").read_bytes() == b"content"
    target = (folder / "target").stat()
    assert (target.st_mode, target.st_mtime_ns) == (33184, 1_600_000_001_000_000_000)


def test_a_large_object_of_others_is_read(mount: Mount, weed: S3Server) -> None:
    content = os.urandom(64 * MIB)
    put(weed, "theirs/large.bin", content)
    wait_for((mount.path / "theirs").exists, "the directory is seen")
    path = mount.path / "theirs" / "large.bin"
    with path.open("rb") as file:
        assert os.pread(file.fileno(), 100, 50 * MIB) == content[50 * MIB :][:100]
    assert path.read_bytes() == content
