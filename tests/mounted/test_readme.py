"""Every command in the README works as it stands there; only its paths are put into a sandbox."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lmstorfs import mounts
from lmstorfs.settings import from_file
from tests.mounting import Mount, mounted
from tests.s3servers import free_port, rclone_s3

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SCRIPTS = ("mount/demo", "tests/run")  # both set the machine up first, which a test must not


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[list[str]]:
    """Return the README's commands in its order."""
    lines = "\n".join(blocks("bash")).splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


TRAIN = "import torch; torch.save({{'step': 1}}, {path!r})"

TRAINING = """
import torch
import torch.distributed.checkpoint as dcp
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.AdamW(model.parameters())
batches = [torch.rand(2, 3)] * 2
def train(batch):
    model(batch).mean().backward()
    optimizer.step()
state = model.state_dict()
"""


class Sandbox:
    """Runs the README's commands with its places moved into a folder."""

    def __init__(self, folder: Path, places: dict[str, str]) -> None:
        self.folder = folder
        self.mount = Mount(folder, environment={"XDG_STATE_HOME": str(folder / "home")})
        self.places = {**places, "/ckpt": str(self.mount.path)}
        self.mirror: subprocess.Popen[str] | None = None

    def moved(self, word: str) -> str:
        if word.startswith("/ckpt/"):
            return self.places["/ckpt"] + word.removeprefix("/ckpt")
        return self.places.get(word, word)

    def run(self, words: list[str]) -> None:
        """Run one command; a mount begins afresh, and a checkpoint that is named is there."""
        if words[0] == "install":
            line = shlex.join(words).replace("'<(head'", "<(head").replace("'|'", "|")
            line = line.replace("'base64)'", "base64)")
            subprocess.run(["bash", "-c", line], check=True)
            return
        words = [self.moved(word) for word in words[1:]]
        if words[0] == "mirror":
            self.begin_mirror(words)
            return
        if "--recover-from" in words:
            self.lose_node()
        elif words[0] == "mount":
            self.mount.run("unmount", self.mount.path)
        elif words[0] in ("sync", "wait"):
            Path(words[1]).mkdir(exist_ok=True)
            (Path(words[1]) / "model.pt").write_bytes(b"x")
        elif words[0] == "undelete" and len(words) > 1:
            self.save_and_delete(Path(words[1]))
        elif words[0] == "run":
            Path(words[-1]).write_text(TRAIN.format(path=str(self.mount.path / "trained.pt")))
        done = self.mount.run(*words)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"

    def save_and_delete(self, checkpoint: Path) -> None:
        shutil.rmtree(checkpoint, ignore_errors=True)
        checkpoint.mkdir()
        (checkpoint / "model.pt").write_bytes(b"the only one")
        self.mount.sync()
        shutil.rmtree(checkpoint)

    def begin_mirror(self, words: list[str]) -> None:
        command = [sys.executable, "-m", "lmstorfs.cli", *words]
        self.mirror = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=self.mount.environment
        )
        assert self.mirror.stdout is not None
        assert self.mirror.stdout.readline().startswith("keeping replicas at ")

    def lose_node(self) -> None:
        """The node that the README's mount runs on is gone, with all that it had."""
        for state in self.states():
            self.mount.state = state
            self.mount.clean_up()
            shutil.rmtree(state)

    def states(self) -> list[Path]:
        home = self.folder / "home" / "lmstorfs"
        return [path for path in home.glob("*") if path.name != "~mirror"]

    def clean_up(self) -> None:
        self.mount.run("unmount", self.mount.path)
        self.lose_node()
        if self.mirror is not None:
            self.mirror.terminate()
            self.mirror.wait(30)
        ram = self.folder / "home" / "lmstorfs" / "~mirror" / "ram"
        while mounts.mounted_at(str(ram)):
            mounts.detach(str(ram))


def test_every_command_works(tmp_path: Path) -> None:
    (tmp_path / "nfs").mkdir()
    ran = []
    with rclone_s3(tmp_path / "s3") as server:
        places = {
            "/nfs/team/ckpt": str(tmp_path / "nfs"),
            "s3://bucket/run-7": f"s3://{server.bucket}/run-7",
            "endpoint=http://127.0.0.1:9000": f"endpoint={server.endpoint}",
            "64G": "64M",
            "256G": "64M",
            "10.0.0.2:7070": f"127.0.0.1:{free_port()}",
            "/etc/lmstorfs.key": str(tmp_path / "key"),
            "python": sys.executable,
            "torchrun": str(Path(sys.executable).with_name("torchrun")),
            "train.py": str(tmp_path / "train.py"),
            "8": "2",
        }
        sandbox = Sandbox(tmp_path, places)
        try:
            for words in commands():
                if words[0] in SCRIPTS:
                    continue
                assert words[0] in ("lmstorfs", "install"), words
                sandbox.run([sandbox.moved(word) for word in words])
                ran.append(words[1])
        finally:
            sandbox.clean_up()
    wanted = {"doctor", "mount", "status", "checkpoints", "sync", "latest", "unmount", "mirror"}
    assert wanted | {"wait", "run", "undelete"} <= set(ran)


def test_the_helpers_lines_work(tmp_path: Path) -> None:
    with mounted(tmp_path, "--ram", "64M") as mount:
        text = TRAINING + "\n".join(blocks("python")).replace("/ckpt", str(mount.path))
        text += "future.result()\n"
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", text],
            capture_output=True, text=True, check=False, env=mount.environment,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        assert sorted(path.name for path in mount.path.iterdir()) == ["step-0.pt", "step-100"]


@pytest.mark.parametrize("text", blocks("toml"))
def test_the_settings_file_is_understood(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lmstorfs.toml"
    path.write_text(text)
    given = from_file(path, "/ckpt")
    assert {"store", "ram", "fsync"} <= set(given)


def test_the_demo_proves_what_it_says() -> None:
    demo = [sys.executable, ROOT / "mount" / "demo.d" / "demo.py", "--seconds", "5"]
    done = subprocess.run(demo, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all exactly equal" in done.stdout
    assert done.stdout.rstrip().splitlines()[-1].startswith("OK")


def test_the_scripts_are_there() -> None:
    named = [words[0] for words in commands() if words[0] in SCRIPTS]
    assert set(named) == set(SCRIPTS)
    for script in SCRIPTS:
        assert (ROOT / script).stat().st_mode & 0o111, script
