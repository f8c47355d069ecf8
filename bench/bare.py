"""What the kernel alone moves between two hosts: the bound that the mirror is measured by.

    python bare.py receive ADDRESS DIRECTORY FILES BYTES_EACH map|splice
    python bare.py send ADDRESS PORT FILE…

One connection, `os.sendfile` from files on one tmpfs, and into files on another by `recv_into` a
mapping or by splice(2) through a pipe. No protocol, no digest, no names. Each end prints `ready`
(the receiver its port as well), the sender waits for a line, and then it tells when it began, the
receiver when it had everything, by the monotonic clock that both share.
"""

import fcntl
import mmap
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

BUFFER_BYTES = 4 << 20  # the mirror's own, for both ends
SEND_BYTES = 8 << 20
RECEIVE_BYTES = 8 << 20
PIPE_BYTES = 1 << 20


def enlarge(sock: socket.socket) -> None:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)


def receive_mapped(sock: socket.socket, fd: int, size: int) -> None:
    with mmap.mmap(fd, size) as memory, memoryview(memory) as view:
        done = 0
        while done < size:
            got = sock.recv_into(view[done : done + RECEIVE_BYTES])
            if not got:
                raise EOFError(f"only {done} of {size} bytes came")
            done += got


def receive_spliced(sock: socket.socket, fd: int, size: int) -> None:
    pipe_out, pipe_in = os.pipe()
    fcntl.fcntl(pipe_in, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    done = 0
    while done < size:
        in_pipe = os.splice(sock.fileno(), pipe_in, min(size - done, PIPE_BYTES))
        if not in_pipe:
            raise EOFError(f"only {done} of {size} bytes came")
        while in_pipe:
            moved = os.splice(pipe_out, fd, in_pipe, offset_dst=done)
            in_pipe -= moved
            done += moved
    os.close(pipe_out)
    os.close(pipe_in)


RECEIVERS: dict[str, Callable[[socket.socket, int, int], None]] = {
    "map": receive_mapped,
    "splice": receive_spliced,
}


def receive(address: str, directory: Path, count: int, size: int, how: str) -> None:
    listener = socket.socket()
    enlarge(listener)
    listener.bind((address, 0))
    listener.listen()
    print("ready", listener.getsockname()[1], flush=True)
    connection, _ = listener.accept()
    for number in range(count):
        fd = os.open(directory / f"{number}.bin", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.ftruncate(fd, size)  # first: tmpfs gives huge pages within the size only
        RECEIVERS[how](connection, fd, size)
        os.close(fd)
    print(repr(time.monotonic()), flush=True)


def send(address: str, port: int, paths: list[str]) -> None:
    sock = socket.socket()
    enlarge(sock)
    sock.connect((address, port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    print("ready", flush=True)
    sys.stdin.readline()
    started = time.monotonic()
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        size, offset = os.fstat(fd).st_size, 0
        while offset < size:
            offset += os.sendfile(sock.fileno(), fd, offset, SEND_BYTES)
        os.close(fd)
    print(repr(started), flush=True)


def main() -> None:
    role, address, *rest = sys.argv[1:]
    if role == "receive":
        receive(address, Path(rest[0]), int(rest[1]), int(rest[2]), rest[3])
    else:
        send(address, int(rest[0]), rest[1:])


if __name__ == "__main__":
    main()
