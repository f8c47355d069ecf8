"""Names, metadata and frames survive every round trip, whatever bytes they hold."""

import os
import stat
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmstorfs.errors import StoreDeniedError, StoreError, UsageError
from lmstorfs.store import Attributes, Kind, ObjectInfo, StoreConfig, open_store, wire
from lmstorfs.store.directory import DirectoryStore
from lmstorfs.store.keys import own_name, quote_name, split_key, unquote_name
from lmstorfs.store.s3_metadata import MAX_METADATA_BYTES, read_info, write_metadata
from lmstorfs.store.s3_transfer import MAX_PARTS, MIN_PART_BYTES, part_size

names = st.binary(min_size=1, max_size=60).map(os.fsdecode)
names |= st.text(st.sampled_from("a\u201b0FC3\udcc3\udca9\udcff"), min_size=1).map(
    lambda text: os.fsdecode(os.fsencode(text))
)
times = st.integers(-(2**62), 2**62)
attributes = st.builds(
    Attributes,
    mode=st.integers(0, 0o7777).map(lambda bits: bits | stat.S_IFREG),
    uid=st.integers(0, 2**32 - 2),
    gid=st.integers(0, 2**32 - 2),
    mtime_ns=times,
    digest=st.none() | st.binary(min_size=16, max_size=16).map(bytes.hex),
    version=st.none() | st.integers(0, 2**53),
    xattrs=st.dictionaries(names.map("user.".__add__), st.binary(max_size=40), max_size=4),
)


def head(metadata: dict[str, str], **changes: Any) -> dict[str, Any]:
    return {
        "Metadata": metadata,
        "ContentLength": 3,
        "ETag": '"abc"',
        "LastModified": datetime(2026, 1, 2, tzinfo=UTC),
        **changes,
    }


@given(names)
def test_a_quoted_name_is_unicode_and_unquotes_to_itself(name: str) -> None:
    quoted = quote_name(name)
    quoted.encode("utf-8")
    assert unquote_name(quoted) == name
    assert own_name(quoted) == name


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_a_foreign_name_is_either_reachable_or_not_shown(text: str) -> None:
    name = own_name(text)
    assert name is None or quote_name(name) == text


def test_names_are_quoted_as_rclone_quotes_them() -> None:
    assert quote_name(os.fsdecode(b"a\xffb")) == "a\u201bFFb"
    assert quote_name("\u201b") == "\u201b\u201b"
    assert own_name("\u201bC3\u201bA9") is None  # would be the name é, which is another object


@given(attributes, st.sampled_from([str, str.title]))
def test_attributes_survive_as_metadata_whatever_case_the_server_makes(
    given_attributes: Attributes, change_case: Any
) -> None:
    metadata = write_metadata(given_attributes, Kind.FILE)
    for name, value in metadata.items():
        (name + value).encode("ascii")
    info = read_info("key", head({change_case(name): v for name, v in metadata.items()}))
    assert info.attributes is not None
    kept = info.attributes.xattrs
    if sum(map(len, given_attributes.xattrs.values())) < 100:
        assert info.attributes == given_attributes
    else:
        assert kept.items() <= given_attributes.xattrs.items()


def test_an_xattr_that_s3_has_no_room_for_is_left_out_and_the_others_stay(
    caplog: pytest.LogCaptureFixture,
) -> None:
    xattrs = {"user.big": b"x" * 5000, "user.small": b"y"}
    given_attributes = Attributes(mode=0o100644, uid=0, gid=0, mtime_ns=0, xattrs=xattrs)
    metadata = write_metadata(given_attributes, Kind.FILE)
    assert sum(map(len, [*metadata, *metadata.values()])) <= MAX_METADATA_BYTES
    info = read_info("key", head(metadata))
    assert info.attributes is not None
    assert info.attributes.xattrs == {"user.small": b"y"}
    assert "user.big" in caplog.text


@given(st.integers(0, 0o7777), st.sampled_from([stat.S_IFREG, stat.S_IFDIR]))
def test_a_mode_is_read_in_decimal_and_in_octal(bits: int, kind: int) -> None:
    for text in (str(kind | bits), f"{kind | bits:o}", f"0{kind | bits:o}"):
        info = read_info("key", head({"mode": text}))
        assert info.attributes is not None
        assert info.attributes.mode == kind | bits, text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1700000000.123456789", 1_700_000_000_123_456_789),
        ("1700000000", 1_700_000_000_000_000_000),
        ("1700000000.5", 1_700_000_000_500_000_000),
        ("-1.000000001", -1_000_000_001),
        ("2023-11-14T22:13:20.123456789Z", 1_700_000_000_123_456_789),
        ("2023-11-14T23:13:20+01:00", 1_700_000_000_000_000_000),
        ("nonsense", int(datetime(2026, 1, 2, tzinfo=UTC).timestamp()) * 10**9),
        ("", int(datetime(2026, 1, 2, tzinfo=UTC).timestamp()) * 10**9),
    ],
)
def test_a_time_is_read_from_whatever_wrote_it(text: str, expected: int) -> None:
    info = read_info("key", head({"mtime": text}))
    assert info.attributes is not None
    assert info.attributes.mtime_ns == expected


def test_an_object_of_another_tool_has_defaults() -> None:
    info = read_info("key", head({}))
    assert (info.kind, info.size, info.etag) == (Kind.FILE, 3, "abc")
    assert info.attributes is not None
    assert info.attributes.mode == 0o100644
    assert (info.attributes.uid, info.attributes.digest) == (os.getuid(), None)
    marker = read_info("key", head({}, ContentType="application/x-directory", ContentLength=0))
    assert marker.kind is Kind.DIRECTORY
    assert marker.attributes is not None
    assert marker.attributes.mode == 0o40755
    assert read_info("key", head({"mode": "41471"})).kind is Kind.SYMLINK
    assert read_info("key", head({"mode": "120777"})).kind is Kind.SYMLINK


@pytest.mark.parametrize(
    "text", ["{", "%7B%22user.a%22%3A1%7D", "%5B%5D", "%7B%22user.a%22%3A%22*%22%7D"]
)
def test_xattrs_in_no_known_form_do_not_make_an_object_unreadable(text: str) -> None:
    info = read_info("key", head({"xattr": text}))
    assert info.attributes is not None
    assert info.attributes.xattrs == {}


@given(attributes, names, st.integers(0, 2**62))
def test_frames_carry_any_name_and_all_attributes(
    given_attributes: Attributes, name: str, size: int
) -> None:
    upload = wire.Upload(
        key=name, source=name, size=size, attributes=given_attributes, mtime_ns=size
    )
    call = wire.Call(7, upload)
    assert wire.decode_to_worker(wire.encode(call)[wire.LENGTH_BYTES :]) == call
    info = ObjectInfo(
        key=name, kind=Kind.FILE, size=size, etag=name, mtime_ns=1, attributes=given_attributes
    )
    done = wire.Done(7, wire.Uploaded(info=info, digest="d"))
    assert wire.decode_from_worker(wire.encode(done)[wire.LENGTH_BYTES :]) == done


def test_errors_keep_kind_and_message_on_the_wire() -> None:
    error = wire.error_of(wire.Failed(1, "StoreDeniedError", "no"))
    assert type(error) is StoreDeniedError
    assert str(error) == "no"
    assert type(wire.error_of(wire.Failed(1, "os.system", "x"))) is StoreError


@given(st.integers(1, 5 << 40), st.integers(1, 1 << 30))
def test_an_upload_never_has_too_many_or_too_small_parts(size: int, wanted: int) -> None:
    part = part_size(size, wanted)
    assert part >= max(wanted, MIN_PART_BYTES)
    assert -(-size // part) <= MAX_PARTS


@pytest.mark.parametrize(
    "url", ["relative/path", "", "s3:/bucket", "s3://", "ftp://x", "file://host/x"]
)
def test_a_url_that_names_no_store_is_refused_with_what_works(url: str) -> None:
    with pytest.raises(UsageError, match="s3://BUCKET/PREFIX"):
        open_store(StoreConfig(url=url))


@pytest.mark.parametrize("url", ["/a b/c", "file:///a%20b/c"])
def test_a_path_is_a_directory_store(url: str) -> None:
    store = open_store(StoreConfig(url=url))
    assert isinstance(store, DirectoryStore)
    assert store.url == "/a b/c"


@pytest.mark.parametrize("key", ["a", "a/b", "...", "a/..b", "\udcff"])
def test_ordinary_keys_are_keys(key: str) -> None:
    assert split_key(key) == key.split("/")


def test_a_configuration_travels_whole() -> None:
    start = wire.Start(
        StoreConfig(url="/x\udcff", endpoint="http://h", part_bytes=1, connections=2)
    )
    assert wire.decode_to_worker(wire.encode(start)[wire.LENGTH_BYTES :]) == start
    assert msgspec.structs.asdict(start.config)["url"] == "/x\udcff"
