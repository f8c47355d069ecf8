"""Renames and deletes before, during and after the upload end right, here and in the store."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from tests.mounted.conftest import Site
from tests.mounting import wait_for


def tree(folder: Path) -> dict[str, bytes]:
    """Return every file below `folder` with its content."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def assert_store_has(site: Site, folder: Path, want: dict[str, bytes]) -> None:
    assert tree(folder) == want
    site.discard()
    site.mount.sync()
    stored = site.stored(folder)
    assert (tree(stored) if stored.exists() else {}) == want


def wait_until_uploading(site: Site) -> None:
    """Return when an upload is under way, or was so fast that nothing is left to be uploaded."""

    def uploading() -> bool:
        store = site.mount.status()["store"]
        return bool(store["flushing"]["in_flight"]) or not store["pending_files"]

    wait_for(uploading, "the upload has begun")


def test_rename_replaces_a_stored_file(site: Site) -> None:
    folder = site.fresh("replace")
    (folder / "last.pt").write_bytes(b"old")
    site.mount.sync()
    (folder / "new.tmp").write_bytes(b"new content")
    (folder / "new.tmp").rename(folder / "last.pt")
    assert_store_has(site, folder, {"last.pt": b"new content"})


def test_rename_of_a_stored_file_onto_a_stored_file(site: Site) -> None:
    folder = site.fresh("replace-stored")
    (folder / "a").write_bytes(b"a")
    (folder / "b").write_bytes(b"bb")
    site.mount.sync()
    (folder / "a").rename(folder / "b")
    (folder / "a").write_bytes(b"a again")
    assert_store_has(site, folder, {"a": b"a again", "b": b"a"})


def test_rename_during_the_upload(site: Site) -> None:
    folder = site.fresh("during")
    content = os.urandom(48 << 20)
    (folder / "step_1.tmp").mkdir()
    path = folder / "step_1.tmp" / "big.pt"
    path.write_bytes(content)
    wait_until_uploading(site)
    (folder / "step_1.tmp").rename(folder / "step_1")
    (folder / "step_1.tmp").mkdir()
    (folder / "step_1.tmp" / "big.pt").write_bytes(b"the next one")
    assert_store_has(site, folder, {"step_1/big.pt": content, "step_1.tmp/big.pt": b"the next one"})


def test_rename_of_a_stored_directory_takes_all_along(site: Site) -> None:
    folder = site.fresh("tree")
    (folder / "run" / "a" / "b").mkdir(parents=True)
    for number in range(10):
        (folder / "run" / "a" / "b" / f"{number}.pt").write_bytes(b"%d" % number)
    (folder / "run" / "top").write_bytes(b"top")
    site.mount.sync()
    (folder / "run").rename(folder / "moved")
    (folder / "moved" / "a" / "b" / "3.pt").unlink()
    want = {f"moved/a/b/{n}.pt": b"%d" % n for n in range(10) if n != 3}
    assert_store_has(site, folder, want | {"moved/top": b"top"})


def test_two_stored_files_change_places(site: Site) -> None:
    folder = site.fresh("swap")
    (folder / "a").write_bytes(b"a")
    (folder / "b").write_bytes(b"b")
    site.mount.sync()
    (folder / "a").rename(folder / "c")
    (folder / "b").rename(folder / "a")
    (folder / "c").rename(folder / "b")
    assert_store_has(site, folder, {"a": b"b", "b": b"a"})


def test_rotation_deletes_the_objects(site: Site) -> None:
    folder = site.fresh("rotation")
    for step in range(6):
        (folder / f"step_{step}").mkdir()
        for rank in range(3):
            (folder / f"step_{step}" / f"rank_{rank}.pt").write_bytes(os.urandom(300_000))
        if step >= 2:
            shutil.rmtree(folder / f"step_{step - 2}")
    site.mount.sync()
    kept = set(tree(folder))
    assert kept == {f"step_{s}/rank_{r}.pt" for s in (4, 5) for r in range(3)}
    assert tree(site.stored(folder)) == tree(folder)


def test_a_delete_during_the_upload_leaves_nothing(site: Site) -> None:
    folder = site.fresh("delete-during")
    path = folder / "big.pt"
    path.write_bytes(os.urandom(48 << 20))
    wait_until_uploading(site)
    path.unlink()
    (folder / "other").write_bytes(b"other")
    assert_store_has(site, folder, {"other": b"other"})
    if site.server is not None:
        uploads = site.server.client().list_multipart_uploads(Bucket=site.server.bucket)
        assert [u["Key"] for u in uploads.get("Uploads", []) if "delete-during" in u["Key"]] == []


def test_a_rewrite_during_the_upload_supersedes_it(site: Site) -> None:
    path = site.fresh("supersede") / "model.pt"
    path.write_bytes(os.urandom(40 << 20))
    wait_until_uploading(site)
    newest = os.urandom(41 << 20)
    path.write_bytes(newest)
    site.mount.sync()
    assert site.stored(path).read_bytes() == newest


def test_an_unlinked_file_lives_while_it_is_open(site: Site) -> None:
    folder = site.fresh("unlinked")
    path = folder / "file"
    with path.open("w+b") as file:
        file.write(b"before")
        path.unlink()
        assert not path.exists()
        file.write(b" after")
        file.flush()
        file.seek(0)
        assert file.read() == b"before after"
    assert_store_has(site, folder, {})


def test_errors_are_those_of_a_local_disk(directory_site: Site) -> None:
    folder = directory_site.fresh("errors")
    (folder / "dir" / "full").mkdir(parents=True)
    (folder / "file").write_bytes(b"x")
    with pytest.raises(OSError, match="not empty") as not_empty:
        (folder / "dir").rmdir()
    assert not_empty.value.errno == errno.ENOTEMPTY
    with pytest.raises(IsADirectoryError):
        (folder / "file").rename(folder / "dir")
    with pytest.raises(NotADirectoryError):
        (folder / "dir").rename(folder / "file")
    with pytest.raises(FileExistsError):
        (folder / "dir").mkdir()
    with pytest.raises(FileNotFoundError):
        (folder / "missing").open()
    with pytest.raises(OSError, match="argument") as cycle:
        (folder / "dir").rename(folder / "dir" / "full" / "below")
    assert cycle.value.errno == errno.EINVAL
    with pytest.raises(OSError, match="too long") as too_long:
        (folder / ("n" * 256)).touch()
    assert too_long.value.errno == errno.ENAMETOOLONG
    with pytest.raises(PermissionError):
        os.link(folder / "file", folder / "hard")
    with pytest.raises(OSError, match="not supported") as nameless:
        os.open(folder, os.O_TMPFILE | os.O_RDWR)
    assert nameless.value.errno == errno.EOPNOTSUPP


def test_a_directory_stays_right_while_it_changes(directory_site: Site) -> None:
    folder = directory_site.fresh("readdir")
    for number in range(2000):
        (folder / f"keep_{number}").touch()
    seen: list[str] = []
    with os.scandir(folder) as entries:
        for count, entry in enumerate(entries):
            seen.append(entry.name)
            if count < 200:
                (folder / f"new_{count}").touch()
                if count % 2:
                    (folder / f"new_{count - 1}").unlink()
    assert len(seen) == len(set(seen))
    assert {name for name in seen if name.startswith("keep_")} == {
        f"keep_{number}" for number in range(2000)
    }


def test_names_that_are_not_utf8_are_names_like_any_other(site: Site) -> None:
    folder = site.fresh("bytes")
    old, new = (folder / os.fsdecode(name) for name in (b"caf\xe9", b"th\xe9 \xe2\x80\x9b"))
    (old / "deeper").mkdir(parents=True)
    (old / "deeper" / os.fsdecode(b"mod\xffel.pt")).write_bytes(b"weights")
    site.sync()
    old.rename(new)
    site.settle()
    assert tree(new) == {os.fsdecode(b"deeper/mod\xffel.pt"): b"weights"}
    if site.server is None:
        assert tree(site.stored(new)) == tree(new)
        assert not site.stored(old).exists()
    shutil.rmtree(new)
    site.discard()
    site.settle()
    assert list(folder.iterdir()) == []
    assert [path for path in site.stored(folder).rglob("*") if path.is_file()] == []
