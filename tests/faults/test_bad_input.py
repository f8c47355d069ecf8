"""A mount that cannot be made says why in one line, and leaves nothing behind.

What needs no S3 server and no other mount is proven beside the commands' own tests.
"""

import os
from pathlib import Path

import pytest

from lmstorfs.mounts import is_mounted, mounted_at
from tests.mounting import Mount, mounted
from tests.s3servers import S3Server, free_port

pytestmark = [
    pytest.mark.mounted,
    pytest.mark.skipif(
        os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs root and /dev/fuse"
    ),
]


def refusal(mount: Mount, *options: object, codes: tuple[int, ...] = (1, 2)) -> str:
    """Return the one line that a mount with these options fails with."""
    folder = mount.path.parent
    before = sorted(folder.rglob("*"))
    done = mount.run("mount", mount.path, "--ram", "64M", *options)
    assert done.returncode in codes, (done.returncode, done.stderr)
    assert done.stdout == ""
    assert done.stderr.startswith("lmstorfs: ")
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith("\n")
    assert not is_mounted(str(mount.path))
    assert not mounted_at(str(mount.state / "ram"))
    assert sorted(folder.rglob("*")) == before, "something was left behind"
    return done.stderr


def test_a_bucket_that_is_not_there(tmp_path: Path, server: S3Server) -> None:
    mount = Mount(tmp_path, environment=server.environment)
    said = refusal(
        mount,
        "--state",
        mount.state,
        "--store",
        "s3://nowhere/x",
        "-o",
        f"endpoint={server.endpoint}",
    )
    assert "nowhere" in said


@pytest.mark.parametrize("key", ["lmstorfs-test", "nobody"], ids=["secret", "both"])
def test_wrong_keys(tmp_path: Path, server: S3Server, key: str) -> None:
    keys = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": "wrong"}
    mount = Mount(tmp_path, environment=keys)
    store = f"s3://{server.bucket}/x"
    said = refusal(
        mount, "--state", mount.state, "--store", store, "-o", f"endpoint={server.endpoint}"
    )
    assert server.bucket in said
    assert "wrong" not in said


def test_nobody_at_the_endpoint(tmp_path: Path) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    mount = Mount(tmp_path, environment=keys)
    endpoint = f"http://127.0.0.1:{free_port()}"
    said = refusal(
        mount, "--state", mount.state, "--store", "s3://ckpt/x", "-o", f"endpoint={endpoint}"
    )
    assert endpoint in said


def test_a_mount_point_that_is_mounted_already_and_a_state_directory_in_use(
    tmp_path: Path,
) -> None:
    with mounted(tmp_path, "--ram", "64M") as first:
        (first.path / "model").write_bytes(b"x" * 1000)
        again = first.run("mount", first.path, "--ram", "64M", "--state", tmp_path / "other")
        assert again.returncode == 1
        assert again.stderr.count("\n") == 1
        assert "already mounted" in again.stderr
        assert not (tmp_path / "other").exists()

        (tmp_path / "second").mkdir()
        second = Mount(tmp_path / "second")
        assert str(first.path) in refusal(second, "--state", first.state, codes=(1,))
        assert (first.path / "model").read_bytes() == b"x" * 1000
        first.sync()
        assert (first.store / "model").read_bytes() == b"x" * 1000
