"""What other tools put into the store, change and remove there is seen, and never mixed up."""

import os
import stat

from tests.mounted.conftest import Site
from tests.mounting import wait_for


def put(site: Site, key: str, content: bytes) -> None:
    """Put an object as another tool would."""
    if site.server is None:
        path = site.objects / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    else:
        site.server.client().put_object(
            Bucket=site.server.bucket, Key=f"{site.objects.name}/{key}", Body=content
        )


def remove(site: Site, key: str) -> None:
    if site.server is None:
        (site.objects / key).unlink()
    else:
        site.server.client().delete_object(
            Bucket=site.server.bucket, Key=f"{site.objects.name}/{key}"
        )


def test_files_put_by_others_are_listed_and_read(site: Site) -> None:
    large = os.urandom(24 << 20)
    put(site, "others/a/small.txt", b"small")
    put(site, "others/a/large.bin", large)
    put(site, "others/none", b"")
    wait_for((site.path / "others").exists, "the new directory is seen")
    assert sorted(p.name for p in (site.path / "others").iterdir()) == ["a", "none"]
    assert (site.path / "others/a/small.txt").read_bytes() == b"small"
    assert (site.path / "others/a/large.bin").read_bytes() == large
    assert (site.path / "others/none").read_bytes() == b""
    status = (site.path / "others/a/large.bin").stat()
    assert stat.S_IMODE(status.st_mode) == 0o644
    assert status.st_size == len(large)


def test_a_file_changed_by_others_is_seen_as_a_whole(site: Site) -> None:
    folder = site.fresh("changed")
    path = folder / "file"
    path.write_bytes(b"a" * 100_000)
    site.mount.sync()
    put(site, "changed/file", b"b" * 50_000)
    seen: set[bytes] = set()

    def is_new() -> bool:
        content = path.read_bytes()
        seen.add(content)
        return content[:1] == b"b"

    wait_for(is_new, "the new content is seen")
    assert seen <= {b"a" * 100_000, b"b" * 50_000}
    assert path.stat().st_size == 50_000
    path.write_bytes(b"c" * 10)
    site.mount.sync()
    assert site.stored(path).read_bytes() == b"c" * 10


def test_a_file_removed_by_others_vanishes(site: Site) -> None:
    folder = site.fresh("removed")
    (folder / "gone").write_bytes(b"x")
    (folder / "kept").write_bytes(b"y")
    site.mount.sync()
    remove(site, "removed/gone")
    wait_for(lambda: not (folder / "gone").exists(), "the file is gone")
    assert [p.name for p in folder.iterdir()] == ["kept"]


def test_an_object_of_others_can_be_rewritten_renamed_and_removed(site: Site) -> None:
    for name in ("append", "rename", "remove"):
        put(site, f"theirs/{name}", b"theirs")
    wait_for((site.path / "theirs").exists, "the new directory is seen")
    folder = site.path / "theirs"
    with (folder / "append").open("ab") as file:
        file.write(b" and ours")
    (folder / "rename").rename(folder / "renamed")
    (folder / "remove").unlink()
    site.mount.sync()
    assert site.stored(folder / "append").read_bytes() == b"theirs and ours"
    assert site.stored(folder / "renamed").read_bytes() == b"theirs"
    assert sorted(p.name for p in site.stored(folder).iterdir()) == ["append", "renamed"]
