"""A handle waits for each level of a real mount with a mirror and a store."""

import os
from pathlib import Path

import pytest
import torch

from lmstorfs.errors import SetupError
from lmstorfs.torch import Checkpointer
from tests.mounting import mounted
from tests.nodes import cluster

pytestmark = [
    pytest.mark.mounted,
    pytest.mark.skipif(
        os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs root and /dev/fuse"
    ),
]

STATE = {"big": torch.arange(1 << 20)}


def test_mirrored_comes_before_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(tmp_path) as site, Checkpointer() as checkpointer:
        node = site.node("old", "-o", "flush_delay=600")
        monkeypatch.setenv("LMSTORFS_RUN_DIR", node.environment["LMSTORFS_RUN_DIR"])
        node.start()
        handle = checkpointer.save(STATE, node.path / "step-1.pt")
        handle.mirrored(60)
        (replica,) = site.mirror.replicas()
        assert replica.stat().st_size == (node.path / "step-1.pt").stat().st_size
        assert not (site.store / "step-1.pt").exists()
        with site.store_away(), pytest.raises(TimeoutError, match="is not in the store after 1 s"):
            handle.stored(1)
        handle.stored(60)
        assert torch.equal(torch.load(site.store / "step-1.pt")["big"], STATE["big"])


def test_mirrored_needs_a_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mounted(tmp_path, "--ram", "64M") as mount, Checkpointer() as checkpointer:
        monkeypatch.setenv("LMSTORFS_RUN_DIR", mount.environment["LMSTORFS_RUN_DIR"])
        handle = checkpointer.save(STATE, mount.path / "a.pt")
        with pytest.raises(SetupError, match="this mount has no mirror"):
            handle.mirrored(60)
        handle.stored(60)
        assert torch.equal(torch.load(mount.store / "a.pt")["big"], STATE["big"])
