"""Every command in the README works as it stands there; only its paths are put into a sandbox."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lmstorfs.settings import from_file
from tests.mounting import Mount
from tests.s3servers import rclone_s3

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SCRIPTS = ("mount/demo", "tests/run")  # both set the machine up first, which a test must not


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[list[str]]:
    """Return the README's commands in its order."""
    lines = "\n".join(blocks("bash")).splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def test_every_command_works(tmp_path: Path) -> None:
    mount = Mount(tmp_path, environment={"XDG_STATE_HOME": str(tmp_path / "home")})
    (tmp_path / "nfs").mkdir()
    ran = []
    with rclone_s3(tmp_path / "s3") as server:
        places = {
            "/ckpt": str(mount.path),
            "/nfs/team/ckpt": str(tmp_path / "nfs"),
            "s3://bucket/run-7": f"s3://{server.bucket}/run-7",
            "endpoint=http://127.0.0.1:9000": f"endpoint={server.endpoint}",
            "64G": "64M",
        }
        try:
            for words in commands():
                if words[0] in SCRIPTS:
                    continue
                assert words[0] == "lmstorfs", words
                run_one(mount, [sandboxed(word, places) for word in words[1:]])
                ran.append(words[1])
        finally:
            clean_up(mount, tmp_path)
    assert {"doctor", "mount", "status", "checkpoints", "sync", "latest", "unmount"} <= set(ran)


def sandboxed(word: str, places: dict[str, str]) -> str:
    if word.startswith("/ckpt/"):
        return places["/ckpt"] + word.removeprefix("/ckpt")
    return places.get(word, word)


def run_one(mount: Mount, words: list[str]) -> None:
    """Run one command; a mount begins afresh, and a checkpoint that is named is there."""
    if words[0] == "mount":
        mount.run("unmount", mount.path)
    elif words[0] == "sync":
        Path(words[1]).mkdir(exist_ok=True)
        (Path(words[1]) / "model.pt").write_bytes(b"x")
    done = mount.run(*words)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"


def clean_up(mount: Mount, folder: Path) -> None:
    mount.run("unmount", mount.path)
    for state in (folder / "home" / "lmstorfs").glob("*"):
        mount.state = state
        mount.clean_up()


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
