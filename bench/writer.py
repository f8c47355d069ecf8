"""One of several writers at once: says that it is ready, waits for the word, writes, tells when.

    python writer.py PATH BYTES WRITE_BYTES

It prints `ready`, reads one line, writes, and prints when it started and ended by the monotonic
clock, which all processes of a machine share. It imports as little as it can: nothing of it should
run while another writer is timed.
"""

import os
import sys
import time


def write_stream(path: str, total: int, buffer: memoryview) -> tuple[float, float]:
    """Write `buffer` to a new file until it has `total` bytes; return when it began and ended."""
    size = len(buffer)
    started = time.monotonic()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for _ in range(total // size):
        written = os.write(descriptor, buffer)
        while written < size:
            written += os.write(descriptor, buffer[written:])
    os.close(descriptor)
    return started, time.monotonic()


def main() -> None:
    path, total, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    buffer = memoryview(os.urandom(size))
    print("ready", flush=True)
    sys.stdin.readline()
    started, ended = write_stream(path, total, buffer)
    print(f"{started!r} {ended!r}", flush=True)


if __name__ == "__main__":
    main()
