"""The control socket: one request a connection, progress, one answer; no client hurts another."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from lmstorfs.control import ControlClient, ControlServer, DaemonGoneError, Progress
from lmstorfs.control_client import encode_line, socket_address
from lmstorfs.errors import SetupError, UsageError

Serve = Callable[..., Path]


class Handlers:
    """What the daemon would do, in small."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self.waiting = threading.Event()

    async def echo(self, request: dict[str, Any], progress: Progress) -> Any:
        return request

    async def steps(self, request: dict[str, Any], progress: Progress) -> Any:
        for done in range(request["count"]):
            await progress({"done_bytes": done})
        return {"files": request["count"]}

    async def refuse(self, request: dict[str, Any], progress: Progress) -> Any:
        raise UsageError("no such path")

    async def refuse_in_nursery(self, request: dict[str, Any], progress: Progress) -> Any:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.refuse, request, progress)

    async def fail(self, request: dict[str, Any], progress: Progress) -> Any:
        raise ZeroDivisionError("a bug")

    async def unspeakable(self, request: dict[str, Any], progress: Progress) -> Any:
        return {"value": object()}

    async def wait(self, request: dict[str, Any], progress: Progress) -> Any:
        self.waiting.set()
        try:
            await trio.sleep_forever()
        finally:
            self.cancelled.set()

    def by_name(self) -> dict[str, Any]:
        names = ["echo", "steps", "refuse", "refuse_in_nursery", "fail", "unspeakable", "wait"]
        return {name: getattr(self, name) for name in names}


@pytest.fixture
def handlers() -> Handlers:
    return Handlers()


@pytest.fixture
def state(tmp_path: Path, handlers: Handlers) -> Iterator[Path]:
    """Serve from a state directory whose path is longer than a socket's address may be."""
    state = tmp_path / ("deep" * 30)
    state.mkdir()
    (state / "control.sock").write_bytes(b"left by an earlier daemon")
    started = threading.Event()
    scope = trio.CancelScope()
    token: list[trio.lowlevel.TrioToken] = []

    async def main() -> None:
        token.append(trio.lowlevel.current_trio_token())
        with scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(ControlServer(state / "control.sock", handlers.by_name()).run)
                started.set()

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    assert started.wait(10)
    yield state
    token[0].run_sync_soon(scope.cancel)
    thread.join(10)
    assert not thread.is_alive()


def raw(state: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(10)
    with socket_address(state / "control.sock") as address:
        connection.connect(address)
    return connection


def test_a_request_is_answered(state: Path) -> None:
    assert ControlClient(state).call("echo", paths=["/a"]) == {"op": "echo", "paths": ["/a"]}


def test_the_socket_is_the_owners_alone(state: Path) -> None:
    assert (state / "control.sock").stat().st_mode & 0o777 == 0o600


def test_names_that_are_not_utf8_travel(state: Path) -> None:
    name = os.fsdecode(b"/ckpt/\xff")
    assert ControlClient(state).call("echo", path=name)["path"] == name


def test_progress_comes_in_order_and_its_last_state_before_the_result(state: Path) -> None:
    seen: list[int] = []
    result = ControlClient(state).call(
        "steps", count=100, on_progress=lambda step: seen.append(step["done_bytes"])
    )
    assert result == {"files": 100}
    assert seen == sorted(seen)
    assert seen[-1] == 99


def test_an_error_comes_with_its_words_and_exit_code(state: Path) -> None:
    for op in ("refuse", "refuse_in_nursery"):
        with pytest.raises(SetupError) as caught:
            ControlClient(state).call(op)
        assert str(caught.value) == "no such path"
        assert caught.value.exit_code == 2


@pytest.mark.parametrize("op", ["fail", "unspeakable"])
def test_a_bug_in_one_request_leaves_the_others_alone(state: Path, op: str) -> None:
    with pytest.raises(SetupError) as caught:
        ControlClient(state).call(op)
    assert caught.value.exit_code == 1
    assert ControlClient(state).call("echo") == {"op": "echo"}


def test_an_unknown_operation_is_refused_with_those_that_exist(state: Path) -> None:
    with pytest.raises(SetupError, match="the daemon knows no operation 'dance'; it has echo"):
        ControlClient(state).call("dance")


@pytest.mark.parametrize(
    "line",
    [b"no json\n", b"[1]\n", b'"x"\n', b"\xff\xfe\n", b'{"op": 5}\n', b'{"op": ["echo"]}\n', b"\n"],
)
def test_a_line_that_is_no_request_gets_an_error(state: Path, line: bytes) -> None:
    with raw(state) as connection:
        connection.sendall(line)
        assert b'"error"' in connection.makefile("rb").readline()
    assert ControlClient(state).call("echo") == {"op": "echo"}


def test_an_endless_line_is_cut_off(state: Path) -> None:
    with raw(state) as connection, pytest.raises(ConnectionError):
        connection.sendall(b"x" * (8 << 20))
    assert ControlClient(state).call("echo") == {"op": "echo"}


def test_a_client_that_leaves_cancels_what_it_asked_for(state: Path, handlers: Handlers) -> None:
    with raw(state) as connection:
        connection.sendall(encode_line({"op": "wait"}))
        assert handlers.waiting.wait(10)
    assert handlers.cancelled.wait(10)


def test_a_client_that_says_nothing_holds_up_nobody(state: Path) -> None:
    with raw(state), raw(state):
        assert ControlClient(state).call("echo") == {"op": "echo"}


def test_a_client_that_does_not_read_holds_up_nobody(state: Path) -> None:
    with raw(state) as connection:
        connection.sendall(encode_line({"op": "steps", "count": 100_000}))
        assert ControlClient(state).call("echo") == {"op": "echo"}


def test_a_silent_daemon_is_told_of(state: Path) -> None:
    with pytest.raises(SetupError, match=r"does not answer; its log is .*/daemon\.log"):
        ControlClient(state).call("wait", timeout=0.2)


def test_another_user_is_refused(state: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    path = state / "control.sock"
    path.chmod(0o666)
    script = (
        "import os, socket, sys\n"
        "c = socket.socket(socket.AF_UNIX)\n"
        "fd = os.open(sys.argv[1], os.O_PATH)\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "c.connect(f'/proc/self/fd/{fd}')\n"
        'c.sendall(b\'{"op": "echo"}\\n\')\n'
        "print(c.makefile().readline())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False
    )
    assert "this mount belongs to another user" in done.stdout, done.stderr


@pytest.mark.parametrize("left", ["nothing", "a dead socket"])
def test_a_dead_daemon_is_told_of_with_what_to_do(tmp_path: Path, left: str) -> None:
    if left == "a dead socket":
        with socket.socket(socket.AF_UNIX) as dead, socket_address(tmp_path / "control.sock") as at:
            dead.bind(at)
    with pytest.raises(DaemonGoneError) as caught:
        ControlClient(tmp_path).call("status")
    assert str(caught.value) == (
        f"the daemon of {tmp_path} is not running; run `lmstorfs mount {tmp_path} …` again: "
        "it takes over what is left"
    )
