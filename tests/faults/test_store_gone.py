"""The store goes away and comes back: writes go on, nothing is lost, and status says so."""

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.mounting import Mount, mounted, wait_for
from tests.proxy import Proxy, proxied
from tests.s3servers import S3Server

MIB = 1 << 20
OPTIONS = ("--ram", "512M", "-o", "flush_delay=0,part_size=5M")

pytestmark = [
    pytest.mark.mounted,
    pytest.mark.skipif(
        os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs root and /dev/fuse"
    ),
]


def save(mount: Mount, step: int) -> dict[str, bytes]:
    """Save a checkpoint of a large and some small files; return what the store is to hold."""
    folder = mount.path / f"step-{step}"
    folder.mkdir()
    wanted = {f"step-{step}/large.bin": os.urandom(18 * MIB)}
    wanted |= {f"step-{step}/small-{number}": os.urandom(1000) for number in range(3)}
    for name, content in wanted.items():
        (mount.path / name).write_bytes(content)
    return wanted


def degraded(mount: Mount) -> dict[str, Any]:
    """Return the status as soon as the mount has seen that the store fails, twice."""

    def look() -> dict[str, Any] | None:
        status = mount.status()
        seen = status["state"] == "degraded" and status["store"]["retries"] >= 2
        return status if seen else None

    found = wait_for(look, "status is degraded")
    assert found is not None
    assert any(reason.startswith("store ") for reason in found["reasons"])
    assert found["store"]["pending_files"] > 0
    return found


def all_is_well(mount: Mount) -> None:
    mount.sync()
    status = mount.status()
    assert (status["state"], status["reasons"]) == ("ready", [])
    assert (status["store"]["state"], status["store"]["pending_files"]) == ("ok", 0)


# --- a directory as the store --------------------------------------------------------------------


@contextmanager
def renamed_away(store: Path) -> Iterator[str]:
    aside = store.with_name("aside")
    store.rename(aside)
    yield "unreachable"
    aside.rename(store)


@contextmanager
def read_only(store: Path) -> Iterator[str]:
    subprocess.run(["mount", "--bind", store, store], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", store], check=True)
        yield "ok"
    finally:
        subprocess.run(["umount", store], check=True)


@pytest.mark.parametrize("gone", [renamed_away, read_only])
def test_a_directory_store_that_is_gone_for_a_while(
    tmp_path: Path, gone: Callable[..., Any]
) -> None:
    with mounted(tmp_path, *OPTIONS) as mount:
        wanted = save(mount, 1)
        mount.sync()
        with gone(mount.store) as state:
            wanted |= save(mount, 2)
            (mount.path / "step-1" / "small-0").unlink()
            (mount.path / "step-1").rename(mount.path / "first")
            assert degraded(mount)["store"]["state"] == state
            for name, content in save(mount, 3).items():
                assert (mount.path / name).read_bytes() == content
                wanted[name] = content
        all_is_well(mount)
        del wanted["step-1/small-0"]
        wanted = {name.replace("step-1/", "first/"): wanted[name] for name in wanted}
        found = {
            str(path.relative_to(mount.store)): path.read_bytes()
            for path in mount.store.rglob("*")
            if path.is_file()
        }
        assert found == wanted


def test_an_fsync_without_a_second_copy_fails_in_time_and_the_data_is_stored_later(
    tmp_path: Path,
) -> None:
    with mounted(tmp_path, "--ram", "64M", "-o", "fsync_timeout=1") as mount:
        (mount.path / "started").write_bytes(b"")
        mount.sync()
        with renamed_away(mount.store), (mount.path / "model").open("wb", buffering=0) as file:
            file.write(b"x" * 100_000)
            with pytest.raises(OSError) as caught:  # noqa: PT011 - its errno is looked at
                os.fsync(file.fileno())
            assert caught.value.errno == errno.EIO
        all_is_well(mount)
        assert (mount.store / "model").read_bytes() == b"x" * 100_000


# --- S3 ------------------------------------------------------------------------------------------


@contextmanager
def mounted_behind_proxy(
    tmp_path: Path, server: S3Server, prefix: str
) -> Iterator[tuple[Mount, Proxy]]:
    with proxied(server.endpoint) as proxy:
        options = ("--store", f"s3://{server.bucket}/{prefix}", "-o", f"endpoint={proxy.endpoint}")
        with mounted(tmp_path, *OPTIONS, *options, environment=server.environment) as mount:
            try:
                yield mount, proxy
            finally:
                proxy.restore()


def stored(server: S3Server, prefix: str) -> dict[str, bytes]:
    client = server.client()
    return {
        key.removeprefix(f"{prefix}/"): client.get_object(Bucket=server.bucket, Key=key)[
            "Body"
        ].read()
        for key in server.keys(f"{prefix}/")
        if not key.endswith("/")
    }


@pytest.mark.parametrize("trouble", ["cut", "503", "500"])
def test_an_s3_server_in_trouble_for_a_while(
    tmp_path: Path, server: S3Server, trouble: str
) -> None:
    with mounted_behind_proxy(tmp_path, server, trouble) as (mount, proxy):
        wanted = save(mount, 1)
        mount.sync()
        if trouble == "cut":
            proxy.cut()
        else:
            proxy.answer(int(trouble))
        wanted |= save(mount, 2)
        status = degraded(mount)
        if trouble == "cut":
            assert status["store"]["state"] == "unreachable"
        else:
            assert proxy.answered > 0
        wanted |= save(mount, 3)
        proxy.restore()
        all_is_well(mount)
        assert stored(server, trouble) == wanted
        assert server.uploads(trouble) == []


def test_a_connection_cut_in_the_middle_of_an_upload(tmp_path: Path, server: S3Server) -> None:
    with mounted_behind_proxy(tmp_path, server, "middle") as (mount, proxy):
        proxy.bytes_per_s = 8 * MIB
        before = proxy.received_bytes
        wanted = save(mount, 1)
        wait_for(lambda: proxy.received_bytes > before + 6 * MIB, "the upload is under way")
        proxy.cut()
        degraded(mount)
        proxy.restore()
        all_is_well(mount)
        assert stored(server, "middle") == wanted
        assert server.uploads("middle") == []


def test_a_kill_in_the_middle_of_an_upload_leaves_no_part_of_it(
    tmp_path: Path, server: S3Server
) -> None:
    with mounted_behind_proxy(tmp_path, server, "killed") as (mount, proxy):
        proxy.bytes_per_s = 8 * MIB
        before = proxy.received_bytes
        wanted = save(mount, 1)
        wait_for(lambda: proxy.received_bytes > before + 6 * MIB, "the upload is under way")
        mount.kill()
        proxy.restore()
        mount.start()
        all_is_well(mount)
        assert stored(server, "killed") == wanted
        assert server.uploads("killed") == []
