"""The control socket: how a command speaks with the daemon of a mount.

One connection carries one request: a line of JSON `{"op": ..., ...}`, answered by any number of
lines `{"progress": {...}}` and then one `{"result": ...}` or `{"error": ..., "exit_code": n}`.
Progress is a state and not a log: a client that reads slowly misses steps between, and holds up
nobody. A client that goes away cancels what it asked for. HTTP was weighed and rejected: it brings
a server library and buys nothing on a socket that only this program's commands open.
"""

import os
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import trio

from lmstorfs.control_client import (
    ControlClient,
    DaemonGoneError,
    decode_line,
    encode_line,
    socket_address,
)
from lmstorfs.errors import LmstorfsError, SetupError, UsageError

__all__ = ["ControlClient", "ControlServer", "DaemonGoneError", "Handler", "Progress"]

REQUEST_MAX_BYTES = 1 << 20  # `sync` with some thousand paths; more is a mistake or an attack
REQUEST_TIMEOUT_S = 10.0  # a client sends its line at once; one that does not is let go
READ_BYTES = 1 << 16

Progress = Callable[[dict[str, Any]], Awaitable[None]]
Handler = Callable[[dict[str, Any], Progress], Awaitable[Any]]
"""Takes the request and a function that sends progress; returns the result."""


class ControlServer:
    """Serves the control socket of one mount; each client has its own task."""

    def __init__(self, path: Path, handlers: Mapping[str, Handler]) -> None:
        self._path = path
        self._handlers = handlers
        self._clients = 0
        self._left = trio.Event()
        self._served = 0

    async def idle(self) -> None:
        """Return when no client is connected."""
        while self._clients:
            self._left = trio.Event()
            await self._left.wait()

    def statistics(self) -> dict[str, int]:
        """Return how many clients are connected and how many were served."""
        return {"clients": self._clients, "served": self._served}

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; started when the socket answers.

        A socket left by an earlier daemon is replaced: whoever calls this holds the state
        directory's lock.
        """
        listener = trio.SocketListener(await self._listen())
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(trio.serve_listeners, self._serve, [listener])
                task_status.started()
        finally:
            self._path.unlink(missing_ok=True)

    async def _listen(self) -> trio.socket.SocketType:
        self._path.unlink(missing_ok=True)
        listening = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with socket_address(self._path) as address:
                await listening.bind(address)
            self._path.chmod(0o600)
            listening.listen(64)
        except BaseException:
            listening.close()
            raise
        return listening

    async def _serve(self, stream: trio.SocketStream) -> None:
        self._clients += 1
        try:
            await self._answer(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the client went away; nobody is left to be told
        except Exception as error:  # noqa: BLE001 - one client's trouble must not end the daemon
            _log_failure(error)
        finally:
            self._clients -= 1
            self._left.set()
            self._served += 1
            await trio.aclose_forcefully(stream)

    async def _answer(self, stream: trio.SocketStream) -> None:
        try:
            request = await _receive_request(stream)
            _require_own_user(stream)  # only now: a close before reading would lose the answer
            handler = self._handler_for(request)
        except LmstorfsError as error:
            await stream.send_all(encode_line(_error_reply(error)))
            return
        await _Exchange(stream, handler, request).run()

    def _handler_for(self, request: dict[str, Any]) -> Handler:
        op = request.get("op")
        if not isinstance(op, str) or op not in self._handlers:
            known = ", ".join(sorted(self._handlers))
            raise UsageError(f"the daemon knows no operation '{op}'; it has {known}")
        return self._handlers[op]


class _Exchange:
    """One request and its answers: a task for the handler, one that sends, one that listens."""

    def __init__(
        self, stream: trio.SocketStream, handler: Handler, request: dict[str, Any]
    ) -> None:
        self._stream = stream
        self._handler = handler
        self._request = request
        self._newest: dict[str, Any] | None = None
        self._reply: dict[str, Any] | None = None
        self._wake = trio.Event()

    async def run(self) -> None:
        """Return when the reply is sent; a client that leaves cancels the handler."""
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_for_leaving, nursery.cancel_scope)
            nursery.start_soon(self._handle)
            try:
                await self._send()
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _watch_for_leaving(self, scope: trio.CancelScope) -> None:
        try:
            while await self._stream.receive_some(READ_BYTES):
                pass  # one connection carries one request
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        scope.cancel()

    async def _handle(self) -> None:
        try:
            reply = {"result": await self._handler(self._request, self._progress)}
        except Exception as error:  # noqa: BLE001 - one bad request must not end the daemon
            reply = _error_reply(error)
        self._reply = reply
        self._wake.set()

    async def _progress(self, state: dict[str, Any]) -> None:
        self._newest = state
        self._wake.set()
        await trio.lowlevel.checkpoint()

    async def _send(self) -> None:
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            reply = self._reply
            if self._newest is not None:
                state, self._newest = self._newest, None
                await self._stream.send_all(encode_line({"progress": state}))
            if reply is not None:
                await self._stream.send_all(_encode_reply(reply))
                return


def _encode_reply(reply: dict[str, Any]) -> bytes:
    try:
        return encode_line(reply)
    except (TypeError, ValueError) as error:  # a handler returned what JSON cannot say
        return encode_line(_error_reply(error))


def _error_reply(error: BaseException) -> dict[str, Any]:
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]  # a handler's nursery wraps what its one task raised
    if isinstance(error, LmstorfsError):
        code = error.exit_code if isinstance(error, SetupError) else 1
        return {"error": str(error), "exit_code": code}
    _log_failure(error)
    return {"error": f"the daemon failed: {type(error).__name__}: {error}", "exit_code": 1}


def _log_failure(error: BaseException) -> None:
    import structlog  # the commands share this module and log nothing

    structlog.get_logger("lmstorfs.control").error("control request failed", exc_info=error)


def _require_own_user(stream: trio.SocketStream) -> None:
    size = struct.calcsize("3i")
    credentials = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _pid, uid, _gid = struct.unpack("3i", credentials)
    if uid not in (0, os.geteuid()):
        raise SetupError("this mount belongs to another user")


async def _receive_request(stream: trio.SocketStream) -> dict[str, Any]:
    received = bytearray()
    with trio.move_on_after(REQUEST_TIMEOUT_S) as scope:
        while b"\n" not in received:
            if len(received) > REQUEST_MAX_BYTES:
                raise UsageError(f"the request is longer than {REQUEST_MAX_BYTES} bytes")
            more = await stream.receive_some(READ_BYTES)
            if not more:
                raise UsageError("the request ends without a line end")
            received += more
    if scope.cancelled_caught:
        raise UsageError("no request came")
    request = decode_line(bytes(received.partition(b"\n")[0]))
    if not isinstance(request, dict):
        raise UsageError("a request is a JSON object")
    return request
