"""tar and rsync carry a tree in and out with every attribute; the store keeps them all."""

import subprocess
from pathlib import Path

import pytest

from tests.mounted.attributes import Facts, facts, make_tree
from tests.mounted.conftest import FAST, Site
from tests.mounting import mounted
from tests.s3servers import S3Server

RSYNC = ("rsync", "-aX", "--numeric-ids")
TAR = ("tar", "--xattrs", "--xattrs-include=user.*", "--numeric-owner", "--format=posix")


def run(*words: object) -> str:
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    make_tree(folder)
    return folder


def test_rsync_in_and_out_keeps_every_attribute(site: Site, source: Path, tmp_path: Path) -> None:
    folder = site.fresh("rsync")
    run(*RSYNC, f"{source}/", f"{folder}/")
    assert facts(folder) == facts(source)
    assert run(*RSYNC, "-i", f"{source}/", f"{folder}/") == ""
    run(*RSYNC, f"{folder}/", f"{tmp_path / 'out'}/")
    assert facts(tmp_path / "out") == facts(source)


def test_tar_onto_and_off_the_mount_keeps_every_attribute(
    site: Site, source: Path, tmp_path: Path
) -> None:
    folder = site.fresh("tar")
    run(*TAR, "-cf", folder / "tree.tar", "-C", source, ".")
    (folder / "tree").mkdir()
    run(*TAR, "-xpf", folder / "tree.tar", "-C", folder / "tree")
    assert facts(folder / "tree") == facts(source)
    run(*TAR, "-cf", folder / "again.tar", "-C", folder / "tree", ".")
    (tmp_path / "out").mkdir()
    run(*TAR, "-xpf", folder / "again.tar", "-C", tmp_path / "out")
    assert facts(tmp_path / "out") == facts(source)


def without_directories(found: Facts) -> Facts:
    """Leave out what neither S3 server here keeps: the metadata of a directory's marker."""
    return {name: shown for name, shown in found.items() if not str(shown[0]).startswith("0o4")}


def kept_by(site: Site, found: Facts) -> Facts:
    return found if site.server is None else without_directories(found)


def test_the_store_keeps_every_attribute(site: Site, source: Path, tmp_path: Path) -> None:
    folder = site.fresh("fresh")
    run(*RSYNC, f"{source}/", f"{folder}/")
    site.settle()
    (tmp_path / "new").mkdir()
    with mounted(tmp_path / "new", *FAST, *site.store_options) as other:
        again = other.path / "fresh"
        assert kept_by(site, facts(again)) == kept_by(site, facts(source))
        if site.server is None:
            assert run(*RSYNC, "-ic", f"{source}/", f"{again}/") == ""


def test_changed_attributes_of_stored_files_are_kept(site: Site, tmp_path: Path) -> None:
    folder = site.fresh("late")
    make_tree(folder)
    site.settle()
    change_modes(folder)
    site.settle()
    (tmp_path / "new").mkdir()
    with mounted(tmp_path / "new", *FAST, *site.store_options) as other:
        assert kept_by(site, facts(other.path / "late")) == kept_by(site, facts(folder))


def test_seaweedfs_keeps_the_tree_and_every_attribute_of_files(
    weed: S3Server, tmp_path: Path
) -> None:
    store = ("--store", f"s3://{weed.bucket}/attributes", "-o", f"endpoint={weed.endpoint}")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with mounted(tmp_path / "one", *FAST, *store, environment=weed.environment) as mount:
        make_tree(mount.path)
        mount.sync()
        change_modes(mount.path)
        want = facts(mount.path)
        assert mount.run("unmount", mount.path).returncode == 0
    with mounted(tmp_path / "two", *FAST, *store, environment=weed.environment) as mount:
        got = facts(mount.path)
        assert got.keys() == want.keys()
        assert without_directories(got) == without_directories(want)


def change_modes(folder: Path) -> None:
    for path in folder.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o705 if path.is_dir() else 0o604)
