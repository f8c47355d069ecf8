"""The mirror's addresses, secrets and handshake: nobody is believed before the proof."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lmstorfs.checkpoint.mirror import handshake
from lmstorfs.checkpoint.mirror.handshake import MAGIC, NONCE_BYTES, read_secret
from lmstorfs.checkpoint.mirror.listener import Listener
from lmstorfs.checkpoint.mirror.tcp import TcpConnection, connect, exactly
from lmstorfs.checkpoint.mirror.transport import is_loopback, parse_address
from lmstorfs.errors import (
    PeerError,
    PeerProtocolError,
    PeerRefusedError,
    PeerTimeoutError,
    SetupError,
    UsageError,
)
from tests.peers import SECRET, echo, listening


@contextlib.contextmanager
def false_mirror(answer: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    """Somebody who listens and is no mirror; `answer` gets the one connection it takes."""
    with socket.socket() as server, ThreadPoolExecutor(1) as pool:
        server.bind(("127.0.0.1", 0))
        server.listen(1)

        def serve() -> None:
            taken, _ = server.accept()
            with taken:
                answer(taken)

        served = pool.submit(serve)
        yield server.getsockname()
        served.result(10)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("node2:7070", ("node2", 7070)),
        ("10.0.0.2:0", ("10.0.0.2", 0)),
        ("[::1]:7070", ("::1", 7070)),
        ("[fe80::1%eth0]:65535", ("fe80::1%eth0", 65535)),
    ],
)
def test_an_address_is_host_and_port(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text", ["", "node2", "7070", ":7070", "node2:", "node2:x", "node2:65536", "::1:7070", "a:-1"]
)
def test_what_is_no_address_is_told_of_with_an_example(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_address(text)
    assert str(caught.value) == f"'{text}' is not HOST:PORT; write for example node2:7070"


def test_loopback_is_what_no_other_machine_reaches() -> None:
    assert [is_loopback(host) for host in ("localhost", "127.0.0.1", "127.3.2.1", "::1")] == [
        True
    ] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "node2", "")] == [False] * 5


def test_a_secret_is_what_stands_in_the_file_without_the_line_end(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b" 0123456789abcdef \r\n\n")
    path.chmod(0o600)
    assert read_secret(path) == b" 0123456789abcdef"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o666])
def test_a_secret_file_that_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    path.chmod(mode)
    with pytest.raises(SetupError, match=f"run: chmod 600 {path}"):
        read_secret(path)


@pytest.mark.parametrize("content", [b"", b"\n", b"fifteen bytes..", b"fifteen bytes..\n\n\n"])
def test_a_short_secret_is_refused_with_how_to_make_one(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(SetupError, match=r"shorter than 16 bytes; make one: \(umask 077; "):
        read_secret(path)


def test_a_secret_file_that_is_missing_or_none_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="cannot be read: No such file"):
        read_secret(tmp_path / "absent")
    os.mkfifo(tmp_path / "fifo", 0o600)
    for path in (tmp_path, tmp_path / "fifo"):
        with pytest.raises(SetupError, match=r"is no file|Is a directory"):
            read_secret(path)


@pytest.mark.parametrize("secret", [SECRET, None])
def test_both_ends_with_one_secret_speak(secret: bytes | None) -> None:
    with listening(echo, secret) as (host, port):
        connection = connect(host, port, secret or b"")
        connection.send(b"hello")
        assert connection.receive() == b"hello"
        assert connection.peer == f"{host}:{port}"
        connection.close()


@pytest.mark.parametrize("wrong", [b"", b"another secret, just as long", SECRET + b"\n"])
def test_a_client_with_another_secret_is_refused(wrong: bytes) -> None:
    handled: list[str] = []
    with (
        listening(lambda connection: handled.append(connection.peer)) as (host, port),
        pytest.raises(PeerRefusedError, match="both nodes need the same secret"),
    ):
        connect(host, port, wrong)
    assert handled == []


def test_a_mirror_that_does_not_know_the_secret_is_found_out() -> None:
    sent: list[bytes] = []

    def answer(taken: socket.socket) -> None:
        taken.sendall(MAGIC + os.urandom(NONCE_BYTES))
        sent.append(exactly(taken, len(MAGIC) + NONCE_BYTES + 32))
        taken.sendall(os.urandom(32))
        sent.append(taken.recv(1))

    with (
        false_mirror(answer) as (host, port),
        pytest.raises(PeerRefusedError, match="does not know the secret"),
    ):
        connect(host, port, SECRET)
    assert sent[1] == b""  # and it was told nothing


def test_a_mirror_that_sends_the_clients_own_proof_back_is_found_out() -> None:
    def answer(taken: socket.socket) -> None:
        taken.sendall(MAGIC + os.urandom(NONCE_BYTES))
        taken.sendall(exactly(taken, len(MAGIC) + NONCE_BYTES + 32)[-32:])

    with (
        false_mirror(answer) as (host, port),
        pytest.raises(PeerRefusedError, match="does not know the secret"),
    ):
        connect(host, port, SECRET)


def test_a_recorded_handshake_is_worthless() -> None:
    handled: list[str] = []
    recorded = bytearray()
    greeted = threading.Event()

    def handle(connection: TcpConnection) -> None:
        handled.append(connection.peer)
        greeted.set()

    with listening(handle) as address:
        with socket.create_connection(address, 10) as good:

            def send(data: bytes) -> None:
                recorded.extend(data)
                good.sendall(data)

            handshake.prove_as_origin(SECRET, send, lambda count: exactly(good, count))
            assert greeted.wait(10)
        with socket.create_connection(address, 10) as replay:
            exactly(replay, len(MAGIC) + NONCE_BYTES)
            replay.sendall(recorded)
            assert replay.recv(1) == b""
    assert len(handled) == 1


@pytest.mark.parametrize(
    ("greeting", "reason"),
    [
        (MAGIC[:-1] + b"\x02", "another version of the protocol; upgrade the older node"),
        (b"HTTP/1.1", "does not speak this protocol"),
    ],
)
def test_who_speaks_something_else_is_told_of(greeting: bytes, reason: str) -> None:
    with (
        false_mirror(lambda taken: taken.sendall(greeting + os.urandom(NONCE_BYTES))) as address,
        pytest.raises(PeerProtocolError, match=reason),
    ):
        connect(*address, SECRET)


def test_a_mirror_that_is_not_there_or_says_nothing_is_told_of() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound and not listening: the port is nobody else's
        host, port = nobody.getsockname()
        with pytest.raises(PeerError, match=f"{host}:{port}: Connection refused"):
            connect(host, port, SECRET)
    released = threading.Event()

    def say_nothing(_: socket.socket) -> None:
        released.wait(10)

    with false_mirror(say_nothing) as (host, port):
        with pytest.raises(PeerTimeoutError, match=f"{host}:{port} does not answer the handshake"):
            connect(host, port, SECRET, timeout_s=0.2)
        released.set()


def test_a_mirror_that_drips_is_given_up_at_the_deadline() -> None:
    greeting = MAGIC + bytes(NONCE_BYTES)
    sent = bytearray()

    def slowly(taken: socket.socket) -> None:
        taken.settimeout(0.05)  # between two bytes
        for byte in greeting:
            try:
                taken.sendall(bytes([byte]))
                sent.append(byte)
                if taken.recv(1) == b"":
                    return
            except TimeoutError:
                continue
            except ConnectionError:  # it went while a byte was on its way
                return

    # Whoever waits for each byte anew gets all of them, and fails by what they say.
    with (
        false_mirror(slowly) as (host, port),
        pytest.raises(PeerTimeoutError, match="does not answer the handshake"),
    ):
        connect(host, port, SECRET, timeout_s=0.2)
    assert 0 < len(sent) < len(greeting)


# --- who may listen ------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_nobody_listens_to_other_machines_without_a_secret(host: str) -> None:
    with pytest.raises(SetupError, match=f"--listen {host}:7070 needs --secret-file FILE"):
        Listener(host, 7070, None)


def test_an_address_that_is_taken_or_not_here_is_told_of() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        _, port = taken.getsockname()
        with pytest.raises(SetupError, match=f"127.0.0.1:{port} cannot be bound: Address already"):
            Listener("127.0.0.1", port, None)
    with pytest.raises(SetupError, match=r"192\.0\.2\.1:0 cannot be bound: Cannot assign"):
        Listener("192.0.2.1", 0, SECRET)
