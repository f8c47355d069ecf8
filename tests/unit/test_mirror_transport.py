"""The mirror's transport: messages are signed, content is exact."""

import hashlib
import os
import random
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lmstorfs.checkpoint.mirror.tcp import TcpConnection, connect, enlarge
from lmstorfs.checkpoint.mirror.transport import MESSAGE_MAX_BYTES
from lmstorfs.errors import PeerError, PeerProtocolError, PeerTimeoutError
from tests.peers import SECRET, echo, listening

MIB = 1 << 20
KEYS = (b"a" * 32, b"b" * 32)
HEADER_BYTES = 20  # u32 length, 16 bytes of signature


def sockets() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a TCP connection over loopback."""
    with socket.socket() as listening:
        enlarge(listening)
        listening.bind(("127.0.0.1", 0))
        listening.listen(1)
        near = socket.socket()
        enlarge(near)
        near.connect(listening.getsockname())
        far, _ = listening.accept()
    for end in (near, far):
        end.settimeout(None)
    return near, far


@pytest.fixture
def pair() -> Iterator[tuple[TcpConnection, TcpConnection]]:
    """Two connections that speak with each other."""
    near, far = sockets()
    ends = TcpConnection(near, KEYS, "far"), TcpConnection(far, KEYS[::-1], "near")
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, TcpConnection]]:
    """A connection whose other end is a socket that sends what it likes."""
    near, far = sockets()
    connection = TcpConnection(far, KEYS[::-1], "near")
    with near:
        yield near, connection
    connection.close()


def signed(message: bytes, number: int, key: bytes = KEYS[0]) -> bytes:
    """Return a frame by its description, not by the code: a change of the wire is seen."""
    body = number.to_bytes(8, "little") + message
    signature = hashlib.blake2b(body, key=key, digest_size=16).digest()
    return len(message).to_bytes(4, "little") + signature + message


# --- messages ------------------------------------------------------------------------------------


def test_messages_of_all_sizes_arrive_as_they_were_sent() -> None:
    sizes = [1, 19, 20, 21, 4096, 65_537, MIB + 1, MESSAGE_MAX_BYTES]
    with listening(echo) as (host, port):
        connection = connect(host, port, SECRET)
        for size in sizes:
            message = random.Random(size).randbytes(size)
            with ThreadPoolExecutor(1) as pool:  # an echo of 16 MiB needs somebody who reads
                answer = pool.submit(connection.receive)
                connection.send(message)
                assert answer.result(20) == message
        connection.close()


def test_an_empty_or_a_huge_message_is_not_sent(
    pair: tuple[TcpConnection, TcpConnection],
) -> None:
    near, far = pair
    for size in (0, MESSAGE_MAX_BYTES + 1):
        with pytest.raises(PeerProtocolError, match=f"a message of {size} bytes"):
            near.send(bytes(size))
    near.send(b"still in step")
    assert far.receive() == b"still in step"


@pytest.mark.parametrize("size", [0, MESSAGE_MAX_BYTES + 1, 0xFFFFFFFF])
def test_a_length_that_cannot_be_is_refused_before_more_comes(
    raw: tuple[socket.socket, TcpConnection], size: int
) -> None:
    near, connection = raw
    near.sendall(struct.pack("<I", size) + bytes(16))
    with pytest.raises(PeerProtocolError, match=f"a message of {size} bytes"):
        connection.receive()
    assert near.recv(1) == b""


def spoilt(frame: bytes, at: int) -> bytes:
    return frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]


@pytest.mark.parametrize(
    "frame",
    [
        spoilt(signed(b"hello", 1), 4),  # the signature
        spoilt(signed(b"hello", 1), HEADER_BYTES),  # the message
        signed(b"hello", 0),  # replayed, or out of order
        signed(b"hello", 2),  # one before it is missing
        signed(b"hello", 1, KEYS[1]),  # the other direction's: sent back
    ],
    ids=["signature", "message", "replayed", "skipped", "reflected"],
)
def test_a_frame_that_nobody_signed_for_here_ends_the_connection(
    raw: tuple[socket.socket, TcpConnection], frame: bytes
) -> None:
    near, connection = raw
    near.sendall(signed(b"good", 0))
    assert connection.receive() == b"good"
    near.sendall(frame)
    with pytest.raises(PeerProtocolError, match="a message with a wrong signature"):
        connection.receive()
    assert near.recv(1) == b""


@pytest.mark.parametrize("kept", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 4])
def test_a_frame_that_is_cut_off_is_no_message(
    raw: tuple[socket.socket, TcpConnection], kept: int
) -> None:
    near, connection = raw
    near.sendall(signed(b"hello", 0)[:kept])
    near.shutdown(socket.SHUT_WR)
    with pytest.raises(PeerError, match="the connection ended"):
        connection.receive()


def test_a_peer_that_says_nothing_is_waited_for_as_long_as_told(
    pair: tuple[TcpConnection, TcpConnection],
) -> None:
    near, _ = pair
    near.idle_s = 0.05
    began = time.monotonic()
    with pytest.raises(PeerTimeoutError, match="said nothing for too long"):
        near.receive()
    assert 0.04 < time.monotonic() - began < 5


def test_close_wakes_the_thread_that_waits(pair: tuple[TcpConnection, TcpConnection]) -> None:
    near, _ = pair
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(near.receive)
        near.close()
        with pytest.raises(PeerError):
            waiting.result(10)
    near.close()  # once more harms nobody
    with pytest.raises(PeerError):
        near.send(b"too late")


# --- content -------------------------------------------------------------------------------------


def sha(path: Path, offset: int, count: int) -> str:
    with path.open("rb") as file:
        file.seek(offset)
        return hashlib.sha256(file.read(count)).hexdigest()


def move(
    ends: tuple[TcpConnection, TcpConnection], files: tuple[Path, Path], offset: int, count: int
) -> None:
    """Send a range of one file into another by `ends`."""
    source = os.open(files[0], os.O_RDONLY)
    target = os.open(files[1], os.O_RDWR | os.O_CREAT)
    try:
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(ends[0].send_file, source, offset, count)
            ends[1].receive_file(target, offset, count)
            sending.result(20)
    finally:
        os.close(source)
        os.close(target)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "file"
    path.write_bytes(random.Random(7).randbytes(48 * MIB + 17))
    return path


@pytest.mark.parametrize(
    ("offset", "count"),
    [
        (0, 0),
        (0, 1),
        (4095, 2),
        (4096, 4096),
        (1, 16 * MIB),
        (16 * MIB - 1, 2),
        (0, 40 * MIB),
        (12_345, 40 * MIB + 4_321),
        (8 * MIB, 40 * MIB + 17),
    ],
)
def test_content_arrives_whole_and_nothing_beside_it_is_touched(
    pair: tuple[TcpConnection, TcpConnection],
    source: Path,
    tmp_path: Path,
    offset: int,
    count: int,
) -> None:
    near, far = pair
    target = tmp_path / "target"
    target.write_bytes(b"x" * (offset + 3))  # shorter than what comes, or a little longer
    near.send(b"before")
    assert far.receive() == b"before"
    move(pair, (source, target), offset, count)
    assert target.stat().st_size == max(offset + count, offset + 3)
    assert sha(target, offset, count) == sha(source, offset, count)
    assert sha(target, 0, offset) == hashlib.sha256(b"x" * offset).hexdigest()
    assert target.read_bytes()[offset + count :] == b"x" * max(0, 3 - count)
    near.send(b"behind")
    assert far.receive() == b"behind"


def test_a_longer_file_keeps_what_follows(
    pair: tuple[TcpConnection, TcpConnection], source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"x" * 10_000)
    move(pair, (source, target), 100, 5_000)
    expected = b"x" * 100 + source.read_bytes()[100:5_100] + b"x" * 4_900
    assert target.read_bytes() == expected


def test_a_file_that_is_truncated_while_it_is_sent_ends_the_connection(
    pair: tuple[TcpConnection, TcpConnection], source: Path, tmp_path: Path
) -> None:
    near, far = pair
    path = tmp_path / "shrinking"
    path.write_bytes(source.read_bytes()[: 48 * MIB])  # more than both ends' buffers hold
    reading = os.open(path, os.O_RDONLY)
    target = os.open(tmp_path / "target", os.O_RDWR | os.O_CREAT)
    try:
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(near.send_file, reading, 0, 48 * MIB)
            far.receive_file(target, 0, MIB)
            os.truncate(path, MIB)
            with pytest.raises(PeerError):
                far.receive_file(target, MIB, 47 * MIB)
            with pytest.raises(EOFError, match="became shorter"):
                sending.result(20)
    finally:
        os.close(reading)
        os.close(target)
    with pytest.raises(PeerError):
        near.send(b"nothing may follow what is missing")
