"""`lmstorfs run`: scripts that know nothing of us, on a real mount."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.mounting import Mount, mounted

pytestmark = [
    pytest.mark.mounted,
    pytest.mark.skipif(
        os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs root and /dev/fuse"
    ),
]

# What is slowed down in a script's own process, so that a save is under way while it goes on.
SLOW = """
import os, sys, threading, time
from pathlib import Path
import torch
from lmstorfs.torch.writing import FileWriter
here = Path(sys.argv[1])
run = FileWriter.run
may_go = threading.Event()
def slowly(writer):
    may_go.wait(60)
    run(writer)
FileWriter.run = slowly
assert torch.save.__module__ == "torch.serialization"
assert torch.save.__code__.co_filename.endswith("unedited/patches.py")
state = {"big": torch.arange(1 << 20), "step": 1}
def later():
    threading.Timer(0.3, may_go.set).start()
"""


@pytest.fixture(scope="module")
def mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mount]:
    with mounted(tmp_path_factory.mktemp("unedited"), "--ram", "1G") as made:
        yield made


def script(
    mount: Mount, text: str, folder: Path, *more: object
) -> "subprocess.CompletedProcess[str]":
    """Run a script under `lmstorfs run`, and keep it for a look at what failed."""
    file = mount.state.parent / "script.py"
    file.write_text(text)
    return mount.run("run", "--", sys.executable, file, folder, *more)


def fresh(mount: Mount, name: str) -> Path:
    folder = mount.path / name
    folder.mkdir()
    return folder


def test_the_files_are_the_stock_calls_own(mount: Mount, tmp_path: Path) -> None:
    text = """
import sys, torch
from pathlib import Path
from safetensors.torch import save_file
torch.manual_seed(3)
here = Path(sys.argv[1])
network = torch.nn.Linear(700, 700)
state = {"model": network.state_dict(), "step": 3}
torch.save(state, here / "step-3.pt")
save_file(dict(network.state_dict()), str(here / "model.safetensors"), metadata={"format": "pt"})
for value in network.state_dict().values():
    value.zero_()
"""
    folder = fresh(mount, "stock")
    done = script(mount, text, folder)
    assert (done.returncode, done.stderr) == (0, "")
    torch.manual_seed(3)
    network = torch.nn.Linear(700, 700)
    torch.save({"model": network.state_dict(), "step": 3}, tmp_path / "step-3.pt")
    save_file(network.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    for name in ("step-3.pt", "model.safetensors"):
        assert (folder / name).read_bytes() == (tmp_path / name).read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == ["model.safetensors", "step-3.pt"]


def test_a_save_returns_before_the_file_is_there_and_the_end_waits(mount: Mount) -> None:
    text = (
        SLOW
        + """
torch.save(state, here / "a.pt")
state["big"].zero_()
print("returned", flush=True)
later()
"""
    )
    folder = fresh(mount, "returns")
    done = script(mount, text, folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "returned\n", "")
    assert torch.equal(torch.load(folder / "a.pt")["big"], torch.arange(1 << 20))


@pytest.mark.parametrize(
    "look",
    [
        "assert torch.load(here / 'a.pt')['step'] == 1",
        "assert os.path.getsize(here / 'a.pt') > 8 << 20",
        "assert (here / 'a.pt').exists()",
        "assert len((here / 'a.pt').read_bytes()) > 8 << 20",
        "assert os.listdir(here) == ['a.pt']",
        "assert [entry.name for entry in os.scandir(here)] == ['a.pt']",
        "os.rename(here / 'a.pt', here / 'b.pt'); os.rename(here / 'b.pt', here / 'a.pt')",
        "here.rename(str(here) + '-2'); Path(str(here) + '-2').rename(here)",
        "import subprocess; assert subprocess.call(['test', '-s', here / 'a.pt']) == 0",
        "import shutil; shutil.copyfile(here / 'a.pt', '/dev/null')",
        "os.symlink('a.pt', here / 'l'); assert torch.load(here / 'l'); os.remove(here / 'l')",
        "torch.save({'step': 1}, here / 'a.pt')",
        "os._exit(0)",
    ],
)
def test_whoever_looks_waits(mount: Mount, look: str) -> None:
    folder = fresh(mount, f"looks-{abs(hash(look))}")
    done = script(mount, SLOW + f"torch.save(state, here / 'a.pt')\nlater()\n{look}\n", folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert torch.load(folder / "a.pt")["step"] == 1


@pytest.mark.parametrize(
    "loses",
    ["os.remove(here / 'old.pt')", "(here / 'latest').write_text('a.pt')"],
)
def test_nothing_older_is_lost_before_the_file_is_there(mount: Mount, loses: str) -> None:
    text = (
        SLOW
        + f"""
import sys
torch.save(state, here / "a.pt")
sys.addaudithook(lambda event, _: event == "os.putenv" and os.kill(os.getpid(), 9))
later()
{loses}
os.environ["x"] = "now the process dies"
"""
    )
    folder = fresh(mount, f"loses-{abs(hash(loses))}")
    (folder / "old.pt").write_bytes(b"old")
    (folder / "latest").write_text("old.pt")
    assert script(mount, text, folder).returncode == -signal.SIGKILL
    assert torch.load(folder / "a.pt")["step"] == 1


def test_a_killed_script_leaves_the_old_file(mount: Mount) -> None:
    text = (
        SLOW
        + """
torch.save(state, here / "a.pt")
os.kill(os.getpid(), 9)
"""
    )
    folder = fresh(mount, "killed")
    torch.save({"step": 0}, folder / "a.pt")
    assert script(mount, text, folder).returncode == -signal.SIGKILL
    assert torch.load(folder / "a.pt") == {"step": 0}


def test_other_places_and_other_calls_are_untouched(mount: Mount, tmp_path: Path) -> None:
    text = (
        SLOW
        + """
import io
torch.save(state, sys.argv[2] + "/elsewhere.pt")  # would wait for a minute
torch.save(state, io.BytesIO())
with open(here / "handle.pt", "wb") as file:
    torch.save(state, file)
torch.save(state, here / "old.pt", _use_new_zipfile_serialization=False)
try:
    torch.save(state, here / "no" / "such" / "a.pt")
except RuntimeError as error:
    print(error)
"""
    )
    done = script(mount, text, fresh(mount, "others"), tmp_path)
    assert done.stderr == ""
    assert "does not exist" in done.stdout
    assert torch.load(tmp_path / "elsewhere.pt")["step"] == 1


def test_a_failed_save_is_raised_and_ends_the_script(mount: Mount) -> None:
    text = (
        SLOW
        + """
may_go.set()
def fails(writer, left):
    raise OSError(28, os.strerror(28))
FileWriter._write = fails
torch.save(state, here / "a.pt")
while True:
    torch.save({}, here / "b.pt")
"""
    )
    folder = fresh(mount, "fails")
    done = script(mount, text, folder)
    assert done.returncode == 1
    assert f"SaveError: {folder}/a.pt: No space left on device" in done.stderr
    assert [path.name for path in folder.iterdir() if path.name.startswith("a")] == []


def test_a_save_that_fails_at_the_end_is_told_by_the_exit_code(mount: Mount) -> None:
    text = (
        SLOW
        + """
def fails(writer, left):
    raise OSError(28, os.strerror(28))
FileWriter._write = fails
torch.save(state, here / "a.pt")
later()
"""
    )
    folder = fresh(mount, "fails-at-the-end")
    done = script(mount, text, folder)
    told = f"lmstorfs: {folder}/a.pt: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, told)
    assert list(folder.iterdir()) == []


def test_processes_of_multiprocessing_lose_nothing(mount: Mount) -> None:
    text = """
import sys, torch, multiprocessing
def save(path):
    torch.save({"big": torch.ones(1 << 20)}, path)
if __name__ == "__main__":
    for method in ("spawn", "fork"):
        process = multiprocessing.get_context(method).Process(
            target=save, args=(f"{sys.argv[1]}/{method}.pt",)
        )
        process.start()
        process.join()
        assert process.exitcode == 0
"""
    folder = fresh(mount, "processes")
    done = script(mount, text, folder)
    assert (done.returncode, done.stderr) == (0, "")
    for method in ("spawn", "fork"):
        assert torch.load(folder / f"{method}.pt")["big"].sum() == 1 << 20


def test_ranks_see_a_file_behind_a_barrier(mount: Mount) -> None:
    text = (
        SLOW
        + """
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    torch.save(state, here / "a.pt")
    later()
dist.barrier()
assert torch.load(here / "a.pt")["step"] == 1
dist.destroy_process_group()
"""
    )
    folder = fresh(mount, "ranks")
    file = mount.state.parent / "ranks.py"
    file.write_text(text)
    torchrun = Path(sys.executable).with_name("torchrun")
    done = mount.run("run", "--", torchrun, "--nproc-per-node", 2, "--standalone", file, folder)
    assert done.returncode == 0, done.stderr


def test_the_environments_own_start_is_kept(mount: Mount, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('own')\n")
    mount.environment["PYTHONPATH"] = str(tmp_path)
    try:
        done = mount.run("run", "--", sys.executable, "-c", "print('script')")
    finally:
        del mount.environment["PYTHONPATH"]
    own = "own\n"  # once for the command, which is Python, too
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{own}{own}script\n", "")


def test_a_program_that_is_not_there_is_told(mount: Mount) -> None:
    done = mount.run("run", "--", "no-such-program", "--option")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no-such-program: there is no such program" in done.stderr
