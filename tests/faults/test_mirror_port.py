"""The mirror's port is open to anybody: rubbish, silence and crowds cost little, stop nothing."""

import contextlib
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from lmstorfs.checkpoint.mirror.handshake import MAGIC, NONCE_BYTES, prove_as_origin
from lmstorfs.checkpoint.mirror.listener import PEERS_MAX, STRANGERS_MAX, Listener
from lmstorfs.checkpoint.mirror.tcp import TcpConnection, connect, exactly
from lmstorfs.checkpoint.mirror.transport import parse_address
from lmstorfs.errors import PeerError
from tests.mounting import wait_for
from tests.peers import SECRET, echo, listening

ATTEMPTS = 10_000
GROWTH_MAX_BYTES = 6 << 20
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
DEADLINE_S = 0.3

SERVER = """
import sys
from lmstorfs.checkpoint.mirror.listener import Listener
from tests.peers import SECRET, echo
listener = Listener("127.0.0.1", 0, SECRET)
print(listener.address, flush=True)
listener.serve(echo)
"""


class Process:
    """A listener in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]", address: tuple[str, int]) -> None:
        self.address = address
        self._proc = Path(f"/proc/{process.pid}")

    def resident_bytes(self) -> int:
        return int((self._proc / "statm").read_text().split()[1]) * 4096

    def threads(self) -> int:
        return len(list((self._proc / "task").iterdir()))

    def files(self) -> int:
        return len(list((self._proc / "fd").iterdir()))


@pytest.fixture
def process() -> Iterator[Process]:
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], cwd=root, stdout=subprocess.PIPE, text=True
    ) as running:
        try:
            assert running.stdout is not None
            yield Process(running, parse_address(running.stdout.readline().strip()))
        finally:
            running.kill()


def rubbish(seeded: random.Random) -> bytes:
    """Return bytes that go wrong early, late, or after what looks like a good beginning."""
    data = seeded.randbytes(seeded.choice([0, 1, 7, 8, 40, 71, 103, 104, 105, 500, 5_000]))
    return seeded.choice([data, MAGIC + data, MAGIC[:-1] + data])


def throw(address: tuple[str, int], data: bytes) -> None:
    """Send `data` and wait until the other end has had enough of it."""
    with socket.create_connection(address, 10) as knocking, contextlib.suppress(OSError):
        knocking.sendall(data)  # reset, or not connected any more, as soon as it is dropped
        knocking.shutdown(socket.SHUT_WR)
        while knocking.recv(4096):
            pass


def assert_good_clients_are_served(address: tuple[str, int]) -> None:
    connection = connect(*address, SECRET)
    connection.send(b"hello")
    assert connection.receive() == b"hello"
    connection.close()


def test_ten_thousand_pieces_of_rubbish_leave_nothing_behind(process: Process) -> None:
    seeded = random.Random(20)
    for _ in range(500):  # the allocator's arenas and the import of what errors need
        throw(process.address, rubbish(seeded))
    assert_good_clients_are_served(process.address)
    before = process.resident_bytes()
    began = time.monotonic()
    for _ in range(ATTEMPTS):
        throw(process.address, rubbish(seeded))
    assert time.monotonic() - began < 30
    assert_good_clients_are_served(process.address)
    wait_for(lambda: process.threads() == 1, "its threads to end")
    assert process.resident_bytes() - before < GROWTH_MAX_BYTES
    assert process.files() == 4  # the three standard ones, and the one it listens at


def silent(address: tuple[str, int]) -> socket.socket:
    """Return a connection that was greeted and says nothing."""
    knocking = socket.create_connection(address, 10)
    exactly(knocking, GREETING_BYTES)
    return knocking


def test_who_says_nothing_is_let_go_at_the_deadline() -> None:
    with listening(echo, handshake_s=DEADLINE_S) as address:
        began = time.monotonic()
        with silent(address) as knocking:
            assert knocking.recv(1) == b""
        assert DEADLINE_S * 0.9 < time.monotonic() - began < DEADLINE_S + 2


def test_who_speaks_drop_by_drop_is_let_go_at_the_same_deadline() -> None:
    with listening(echo, handshake_s=DEADLINE_S) as address:
        began = time.monotonic()
        with silent(address) as knocking, contextlib.suppress(ConnectionError):
            knocking.settimeout(0.02)
            while time.monotonic() - began < 10:
                knocking.sendall(MAGIC[:1])
                with contextlib.suppress(TimeoutError):
                    assert knocking.recv(1) == b""
                    break
        assert DEADLINE_S * 0.9 < time.monotonic() - began < DEADLINE_S + 2


def test_a_crowd_of_strangers_is_kept_small_and_passes() -> None:
    with contextlib.ExitStack() as stack, listening(echo, handshake_s=2.0) as address:
        for _ in range(STRANGERS_MAX):
            stack.enter_context(silent(address))
        for _ in range(3):  # one more is let go at once, without a word
            with socket.create_connection(address, 1.0) as late:
                assert late.recv(1) == b""
        with pytest.raises(PeerError):
            connect(*address, SECRET)
        wait_for(lambda: served(address), "the strangers' deadline")


def served(address: tuple[str, int]) -> bool:
    try:
        assert_good_clients_are_served(address)
    except PeerError:
        return False
    return True


def test_no_more_peers_than_allowed_come_in_even_all_at_once() -> None:
    inside, leave = threading.Semaphore(0), threading.Event()

    def handle(connection: TcpConnection) -> None:
        inside.release()
        leave.wait(30)

    with contextlib.ExitStack() as stack, listening(handle) as address:
        stack.callback(leave.set)
        peers = [connect(*address, SECRET) for _ in range(PEERS_MAX - 1)]
        crowd = [
            stack.enter_context(socket.create_connection(address, 10)) for _ in range(STRANGERS_MAX)
        ]
        greetings = {knocking: exactly(knocking, GREETING_BYTES) for knocking in crowd}
        for knocking in crowd:

            def receive(count: int, knocking: socket.socket = knocking) -> bytes:
                return greetings.pop(knocking, None) or exactly(knocking, count)

            prove_as_origin(SECRET, knocking.sendall, receive)
        for _ in range(PEERS_MAX):
            assert inside.acquire(timeout=10)
        dropped = [knocking for knocking in crowd if ended(knocking)]
        assert len(dropped) == STRANGERS_MAX - 1
        assert not inside.acquire(blocking=False)
        leave.set()
        for peer in peers:
            peer.close()


def ended(knocking: socket.socket) -> bool:
    knocking.settimeout(0.5)
    try:
        return knocking.recv(1) == b""
    except TimeoutError:
        return False


def test_no_thread_to_be_had_costs_one_connection_and_not_the_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with listening(echo) as address:
        with monkeypatch.context() as scarce:
            scarce.setattr(threading.Thread, "start", start)
            with socket.create_connection(address, 10) as knocking:
                assert knocking.recv(1) == b""
        assert_good_clients_are_served(address)


def test_a_bug_in_what_handles_a_peer_is_logged_and_harms_no_other() -> None:
    def handle(connection: TcpConnection) -> None:
        if connection.receive() == b"bug":
            raise ZeroDivisionError
        connection.send(b"hello")

    with capture_logs() as logs, listening(handle) as address:
        unlucky = connect(*address, SECRET)
        unlucky.send(b"bug")
        with pytest.raises(PeerError):
            unlucky.receive()
        assert_good_clients_are_served(address)
    assert [(line["event"], line["log_level"]) for line in logs] == [
        ("a connection failed", "error")
    ]


def test_those_who_are_dropped_are_logged_once_a_second_with_their_number() -> None:
    with capture_logs() as logs, listening(echo) as address:
        with socket.create_connection(address, 10) as first:
            port = first.getsockname()[1]
            first.sendall(b"x" * 200)
            with contextlib.suppress(ConnectionError):
                while first.recv(4096):
                    pass
        wait_for(lambda: bool(logs), "the first line")
        began = time.monotonic()
        while len(logs) < 2 and time.monotonic() - began < 10:
            throw(address, b"x" * 200)
        took = time.monotonic() - began
    assert [line["event"] for line in logs] == ["refused a connection"] * 2
    assert logs[0] == {
        "event": "refused a connection",
        "log_level": "warning",
        "peer": f"127.0.0.1:{port}",
        "reason": "it does not speak this protocol",
        "count": 1,
    }
    assert logs[1]["count"] > 10
    assert took > 0.9


def test_close_ends_strangers_connections_and_their_threads() -> None:
    entered = threading.Semaphore(0)

    def handle(connection: TcpConnection) -> None:
        entered.release()
        echo(connection)

    before = set(threading.enumerate())
    listener = Listener("127.0.0.1", 0, SECRET)
    serving = threading.Thread(target=listener.serve, args=(handle,))
    serving.start()
    address = parse_address(listener.address)
    connections = [connect(*address, SECRET) for _ in range(3)]
    with silent(address) as stranger:
        for _ in connections:
            assert entered.acquire(timeout=10)
        listener.close()
        assert stranger.recv(1) == b""
    for connection in connections:
        with pytest.raises(PeerError):
            connection.receive()
    serving.join(10)
    assert set(threading.enumerate()) - before == set()
    listener.close()  # once more harms nobody
