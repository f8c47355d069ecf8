"""The workers: what they bring to the store, and what is left when something ends early."""

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from lmstorfs.digest import digest_bytes
from lmstorfs.errors import (
    ChangedInStoreError,
    CorruptCopyError,
    NotInStoreError,
    StoreError,
    SupersededError,
)
from lmstorfs.store import Attributes, StoreConfig, open_store
from lmstorfs.store.pool import Fetch, Upload, WorkerPool
from tests.s3servers import S3Server, rclone_s3

MIB = 1 << 20
SMALL = b"small"
LARGE = os.urandom(24 * MIB)  # above what counts as small, and several parts
PART_BYTES = 5 * MIB
TIMEOUT_S = 60  # for conditions that must come true; nothing here measures time


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with rclone_s3(tmp_path_factory.mktemp("rclone") / "data") as running:
        yield running


@pytest.fixture(params=["directory", "s3"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> StoreConfig:
    if request.param == "directory":
        (tmp_path / "store").mkdir()
        return StoreConfig(url=str(tmp_path / "store"))
    return s3_config(request.getfixturevalue("server"), tmp_path.name)


def s3_config(server: S3Server, prefix: str) -> StoreConfig:
    return StoreConfig(
        url=f"s3://{server.bucket}/{prefix}", endpoint=server.endpoint, part_bytes=PART_BYTES
    )


@asynccontextmanager
async def running_pool(config: StoreConfig, workers: int = 1) -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(config, workers)
    async with trio.open_nursery() as nursery:
        await nursery.start(pool.run)
        yield pool
        nursery.cancel_scope.cancel()


def run(test: Callable[[], Awaitable[Any]]) -> None:
    async def limited() -> None:
        with trio.fail_after(TIMEOUT_S):
            await test()

    trio.run(limited)


def version(path: Path, content: bytes, key: str = "dir/file", **changes: Any) -> Upload:
    """Write `content` to `path`, and return what brings it to the store."""
    path.write_bytes(content)
    values: dict[str, Any] = {
        "key": key,
        "source": str(path),
        "size": len(content),
        "attributes": Attributes(mode=stat.S_IFREG | 0o600, uid=0, gid=0, mtime_ns=10**18),
        "mtime_ns": path.stat().st_mtime_ns,
    }
    return Upload(**{**values, **changes})


@pytest.mark.parametrize("content", [b"", SMALL, LARGE], ids=["empty", "small", "large"])
def test_what_is_uploaded_can_be_fetched(
    config: StoreConfig, tmp_path: Path, content: bytes
) -> None:
    async def test() -> None:
        moved: list[int] = []
        target = tmp_path / "target"
        async with running_pool(config) as pool:
            upload = version(tmp_path / "source", content, "dir/stray\udcff")
            stored = await pool.upload(upload, on_moved=moved.append)
            assert stored.digest == digest_bytes(content)
            assert stored.info.key == upload.key
            assert sum(moved) == len(content)
            moved.clear()
            fetch = Fetch(
                key=upload.key,
                target=str(target),
                size=len(content),
                etag=stored.info.etag,
                digest=stored.digest,
            )
            assert (await pool.fetch(fetch, on_moved=moved.append)).digest == stored.digest
            assert sum(moved) == len(content)
            statistics = pool.statistics()
        assert target.read_bytes() == content
        assert stat.S_IMODE(target.stat().st_mode) == 0o600
        assert (statistics.bytes_uploaded, statistics.bytes_fetched) == (len(content),) * 2
        assert (statistics.busy, statistics.queued, statistics.restarts) == (0, 0, 0)

    run(test)


def test_a_digest_is_that_of_the_first_bytes(tmp_path: Path) -> None:
    async def test() -> None:
        source = tmp_path / "source"
        source.write_bytes(LARGE)
        async with running_pool(StoreConfig(url=str(tmp_path))) as pool:
            assert await pool.digest(str(source), len(LARGE)) == digest_bytes(LARGE)
            assert await pool.digest(str(source), 1000) == digest_bytes(LARGE[:1000])
            with pytest.raises(SupersededError):
                await pool.digest(str(source), len(LARGE) + 1)
            with pytest.raises(SupersededError):
                await pool.digest(str(tmp_path / "gone"), 1)

    run(test)


@pytest.mark.parametrize("content", [SMALL, LARGE], ids=["small", "large"])
def test_a_version_that_is_superseded_is_not_published(
    config: StoreConfig, tmp_path: Path, content: bytes
) -> None:
    source = tmp_path / "source"
    other = Attributes(mode=0o100600, uid=0, gid=0, mtime_ns=0, digest=digest_bytes(b"other"))
    cases = {
        "written again": version(source, content, mtime_ns=1),
        "truncated": version(source, content, size=len(content) + 1),
        "another digest": version(source, content, attributes=other),
        "another digest, verified": version(source, content, attributes=other, verify=True),
        "gone": version(source, content, source=str(tmp_path / "gone")),
    }

    async def test() -> None:
        async with running_pool(config) as pool:
            for upload in cases.values():
                now = source.stat().st_mtime_ns
                if upload.mtime_ns != 1:
                    upload = _replace(upload, mtime_ns=now)
                with pytest.raises(SupersededError):
                    await pool.upload(upload)
            fetch = Fetch(
                key="dir/file", target=str(tmp_path / "t"), size=1, etag=None, digest=None
            )
            with pytest.raises(NotInStoreError):
                await pool.fetch(fetch)

    run(test)


def _replace(upload: Upload, **changes: Any) -> Upload:
    return msgspec.structs.replace(upload, **changes)


def test_a_file_written_while_it_is_uploaded_is_not_published(
    server: S3Server, tmp_path: Path
) -> None:
    async def test() -> None:
        source = tmp_path / "source"
        upload = version(source, LARGE)

        def overwrite(key: str, upload_id: str) -> None:
            began.append(key)
            with source.open("r+b") as file:
                file.seek(len(LARGE) - 1)
                file.write(bytes([LARGE[-1] ^ 1]))

        began: list[str] = []
        config = msgspec.structs.replace(s3_config(server, tmp_path.name), connections=1)
        async with running_pool(config) as pool:
            with pytest.raises(SupersededError):
                await pool.upload(upload, on_began=overwrite)
        assert began == [upload.key]
        assert server.keys(tmp_path.name) == []
        assert server.uploads() == []

    run(test)


def test_a_file_touched_while_it_is_uploaded_is_not_published(
    server: S3Server, tmp_path: Path
) -> None:
    """The content that was sent is still the version's, but a newer version is on its way."""

    async def test() -> None:
        source = tmp_path / "source"
        upload = version(source, LARGE)
        config = msgspec.structs.replace(s3_config(server, tmp_path.name), connections=1)
        async with running_pool(config) as pool:
            with pytest.raises(SupersededError):
                await pool.upload(upload, on_began=lambda *_: os.utime(source, ns=(1, 1)))
        assert server.keys(tmp_path.name) == []
        assert server.uploads() == []

    run(test)


def test_a_corrupt_copy_is_not_delivered(config: StoreConfig, tmp_path: Path) -> None:
    async def test() -> None:
        target = tmp_path / "target"
        async with running_pool(config) as pool:
            stored = await pool.upload(version(tmp_path / "source", SMALL))
            for digest, etag, error in (
                (digest_bytes(b"other"), stored.info.etag, CorruptCopyError),
                (stored.digest, "another", ChangedInStoreError),
            ):
                fetch = Fetch(
                    key="dir/file", target=str(target), size=len(SMALL), etag=etag, digest=digest
                )
                with pytest.raises(error):
                    await pool.fetch(fetch)
                assert not target.exists()

    run(test)


def test_a_cancelled_upload_leaves_no_object_and_no_multipart_upload(
    server: S3Server, tmp_path: Path
) -> None:
    async def test() -> None:
        async with running_pool(s3_config(server, tmp_path.name)) as pool:
            pids = pool.pids()
            for _ in range(3):
                with trio.CancelScope() as scope:
                    await pool.upload(
                        version(tmp_path / "source", LARGE),
                        on_began=lambda key, upload_id: scope.cancel(),
                    )
                assert scope.cancelled_caught
                assert server.uploads() == []
                assert server.keys(tmp_path.name) == []
            assert pool.pids() == pids  # the worker listened: it was not killed
            assert pool.statistics().busy == 0
            await pool.upload(version(tmp_path / "source", SMALL))

    run(test)


def test_cancelling_the_pool_together_with_its_calls_leaves_nothing(
    server: S3Server, tmp_path: Path
) -> None:
    async def test() -> None:
        pool = WorkerPool(s3_config(server, tmp_path.name), 1)
        began = trio.Event()
        async with trio.open_nursery() as nursery:
            await nursery.start(pool.run)
            upload = version(tmp_path / "source", LARGE)
            call = partial(pool.upload, upload, on_began=lambda key, upload_id: began.set())
            nursery.start_soon(call)
            await began.wait()
            pids = pool.pids()
            nursery.cancel_scope.cancel()
        assert server.uploads() == []
        assert server.keys(tmp_path.name) == []
        assert [pid for pid in pids if alive(pid)] == []
        with pytest.raises(StoreError):
            await pool.digest(str(tmp_path / "source"), 1)

    run(test)


def test_a_worker_that_does_not_listen_is_replaced(server: S3Server, tmp_path: Path) -> None:
    async def test() -> None:
        async with running_pool(s3_config(server, tmp_path.name)) as pool:
            (pid,) = pool.pids()
            upload_ids: list[str] = []

            def began(key: str, upload_id: str) -> None:
                upload_ids.append(upload_id)
                os.kill(pid, signal.SIGSTOP)
                scope.cancel()

            with trio.CancelScope() as scope:
                await pool.upload(version(tmp_path / "source", LARGE), on_began=began)
            assert scope.cancelled_caught
            await pool.upload(version(tmp_path / "source", SMALL))
            assert pool.pids() != [pid]
            assert not alive(pid)
            assert pool.statistics().restarts == 1
            # what the killed one left behind can be cleaned up by its id
            assert len(upload_ids) == 1
            server.client().abort_multipart_upload(
                Bucket=server.bucket, Key=f"{tmp_path.name}/dir/file", UploadId=upload_ids[0]
            )

    run(test)


def test_a_worker_killed_in_an_upload_fails_the_call_and_is_replaced(
    server: S3Server, tmp_path: Path
) -> None:
    async def test() -> None:
        async with running_pool(s3_config(server, tmp_path.name)) as pool:
            (pid,) = pool.pids()
            upload = version(tmp_path / "source", LARGE)
            with pytest.raises(StoreError, match="died"):
                await pool.upload(upload, on_began=lambda *_: os.kill(pid, signal.SIGKILL))
            assert server.keys(tmp_path.name) == []
            stored = await pool.upload(upload)
            assert stored.digest == digest_bytes(LARGE)
            assert pool.statistics().restarts == 1
        for item in server.client().list_multipart_uploads(Bucket=server.bucket)["Uploads"]:
            server.client().abort_multipart_upload(
                Bucket=server.bucket, Key=item["Key"], UploadId=item["UploadId"]
            )

    run(test)


def test_many_small_files_share_few_workers(config: StoreConfig, tmp_path: Path) -> None:
    async def test() -> None:
        async with running_pool(config, workers=2) as pool, trio.open_nursery() as nursery:
            for number in range(100):
                source = tmp_path / f"source-{number}"
                upload = version(source, b"%d" % number, f"many/{number}")
                nursery.start_soon(pool.upload, upload)
        store = open_store(config)
        assert {info.key for info in store.list("many")} == {f"many/{n}" for n in range(100)}
        assert store.read("many/42", 0, 9) == b"42"

    run(test)


def test_a_small_upload_passes_a_large_one_that_is_stuck(server: S3Server, tmp_path: Path) -> None:
    async def test() -> None:
        async with running_pool(s3_config(server, tmp_path.name)) as pool:
            began = trio.Event()
            async with trio.open_nursery() as nursery:
                large = version(tmp_path / "large", LARGE, "large")
                call = partial(pool.upload, large, on_began=lambda *_: began.set())
                nursery.start_soon(call)
                await began.wait()
                assert pool.statistics().busy == 1
                await pool.upload(version(tmp_path / "small", SMALL, "small"))
        assert set(server.keys(tmp_path.name)) == {
            f"{tmp_path.name}/large",
            f"{tmp_path.name}/small",
        }

    run(test)


def test_a_worker_dies_with_its_parent_and_inherits_no_descriptor(tmp_path: Path) -> None:
    async def test() -> None:
        secret = os.open(tmp_path, os.O_RDONLY)
        os.set_inheritable(secret, True)
        try:
            async with running_pool(StoreConfig(url=str(tmp_path))) as pool:
                source = tmp_path / "source"
                source.write_bytes(SMALL)
                await pool.digest(str(source), len(SMALL))  # it runs
                (pid,) = pool.pids()
                assert str(tmp_path) not in open_files(pid)
        finally:
            os.close(secret)

    run(test)
    script = (
        "import sys, trio\n"
        "from lmstorfs.store import StoreConfig\n"
        "from lmstorfs.store.pool import WorkerPool\n"
        "async def main():\n"
        f"    pool = WorkerPool(StoreConfig(url={str(tmp_path)!r}), 1)\n"
        "    async with trio.open_nursery() as nursery:\n"
        "        await nursery.start(pool.run)\n"
        f"        await pool.digest({str(tmp_path / 'source')!r}, 5)\n"
        "        print(*pool.pids(), flush=True)\n"
        "        await trio.sleep_forever()\n"
        "trio.run(main)\n"
    )

    async def parent_dies() -> None:
        parent = await trio.lowlevel.open_process(
            [sys.executable, "-c", script], stdout=subprocess.PIPE
        )
        assert parent.stdout is not None
        line = b""
        pids: list[int] = []
        try:
            while not line.endswith(b"\n"):
                line += await parent.stdout.receive_some()
            pids = [int(word) for word in line.split()]
            assert len(pids) == 1
            # it has answered, so it has started; now it cannot even see its socket closed
            os.kill(pids[0], signal.SIGSTOP)
            parent.kill()
            await parent.wait()
            await trio.to_thread.run_sync(wait_for_end, pids[0])
        finally:
            for process in (parent.pid, *pids):
                if alive(process):
                    os.kill(process, signal.SIGKILL)

    run(parent_dies)


def open_files(pid: int) -> set[str]:
    return {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()}


def alive(pid: int) -> bool:
    """Whether the process runs; one that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
