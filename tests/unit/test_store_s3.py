"""How S3 fails, and what a person is told then."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lmstorfs.errors import (
    NotInStoreError,
    SetupError,
    StoreDeniedError,
    StoreError,
    StoreUnreachableError,
)
from lmstorfs.store import Attributes, Kind, Store, StoreConfig, open_store, s3_moves
from tests.s3servers import S3Server, free_port, rclone_s3, weed_s3

KEYS = ("lmstorfs-id", "lmstorfs-secret-word")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with rclone_s3(tmp_path_factory.mktemp("rclone") / "data", keys=KEYS) as running:
        yield running


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)


def use_keys(monkeypatch: pytest.MonkeyPatch, access: str, secret: str) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", access)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)


def opened(server: S3Server, bucket: str | None = None) -> Store:
    url = f"s3://{bucket or server.bucket}/run"
    return open_store(StoreConfig(url=url, endpoint=server.endpoint))


def test_with_the_right_keys_it_works(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use_keys(monkeypatch, *KEYS)
    opened(server).probe(write=True)
    assert server.keys() == []


@pytest.mark.parametrize("access", [KEYS[0], "unknown"])
def test_wrong_keys_are_told_without_being_repeated(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, access: str
) -> None:
    use_keys(monkeypatch, access, "a-wrong-secret")
    store = opened(server)
    with pytest.raises(SetupError, match="AWS_ACCESS_KEY_ID") as setup:
        store.probe(write=True)
    with pytest.raises(StoreDeniedError) as denied:
        store.read("file", 0, 1)
    for error in (setup.value, denied.value):
        assert "\n" not in str(error)
        assert "a-wrong-secret" not in str(error)
        assert KEYS[1] not in str(error)


def test_no_keys_at_a_server_that_wants_some(server: S3Server) -> None:
    with pytest.raises(SetupError, match="AWS_ACCESS_KEY_ID"):
        opened(server).probe(write=False)


def test_a_bucket_that_is_missing(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use_keys(monkeypatch, *KEYS)
    with pytest.raises(SetupError, match="bucket 'missing' does not exist at http://127"):
        opened(server, "missing").probe(write=True)


def test_a_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = f"http://name:password@127.0.0.1:{free_port()}"
    store = open_store(StoreConfig(url="s3://bucket", endpoint=endpoint))
    with pytest.raises(SetupError, match="no S3 server answers") as setup:
        store.probe(write=True)
    assert "password" not in str(setup.value)
    attributes = Attributes(mode=0o120777, uid=0, gid=0, mtime_ns=0)
    for call in (
        lambda: store.head("file"),
        lambda: list(store.list("")),
        lambda: store.read("file", 0, 1),
        lambda: store.delete(["a", "b"]),
        lambda: store.put_symlink("link", "target", attributes),
        lambda: store.rename("a", "b", Kind.DIRECTORY),
    ):
        with pytest.raises(StoreUnreachableError) as error:
            call()
        assert "password" not in str(error.value)


def test_a_server_that_comes_back_is_used_again(tmp_path: Path) -> None:
    port = free_port()
    config = StoreConfig(url="s3://ckpt/run", endpoint=f"http://127.0.0.1:{port}")
    store = open_store(config)
    with rclone_s3(tmp_path / "data", port=port):
        store.probe(write=True)
    with pytest.raises(StoreUnreachableError):
        store.head("file")
    with rclone_s3(tmp_path / "data", port=port), pytest.raises(NotInStoreError):
        store.head("file")


def test_a_removed_directory_is_never_a_file_of_that_name(tmp_path: Path) -> None:
    """A server on a filesystem takes `name/` for `name`."""
    with rclone_s3(tmp_path / "data") as server:
        assert server.folder is not None
        (server.folder / "name").write_bytes(b"a file")
        store = open_store(StoreConfig(url=f"s3://{server.bucket}", endpoint=server.endpoint))
        store.remove_directory("name")
        store.put_directory("made", Attributes(mode=0o40755, uid=0, gid=0, mtime_ns=0))
        assert [path.name for path in server.folder.iterdir()] == ["name"]


def test_a_large_object_is_copied_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weed: S3Server
) -> None:
    """With the limits of a small object, as five gigabytes are too much for a test."""
    monkeypatch.setattr(s3_moves, "MAX_COPY_BYTES", 1)
    monkeypatch.setattr(s3_moves, "_COPY_PART_BYTES", 5 << 20)
    for name, value in weed.environment.items():
        monkeypatch.setenv(name, value)
    content = bytes(range(256)) * (11 << 12)
    metadata = {"mode": "33188", "lmstorfs-version": "3"}
    weed.client().put_object(Bucket=weed.bucket, Key="old", Body=content, Metadata=metadata)
    store = open_store(StoreConfig(url=f"s3://{weed.bucket}", endpoint=weed.endpoint))
    store.rename("old", "new", Kind.FILE)
    assert store.read("new", 0, len(content)) == content
    attributes = store.head("new").attributes
    assert attributes is not None
    assert attributes.version == 3
    assert weed.keys() == ["new"]
    assert weed.uploads() == []


@pytest.fixture(scope="module")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with weed_s3(tmp_path_factory.mktemp("weed")) as running:
        yield running


def test_a_key_that_is_too_long_is_no_mystery(server: S3Server) -> None:
    with pytest.raises(StoreError, match=r"the key has \d+ bytes, S3 takes 1024"):
        opened(server).head("x" * 1100)
