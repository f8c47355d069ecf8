"""Unmodified scripts under `lmstorfs run`: what they resume from is what a stock save gives."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounting import Mount, mounted

pytestmark = [
    pytest.mark.mounted,
    pytest.mark.skipif(
        os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs root and /dev/fuse"
    ),
]

SCRIPTS = Path(__file__).parent / "scripts"
STEPS, MORE = 6, 8
TORCHRUN = [Path(sys.executable).with_name("torchrun"), "--nproc-per-node", 2, "--standalone"]


@pytest.fixture(scope="module")
def mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mount]:
    with mounted(tmp_path_factory.mktemp("resume"), "--ram", "1G") as made:
        made.environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        yield made


def losses(mount: Mount, command: list[object], folder: Path, steps: int, *more: object) -> str:
    """Run a script; return the lines with its losses."""
    done = mount.run("run", "--", *command, folder, steps, *more, timeout_s=200)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return "\n".join(line for line in lines if line.partition(" ")[2].lstrip("-").startswith("0x"))


@pytest.mark.parametrize(
    ("command", "checkpoints"),
    [
        ([sys.executable, SCRIPTS / "plain.py"], [f"step-{n}.pt" for n in range(1, STEPS + 1)]),
        ([*TORCHRUN, SCRIPTS / "ddp.py"], [f"step-{n}.pt" for n in range(1, STEPS + 1)]),
        ([sys.executable, SCRIPTS / "trainer.py"], ["checkpoint-4", "checkpoint-6"]),
        (
            [sys.executable, SCRIPTS / "lit.py"],
            ["last.ckpt", "step-4.ckpt", "step-6.ckpt"],
        ),
    ],
    ids=["plain", "ddp", "trainer", "lightning"],
)
def test_resumed_losses_are_the_stock_ones(
    mount: Mount, tmp_path: Path, command: list[object], checkpoints: list[str]
) -> None:
    folder = mount.path / Path(str(command[-1])).stem
    folder.mkdir()
    first = losses(mount, command, folder, STEPS)
    assert len(first.splitlines()) == STEPS
    # The same script on another filesystem saves as it always does.
    (tmp_path / "stock").mkdir()
    assert losses(mount, command, tmp_path / "stock", STEPS) == first
    assert sorted(path.name for path in folder.iterdir()) == checkpoints
    assert sorted(path.name for path in (tmp_path / "stock").iterdir()) == checkpoints
    for name in (checkpoints[0], checkpoints[-1]):
        found = {}
        for place in (folder, tmp_path / "stock"):
            into = tmp_path / f"more-{place.name}-{name}"
            into.mkdir()
            found[place] = losses(mount, command, into, MORE, place / name)
            shutil.rmtree(into)
        assert found[folder] == found[tmp_path / "stock"]
        assert len(found[folder].splitlines()) >= MORE - STEPS


def test_lightnings_plugin_saves_what_lightning_resumes_from(mount: Mount, tmp_path: Path) -> None:
    folder = mount.path / "plugin"
    folder.mkdir()
    command = [sys.executable, SCRIPTS / "lit.py"]
    done = mount.run("run", "--", *command, "--plugin", folder, STEPS)
    assert done.returncode == 0, done.stderr
    names = ["last.ckpt", "step-4.ckpt", "step-6.ckpt"]
    assert sorted(path.name for path in folder.iterdir()) == names
    (tmp_path / "stock").mkdir()
    losses(mount, command, tmp_path / "stock", STEPS)
    resumed = [
        losses(mount, command, tmp_path, MORE, place / "last.ckpt")
        for place in (folder, tmp_path / "stock")
    ]
    assert resumed[0] == resumed[1]
    assert len(resumed[0].splitlines()) == MORE - STEPS


def test_the_trainers_callback_saves_what_the_trainer_resumes_from(
    mount: Mount, tmp_path: Path
) -> None:
    folder, stock = mount.path / "callback", tmp_path / "stock"
    folder.mkdir()
    stock.mkdir()
    environment = mount.environment | {"PYTHONPATH": str(SCRIPTS.parents[2])}
    for place, more in ((folder, ["--callback"]), (stock, [])):
        subprocess.run(
            [sys.executable, SCRIPTS / "trainer.py", place, str(STEPS), *more],
            env=environment, check=True, capture_output=True, timeout=200,
        )  # fmt: skip
        assert sorted(path.name for path in place.iterdir()) == ["checkpoint-4", "checkpoint-6"]
    for file in sorted((stock / "checkpoint-6").iterdir()):
        if file.suffix in (".safetensors", ".pth", ".pt"):
            assert (folder / "checkpoint-6" / file.name).read_bytes() == file.read_bytes()
    command = [sys.executable, SCRIPTS / "trainer.py"]
    resumed = [
        losses(mount, command, tmp_path, MORE, place / "checkpoint-6") for place in (folder, stock)
    ]
    assert resumed[0] == resumed[1]
    assert len(resumed[0].splitlines()) == MORE - STEPS


def test_a_loop_of_megatrons_kind_resumes_from_what_the_helper_saved(
    mount: Mount, tmp_path: Path
) -> None:
    command = [sys.executable, SCRIPTS / "megatron.py"]
    environment = mount.environment | {"PYTHONPATH": str(SCRIPTS.parents[2])}
    found = {}
    for place, more in ((mount.path / "megatron", []), (tmp_path / "stock", ["--stock"])):
        place.mkdir()
        into = tmp_path / f"more-{place.name}"
        into.mkdir()
        for words in ([place, STEPS, *more], [into, MORE, place, *more]):
            done = subprocess.run(
                [*command, *map(str, words)],
                env=environment, check=True, capture_output=True, text=True, timeout=200,
            )  # fmt: skip
        found[place.name] = done.stdout
        files = sorted(path.relative_to(place) for path in place.rglob("*") if path.is_file())
        saved = [f"iter_{n:07d}/mp_rank_00/model_optim_rng.pt" for n in (2, 4, 6)]
        assert [*map(str, files)] == [*saved, "latest_checkpointed_iteration.txt"]
        assert (place / "latest_checkpointed_iteration.txt").read_text() == "6"
    assert found["megatron"] == found["stock"]
    assert len(found["stock"].splitlines()) == MORE - STEPS
