"""`lmstorfs latest` where only the store is left: what it holds whole is named, parts are not."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mounting import Mount, mounted, wait_for
from tests.s3servers import S3Server

pytestmark = [
    pytest.mark.mounted,
    pytest.mark.skipif(
        os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs root and /dev/fuse"
    ),
]


class Place:
    """A store, and how to take an object away behind everybody's back."""

    def __init__(
        self,
        options: tuple[object, ...],
        environment: dict[str, str],
        remove: Callable[[str], None],
    ) -> None:
        self.options = options
        self.environment = environment
        self.remove = remove


@pytest.fixture(params=["directory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "directory":
        objects = tmp_path / "objects"
        objects.mkdir()
        yield Place(("--store", objects), {}, lambda key: (objects / key).unlink())
        return
    server: S3Server = request.getfixturevalue("weed")
    prefix = tmp_path.name
    url = f"s3://{server.bucket}/{prefix}"

    def remove(key: str) -> None:
        server.client().delete_object(Bucket=server.bucket, Key=f"{prefix}/{key}")

    options = ("--store", url, "-o", f"endpoint={server.endpoint}")
    yield Place(options, server.environment, remove)


def save(folder: Path, files: int) -> dict[str, bytes]:
    folder.mkdir(parents=True)
    content = {f"shard-{number}.safetensors": os.urandom(1000 + number) for number in range(files)}
    for name, data in content.items():
        (folder / name).write_bytes(data)
    return content


def latest(mount: Mount) -> str:
    done = mount.run("latest", mount.path)
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip()


def write_two(folder: Path, place: Place) -> dict[str, bytes]:
    """Save two checkpoints, have both in the store; return what is in the first."""
    folder.mkdir()
    with mounted(
        folder, *place.options, "-o", "flush_delay=0", environment=place.environment
    ) as mount:
        first = save(mount.path / "run" / "step-20", 4)
        mount.sync()
        save(mount.path / "run" / "step-30", 4)
        mount.sync()

        def sealed() -> bool:
            return mount.log().count("event=sealed") == 2

        wait_for(sealed, "the store can tell of both")
        mount.sync()
        assert latest(mount) == str(mount.path / "run" / "step-30")
        assert mount.run("unmount", mount.path).returncode == 0
    return first


def test_a_new_node_finds_what_the_store_holds_whole(tmp_path: Path, place: Place) -> None:
    first = write_two(tmp_path / "old", place)
    place.remove("run/step-30/shard-2.safetensors")
    (tmp_path / "new").mkdir()
    with mounted(tmp_path / "new", *place.options, environment=place.environment) as mount:
        assert latest(mount) == str(mount.path / "run" / "step-20")
        found = {path.name: path.read_bytes() for path in (mount.path / "run/step-20").iterdir()}
        assert found == first
        # Nobody sees how it is known.
        assert os.listxattr(mount.path / "run/step-20/shard-0.safetensors") == []


def test_with_nothing_whole_in_the_store_nothing_is_named(tmp_path: Path, place: Place) -> None:
    write_two(tmp_path / "old", place)
    for step in (20, 30):
        place.remove(f"run/step-{step}/shard-3.safetensors")
    (tmp_path / "new").mkdir()
    with mounted(tmp_path / "new", *place.options, environment=place.environment) as mount:
        assert "there is no complete checkpoint" in latest(mount)
