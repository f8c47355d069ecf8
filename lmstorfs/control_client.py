"""How a command asks the daemon of a mount; the protocol is told in `control.py`.

Apart from the server because a command has no use for trio, which takes longer to load than most
answers take.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from lmstorfs.config import PARTS
from lmstorfs.errors import SetupError, UsageError
from lmstorfs.mounts import lock_held, mountpoint_of

RESTART_GRACE_S = 10.0  # a keeper brings a new daemon within this time
RETRY_PAUSE_S = 0.1


class DaemonGoneError(SetupError):
    """No daemon answers on the control socket, and no keeper is there to bring one."""


class DaemonDownError(DaemonGoneError):
    """The daemon died so often that its keeper has given up; the message is the keeper's."""


def encode_line(message: Any) -> bytes:
    """Return `message` as one line; names that are not UTF-8 travel as escaped surrogates."""
    try:
        return msgspec.json.encode(message) + b"\n"
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(message)).encode() + b"\n"


def decode_line(line: bytes) -> Any:
    """Return what a line says; raises `UsageError` where it is no JSON."""
    try:
        return msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    try:
        return json.loads(line)  # knows lone surrogates, which msgspec does not
    except ValueError as error:
        raise UsageError(f"the message is no JSON: {error}") from error


@contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """Yield an address for the socket `path`, however long that is.

    The kernel takes 107 bytes; a state directory may be deeper, so it is named by a descriptor.
    """
    descriptor = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)


class ControlClient:
    """Asks the daemon whose state directory is `state`; blocking, one connection a call."""

    def __init__(self, state: Path, restart_grace: float = RESTART_GRACE_S) -> None:
        self._state = state
        self._restart_grace = restart_grace

    def call(
        self,
        op: str,
        on_progress: Callable[[dict[str, Any]], None] | None = None,
        timeout: float | None = None,
        **fields: Any,
    ) -> Any:
        """Return the result of `op`; raises `SetupError` with what the daemon said otherwise.

        `timeout` bounds, in seconds, how long the daemon may say nothing at all. A daemon that
        dies meanwhile is replaced by its keeper, and the new one is asked the same.
        """
        began, asked_again = time.monotonic(), not self._restart_grace
        while True:
            with self._connect(timeout) as connection:
                try:
                    connection.sendall(encode_line({**fields, "op": op}))
                    return self._read_reply(connection, on_progress)
                except TimeoutError as error:
                    raise SetupError(
                        f"the daemon of {self._name} does not answer; {self._log}"
                    ) from error
                except (ConnectionError, EOFError) as error:
                    at_once = time.monotonic() - began < self._restart_grace
                    if not lock_held(self._state) or (asked_again and at_once):
                        raise DaemonGoneError(
                            f"the daemon of {self._name} went away before it answered; {self._log}"
                        ) from error
            began, asked_again = time.monotonic(), True
            time.sleep(RETRY_PAUSE_S)

    @property
    def _name(self) -> str:
        return mountpoint_of(self._state) or str(self._state)

    @property
    def _log(self) -> str:
        return f"its log is {self._state / PARTS['log']}"

    def _connect(self, timeout: float | None) -> socket.socket:
        """Connect, waiting a moment where a keeper is about to bring a new daemon."""
        give_up = time.monotonic() + self._restart_grace
        while True:
            try:
                return self._connect_once(timeout)
            except PermissionError as error:
                raise SetupError(
                    f"{self._state} belongs to another user; ask as that user, or as root"
                ) from error
            except (ConnectionRefusedError, FileNotFoundError, NotADirectoryError) as error:
                if lock_held(self._state) and (reason := self._given_up()):
                    raise DaemonDownError(reason) from error
                if time.monotonic() > give_up or not lock_held(self._state):
                    raise self._gone() from error
            except TimeoutError as error:
                raise SetupError(f"the daemon of {self._name} does not answer; {self._log}") from (
                    error
                )
            time.sleep(RETRY_PAUSE_S)

    def _connect_once(self, timeout: float | None) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout)
        try:
            with socket_address(self._state / PARTS["socket"]) as address:
                connection.connect(address)
        except BaseException:
            connection.close()
            raise
        return connection

    def _given_up(self) -> str | None:
        """Return why the keeper brings no daemon any more; None where it does."""
        try:
            return (self._state / PARTS["down"]).read_text().strip()
        except OSError:
            return None

    def _gone(self) -> DaemonGoneError:
        return DaemonGoneError(
            f"the daemon of {self._name} is not running; run `lmstorfs mount {self._name} …` "
            "again: it takes over what is left"
        )

    def _read_reply(
        self, connection: socket.socket, on_progress: Callable[[dict[str, Any]], None] | None
    ) -> Any:
        with connection.makefile("rb") as lines:
            for line in lines:
                message = decode_line(line)
                if "progress" in message:
                    if on_progress is not None:
                        on_progress(message["progress"])
                    continue
                if "error" in message:
                    raise _as_error(message)
                return message["result"]
        raise EOFError


def _as_error(message: dict[str, Any]) -> SetupError:
    error = SetupError(message["error"])
    error.exit_code = int(message.get("exit_code", 1))
    return error
