"""The process that goes on with a checkpoint: says that it is ready, waits for a path, loads it.

    python loader.py copy|mmap

It imports torch and uses it once, prints `ready`, reads a line with a path, and prints when it
began and had everything by the monotonic clock, which all processes of a machine share, how many
bytes of tensors it has, and their digest. With `mmap` it has everything once it has read every
byte, as `torch.load(mmap=True)` itself reads next to nothing.
"""

import io
import sys
import time
from typing import Any

import torch
import xxhash


def digest_of(state: dict[str, Any]) -> tuple[int, str]:
    """Return how many bytes the tensors have, and the digest of all of them."""
    digest = xxhash.xxh3_128()
    total = 0
    for name in sorted(state):
        content = memoryview(state[name].numpy()).cast("B")
        digest.update(content)
        total += len(content)
    return total, digest.hexdigest()


def main() -> None:
    buffer = io.BytesIO()
    torch.save({"first": torch.zeros(1)}, buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=True)  # the first call ever imports things
    print("ready", flush=True)
    path = sys.stdin.readline().rstrip("\n")
    mapped = sys.argv[1] == "mmap"
    started = time.monotonic()
    state = torch.load(path, weights_only=True, mmap=mapped)
    loaded = time.monotonic()
    proof = digest_of(state)
    ended = time.monotonic() if mapped else loaded
    print(repr(started), repr(ended), *proof, flush=True)


if __name__ == "__main__":
    main()
