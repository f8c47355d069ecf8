"""What checkpoint writers do comes back equal, from the mount and from the store."""

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from tests.mounted.conftest import Site
from tests.mounting import wait_for


def state_dict(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(600, 700, generator=generator),
        "half": torch.randn(33, 5, generator=generator).to(torch.bfloat16),
        "step": torch.tensor(seed),
        "empty": torch.empty(0),
    }


def assert_same(got: dict[str, Any], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


def seen(stored: Path) -> bytes:
    """Return what an object's file holds; nothing while rclone puts a new one in its place."""
    try:
        return stored.read_bytes()
    except FileNotFoundError:
        return b""


@pytest.mark.parametrize("mapped", [False, True])
def test_torch_save_and_load(site: Site, mapped: bool) -> None:
    folder = site.fresh(f"torch-{mapped}")
    want = state_dict()
    torch.save(want, folder / "model.pt")
    assert_same(torch.load(folder / "model.pt", weights_only=True, mmap=mapped), want)
    site.mount.sync()
    assert_same(torch.load(site.stored(folder / "model.pt"), weights_only=True), want)


def test_torch_save_over_an_older_checkpoint(site: Site) -> None:
    folder = site.fresh("torch-over")
    for seed in range(4):
        torch.save(state_dict(seed), folder / "last.pt")
        assert_same(torch.load(folder / "last.pt", weights_only=True), state_dict(seed))
    site.mount.sync()
    assert_same(torch.load(site.stored(folder / "last.pt"), weights_only=True), state_dict(3))


def test_safetensors_save_and_mapped_load(site: Site) -> None:
    folder = site.fresh("safetensors")
    want = state_dict()
    save_file(want, folder / "model.safetensors")
    assert_same(load_file(folder / "model.safetensors"), want)
    site.mount.sync()
    assert_same(load_file(site.stored(folder / "model.safetensors")), want)


def test_dcp_save_and_load(site: Site) -> None:
    folder = site.fresh("dcp")
    want = state_dict()
    dcp.save({"model": want}, checkpoint_id=folder / "step_1", no_dist=True)
    got = {"model": {name: torch.zeros_like(tensor) for name, tensor in want.items()}}
    dcp.load(got, checkpoint_id=folder / "step_1", no_dist=True)
    assert_same(got["model"], want)
    site.mount.sync()
    assert sorted(p.name for p in site.stored(folder / "step_1").iterdir()) == sorted(
        p.name for p in (folder / "step_1").iterdir()
    )
    again = {"model": {name: torch.zeros_like(tensor) for name, tensor in want.items()}}
    dcp.load(again, checkpoint_id=site.stored(folder / "step_1"), no_dist=True)
    assert_same(again["model"], want)


def test_numpy_memmap_writable(site: Site) -> None:
    folder = site.fresh("memmap")
    mapped = np.memmap(folder / "tokens.bin", dtype=np.int32, mode="w+", shape=(100_000,))
    mapped[:] = np.arange(100_000)
    mapped.flush()
    again = np.memmap(folder / "tokens.bin", dtype=np.int32, mode="r+", shape=(100_000,))
    again[7] = -7
    again.flush()
    del mapped, again
    want = np.arange(100_000, dtype=np.int32)
    want[7] = -7
    assert np.array_equal(np.fromfile(folder / "tokens.bin", dtype=np.int32), want)
    site.mount.sync()
    path = site.stored(folder / "tokens.bin")
    wait_for(
        lambda: np.array_equal(np.fromfile(path, dtype=np.int32), want),
        "the store has what the mapping wrote",
    )


def test_what_a_mapping_writes_after_its_descriptor_was_closed_is_stored(site: Site) -> None:
    path = site.fresh("late") / "late.bin"
    path.write_bytes(bytes(mmap.PAGESIZE))
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), mmap.PAGESIZE)
    site.mount.sync()
    mapped[:4] = b"late"
    mapped.close()
    stored = site.stored(path)
    wait_for(lambda: seen(stored)[:4] == b"late", "the store has the late bytes")


def test_an_fsync_is_a_version_of_a_file_that_stays_open(site: Site) -> None:
    path = site.fresh("fsync") / "events.log"
    with path.open("wb", buffering=0) as file:
        file.write(b"first\n")
        os.fsync(file.fileno())
        assert site.stored(path).read_bytes() == b"first\n"
        file.write(b"second\n")
        os.fsync(file.fileno())
        assert site.stored(path).read_bytes() == b"first\nsecond\n"
        file.write(b"third\n")
        assert path.read_bytes() == b"first\nsecond\nthird\n"
    site.mount.sync()
    assert site.stored(path).read_bytes() == b"first\nsecond\nthird\n"


def test_readers_see_what_is_written_so_far(site: Site) -> None:
    path = site.fresh("growing") / "log"
    with path.open("ab", buffering=0) as writer:
        for number in range(20):
            writer.write(b"%d\n" % number)
            with path.open("rb") as reader:
                assert reader.read().split() == [b"%d" % n for n in range(number + 1)]
            assert path.stat().st_size == writer.tell()


def test_a_large_file_is_stored_in_parts_and_whole(site: Site) -> None:
    path = site.fresh("large") / "shard.bin"
    block = os.urandom(1 << 20)
    with path.open("wb") as file:
        for number in range(72):
            file.write(number.to_bytes(4, "little") + block[4:])
    site.mount.sync()
    content = site.stored(path).read_bytes()
    assert len(content) == 72 << 20
    for number in range(72):
        piece = content[number << 20 : (number + 1) << 20]
        assert piece == number.to_bytes(4, "little") + block[4:]


def test_saved_under_a_temporary_name_and_renamed_is_uploaded_once(site: Site) -> None:
    folder = site.fresh("once")
    site.mount.sync()
    before = site.mount.status()["store"]["flushing"]["stored_bytes"]
    size = 0
    for step in range(3):
        temporary: Path = folder / f"step_{step}.tmp"
        temporary.mkdir()
        for rank in range(4):
            content = os.urandom(500_000 + rank)
            (temporary / f"rank_{rank}.pt").write_bytes(content)
            size += len(content)
        temporary.rename(folder / f"step_{step}")
    site.mount.sync()
    after = site.mount.status()["store"]["flushing"]["stored_bytes"]
    assert after - before == size
    names = sorted(p.name for p in site.stored(folder).iterdir())
    assert names == ["step_0", "step_1", "step_2"]
    assert len(list(site.stored(folder).rglob("*.pt"))) == 12
