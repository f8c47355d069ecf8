"""What is written, and how long it takes: each case is prepared first and timed afterwards.

A case's time runs from the opening of its first file to the closing of its last. `prepare` does
what must not be timed (buffers, tensors, processes that wait for the word) and returns what is.
"""

import io
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bench.writer import write_stream
from lmstorfs.units import GIB, KIB, MIB, format_size

TENSOR_BYTES = 16 * MIB
WRITERS = 4
WRITER_SIZE = 16 * MIB
WRITER_PROGRAM = Path(__file__).parent / "writer.py"

Timed = Callable[[], float]


@dataclass(frozen=True)
class Case:
    """One thing to measure: `prepare(directory)` gives the function whose time counts."""

    name: str
    title: str
    total: int
    prepare: Callable[[Path], Timed]


def no_case(_directory: Path) -> Timed:
    """Stand in for `prepare` where contenders differ in what they do at a case."""
    raise AssertionError("this case is prepared by the contender's own way")


def stream_case(size: int, total: int) -> Case:
    """One stream of writes of `size`, by plain `os.write` from one buffer."""

    def prepare(directory: Path) -> Timed:
        buffer = memoryview(os.urandom(size))

        def timed() -> float:
            started, ended = write_stream(str(directory / "stream.bin"), total, buffer)
            return ended - started

        return timed

    text = format_size(size)
    return Case(f"stream {text}", text, total, prepare)


@cache
def state_dict(total: int) -> dict[str, object]:
    """Return tensors of 16 MiB that weigh `total`; made once, since they take a while."""
    import torch

    size = min(TENSOR_BYTES, total)
    state: dict[str, object] = {
        f"layer.{index}.weight": torch.randint(0, 255, (size,), dtype=torch.uint8)
        for index in range(total // size)
    }
    # The first call ever imports things, which no contender should be charged for.
    torch.save(torch.zeros(1), io.BytesIO())
    return state


def torch_save_case(total: int, crc: bool) -> Case:
    """One `torch.save`; its checksum of every byte is torch's own time, so also without."""

    def prepare(directory: Path) -> Timed:
        import torch

        state = state_dict(total)

        def timed() -> float:
            torch.serialization.set_crc32_options(crc)
            started = time.monotonic()
            torch.save(state, directory / "checkpoint.pt")
            return time.monotonic() - started

        return timed

    if crc:
        return Case("torch.save", "torch.save", total, prepare)
    return Case("torch.save without CRC", "no CRC", total, prepare)


def writers_case(total_each: int) -> Case:
    """Several writers at once, each a process of its own with its own file."""

    def prepare(directory: Path) -> Timed:
        words = [str(total_each), str(min(WRITER_SIZE, total_each))]
        writers = [
            subprocess.Popen(
                [sys.executable, WRITER_PROGRAM, directory / f"writer-{index}.bin", *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for index in range(WRITERS)
        ]
        for writer in writers:
            assert writer.stdout is not None
            writer.stdout.readline()

        def timed() -> float:
            for writer in writers:
                assert writer.stdin is not None
                writer.stdin.write("go\n")
                writer.stdin.flush()
            outputs = [writer.communicate()[0] for writer in writers]
            if any(writer.returncode != 0 for writer in writers):
                raise OSError("a writer failed")
            spans = [tuple(map(float, output.split())) for output in outputs]
            return max(ended for _, ended in spans) - min(started for started, _ in spans)

        return timed

    return Case(f"{WRITERS} writers", f"{WRITERS} writers", WRITERS * total_each, prepare)


def cases(quick: bool) -> list[Case]:
    """Return everything that is measured; `quick` is there to see that it runs."""
    small, large = (1 * MIB, 16 * MIB) if quick else (256 * MIB, 2 * GIB)
    streams = [
        stream_case(size, small if size < 64 * KIB else large)
        for size in (4 * KIB, 64 * KIB, 256 * KIB, 1 * MIB, 16 * MIB)
    ]
    tensors = 16 * MIB if quick else 1 * GIB
    return [
        *streams,
        torch_save_case(tensors, crc=True),
        torch_save_case(tensors, crc=False),
        writers_case(large // WRITERS),
    ]
