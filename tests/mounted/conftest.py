"""Mounts for tests: each data path over each kind of store, shared by the tests of a module."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lmstorfs.control_client import ControlClient
from tests.mounting import Mount, mounted
from tests.s3servers import S3Server, rclone_s3, weed_s3

SYNC_S = 30
FAST = ("--ram", "1G", "-o", "flush_delay=0.05,attr_timeout=1")
MATRIX = [
    ("passthrough", "directory"),
    ("userspace", "directory"),
    ("passthrough", "s3"),
    ("userspace", "s3"),
]


@dataclass
class Site:
    """A mount, and the folder in which its store keeps the objects."""

    mount: Mount
    objects: Path
    server: S3Server | None
    store_options: tuple[object, ...] = ()
    """What another mount of the same store is told."""

    @property
    def path(self) -> Path:
        return self.mount.path

    def fresh(self, name: str) -> Path:
        """Make a new folder on the mount for one test."""
        folder = self.path / name
        folder.mkdir()
        return folder

    def settle(self) -> None:
        """Return when the store has all, attributes and names too."""
        self.sync(settle=True)

    def sync(self, *, settle: bool = False) -> None:
        """Do what the command does, without a process for each call."""
        client = ControlClient(self.mount.state)
        give_up = time.monotonic() + SYNC_S

        def watch(progress: dict[str, Any]) -> None:
            assert time.monotonic() < give_up, f"the sync never ends: {progress}"

        client.call("sync", on_progress=watch, timeout=SYNC_S, paths=[str(self.path)])
        while settle and client.call("status")["store"]["pending_files"]:
            assert time.monotonic() < give_up, f"it never settles: {client.call('status')}"
            time.sleep(0.01)

    def discard(self) -> None:
        """Let go of what was deleted and is kept: the store is to have what the mount shows."""
        client = ControlClient(self.mount.state)
        client.call("undelete", timeout=SYNC_S, path=str(self.path), discard=True)

    def stored(self, path: Path) -> Path:
        """Where the store has the object of a file on the mount."""
        return self.objects / path.relative_to(self.path)


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with rclone_s3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="session")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Run one SeaweedFS for what needs an S3 server with real multipart uploads."""
    with weed_s3(tmp_path_factory.mktemp("weed")) as server:
        yield server


@pytest.fixture(scope="module", params=MATRIX, ids=["-".join(pair) for pair in MATRIX])
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """A mount that the tests of a module share; each test works in a folder of its own."""
    data_path, kind = request.param
    folder = tmp_path_factory.mktemp(f"{data_path}-{kind}")
    options: list[object] = [*FAST]
    if data_path == "userspace":
        options += ["-o", "data_path=userspace"]
    if kind == "directory":
        objects = folder / "objects"
        objects.mkdir()
        store: tuple[object, ...] = ("--store", objects)
        with mounted(folder, *store, *options) as mount:
            check_data_path(mount, data_path)
            yield Site(mount, objects, None, store)
        return
    server: S3Server = request.getfixturevalue("s3_server")
    prefix = folder.name
    store = ("--store", f"s3://{server.bucket}/{prefix}", "-o", f"endpoint={server.endpoint}")
    with mounted(folder, *store, *options) as mount:
        check_data_path(mount, data_path)
        assert server.folder is not None
        yield Site(mount, server.folder / prefix, server, store)


@pytest.fixture(scope="module")
def directory_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One mount over a directory, for what does not depend on store or data path."""
    folder = tmp_path_factory.mktemp("directory")
    objects = folder / "objects"
    objects.mkdir()
    with mounted(folder, "--store", objects, *FAST) as mount:
        yield Site(mount, objects, None, ("--store", objects))


def check_data_path(mount: Mount, wanted: str) -> None:
    """A test that runs on the wrong data path proves nothing."""
    status = mount.status()
    if wanted == "passthrough" and os.geteuid() != 0:
        pytest.skip("passthrough needs root")
    assert status["data_path"] == wanted, status["data_path_reason"]
