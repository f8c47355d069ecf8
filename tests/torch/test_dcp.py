"""`torch.distributed.checkpoint` with our writer as stager and storage."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from lmstorfs.errors import PoolFullError
from lmstorfs.torch.dcp import Staging, StorageWriter

MIB = 1 << 20


def state_of(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {
        "model": {"weight": torch.rand(MIB), "scalar": torch.tensor(1.5), "empty": torch.empty(0)},
        "transposed": torch.rand(3, 4).t(),
        "half": torch.rand(7).to(torch.bfloat16),
        "step": seed,
    }


def loaded(path: Path, like: dict[str, Any]) -> dict[str, Any]:
    into = {
        "model": {name: torch.zeros_like(value) for name, value in like["model"].items()},
        "transposed": torch.zeros(4, 3), "half": torch.zeros(7, dtype=torch.bfloat16), "step": 0,
    }  # fmt: skip
    dcp.load(into, checkpoint_id=path)
    return into


def assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["step"] == wanted["step"]
    for name in ("transposed", "half"):
        assert torch.equal(found[name], wanted[name])
    for name in wanted["model"]:
        assert torch.equal(found["model"][name], wanted["model"][name])


def test_what_changes_right_after_async_save_is_not_in_it(tmp_path: Path) -> None:
    staging = Staging(64 * MIB)
    futures = []
    for seed in range(3):
        state = state_of(seed)
        writer = StorageWriter(tmp_path / str(seed), staging=staging)
        futures.append(dcp.async_save(state, storage_writer=writer))
        state["model"]["weight"].zero_()
        state["transposed"].zero_()
    for future in futures:
        future.result()
    for seed in range(3):
        wanted = state_of(seed)
        assert_equal(loaded(tmp_path / str(seed), wanted), wanted)
    assert 4 * MIB < staging.held_bytes < 5 * MIB


def test_a_plain_save_needs_no_staging(tmp_path: Path) -> None:
    wanted = state_of(1)
    dcp.save(wanted, storage_writer=StorageWriter(tmp_path / "a", max_host_memory=1))
    assert_equal(loaded(tmp_path / "a", wanted), wanted)


def test_a_state_above_the_bound_is_refused_and_the_next_is_not(tmp_path: Path) -> None:
    staging = Staging(MIB)
    with pytest.raises(PoolFullError, match="the state has 4 MiB, max_host_memory is 1 MiB"):
        dcp.async_save(state_of(1), storage_writer=StorageWriter(tmp_path / "a", staging=staging))
    small = {"a": torch.rand(5)}
    dcp.async_save(small, storage_writer=StorageWriter(tmp_path / "b", staging=staging)).result()
    into = {"a": torch.zeros(5)}
    dcp.load(into, checkpoint_id=tmp_path / "b")
    assert torch.equal(into["a"], small["a"])


class FailingPlanner(DefaultSavePlanner):
    def create_local_plan(self) -> SavePlan:
        raise ValueError("no plan today")


def test_a_save_that_fails_in_its_planning_does_not_hold_up_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmstorfs.torch.dcp._WAIT_S", 30.0)
    staging = Staging(64 * MIB)
    with pytest.raises(CheckpointException):
        dcp.async_save(
            state_of(1),
            storage_writer=StorageWriter(tmp_path / "a", staging=staging),
            planner=FailingPlanner(),
        ).result()
    gc.collect()  # the error's frames hold the writer
    wanted = state_of(2)
    writer = StorageWriter(tmp_path / "b", staging=staging)
    dcp.async_save(wanted, storage_writer=writer).result()
    assert_equal(loaded(tmp_path / "b", wanted), wanted)
