"""What is wrong is told in one line, with what to do, before anything is made."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmstorfs import host
from lmstorfs.control_client import socket_address
from lmstorfs.units import format_size

Run = Callable[..., "subprocess.CompletedProcess[str]"]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can rearrange mounts")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "mnt").mkdir()
    return tmp_path


@pytest.fixture
def environment(base: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LMSTORFS_", "AWS_"))}
    return kept | {
        "LMSTORFS_RUN_DIR": str(base / "run"),
        "LMSTORFS_CONFIG": str(base / "lmstorfs.toml"),
        "XDG_STATE_HOME": str(base / "xdg"),
    }


@pytest.fixture
def run(base: Path, environment: dict[str, str]) -> Run:
    def run(
        *words: object, wrapper: tuple[str, ...] = (), **more: str
    ) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*wrapper, sys.executable, "-m", "lmstorfs.cli", *map(str, words)],
            capture_output=True,
            text=True,
            env=environment | more,
            timeout=120,
            check=False,
        )

    return run


@pytest.fixture
def refused(base: Path, run: Run) -> Callable[..., str]:
    """Run a mount that must fail; return its one line without the program's name."""

    def refused(*words: object, code: int = 1, **how: object) -> str:
        before = sorted(base.rglob("*"))
        done = run("mount", *words, **how)
        assert done.returncode == code, done.stderr
        assert done.stdout == ""
        assert done.stderr.startswith("lmstorfs: ")
        assert done.stderr.endswith("\n")
        assert done.stderr.count("\n") == 1
        assert sorted(base.rglob("*")) == before, "something was left behind"
        return done.stderr.removeprefix("lmstorfs: ").rstrip("\n")

    return refused


# --- the mount point -------------------------------------------------------------------------


def test_no_mount_point(base: Path, refused: Callable[..., str]) -> None:
    path = base / "none"
    assert refused(path) == f"{path} does not exist; run: mkdir -p {path}"


def test_a_file_as_mount_point(base: Path, refused: Callable[..., str]) -> None:
    path = base / "file"
    path.write_text("x")
    assert refused(path) == f"{path} is not a directory; name an empty one"


def test_a_mount_point_with_files(base: Path, refused: Callable[..., str]) -> None:
    (base / "mnt" / "x").touch()
    assert refused(base / "mnt") == (
        f"{base}/mnt is not empty; a mount would hide its files, name another"
    )


# --- words -----------------------------------------------------------------------------------


def test_an_unknown_option(base: Path, refused: Callable[..., str]) -> None:
    said = refused(base / "mnt", "--rma", "1G", code=2)
    assert said.startswith("No such option: --rma")
    assert said.endswith("; see lmstorfs mount --help")


def test_no_mount_point_named(refused: Callable[..., str]) -> None:
    assert refused(code=2) == "Missing argument 'MOUNTPOINT'; see lmstorfs mount --help"


def test_an_unknown_o(base: Path, refused: Callable[..., str]) -> None:
    assert refused(base / "mnt", "-o", "worker=3", code=2) == (
        "-o worker: there is no such option; did you mean workers?"
    )


def test_an_unknown_key_in_the_file(base: Path, refused: Callable[..., str]) -> None:
    file = base / "lmstorfs.toml"
    file.write_text(f'[mount."{base}/mnt"]\nstor = "/x"\n')
    assert refused(base / "mnt", code=2) == (
        f'{file} [mount."{base}/mnt"]: there is no setting stor; did you mean store?'
    )


def test_an_unknown_fsync_policy(base: Path, refused: Callable[..., str]) -> None:
    assert refused(base / "mnt", "--fsync", "mirror", code=2) == (
        "--fsync: 'mirror' is none of copy, store, ram"
    )


# --- memory and disks ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ram", "said"),
    [
        ("much", "--ram: 'much' is no size; write for example 512M, 16G or 1.5T"),
        ("-1G", "--ram: '-1G' is no size; write for example 512M, 16G or 1.5T"),
        ("0", "--ram: '0' is too little: a RAM tier needs 16 MiB at least"),
        ("15M", "--ram: '15M' is too little: a RAM tier needs 16 MiB at least"),
    ],
)
def test_a_ram_tier_of_no_use(base: Path, refused: Callable[..., str], ram: str, said: str) -> None:
    assert refused(base / "mnt", f"--ram={ram}", code=2) == said


def test_more_ram_than_there_is(base: Path, refused: Callable[..., str]) -> None:
    said = refused(base / "mnt", "--ram", "900T")
    total = format_size(host.memory().total)
    assert said.startswith(f"--ram: 900 TiB is more than the {total} that ")


def test_no_directory_for_the_ssd_tier(base: Path, refused: Callable[..., str]) -> None:
    assert refused(base / "mnt", "--ssd", f"{base}/nvme:1G") == (
        f"--ssd: the directory {base}/nvme does not exist; run: mkdir -p {base}/nvme"
    )


@pytest.mark.parametrize("ssd", ["/nvme", ":1G", "/nvme:", "nvme"])
def test_an_ssd_tier_of_bad_form(base: Path, refused: Callable[..., str], ssd: str) -> None:
    assert refused(base / "mnt", "--ssd", ssd, code=2) == (
        f"--ssd: '{ssd}' is not DIR:SIZE; write for example /nvme:500G"
    )


def test_an_ssd_tier_larger_than_its_disk(base: Path, refused: Callable[..., str]) -> None:
    (base / "nvme").mkdir()
    said = refused(base / "mnt", "--ssd", f"{base}/nvme:900P")
    assert said.startswith("--ssd: 900 PiB is more than the ")
    assert said.endswith(f" of the disk that holds {base}/nvme")


# --- places ----------------------------------------------------------------------------------


def test_a_mount_point_inside_the_store(base: Path, refused: Callable[..., str]) -> None:
    assert refused(base / "mnt", "--store", base) == (
        f"the mount point {base}/mnt lies inside the store {base}"
    )


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_store_inside_the_mount_point(
    base: Path, refused: Callable[..., str], scheme: str
) -> None:
    assert refused(base / "mnt", "--store", f"{scheme}{base}/mnt/store") == (
        f"the store {base}/mnt/store lies inside the mount point {base}/mnt"
    )


def test_a_mount_point_inside_the_state_directory(base: Path, refused: Callable[..., str]) -> None:
    assert refused(base / "mnt", "--state", base) == (
        f"the mount point {base}/mnt lies inside the state directory {base}"
    )


def test_a_state_directory_inside_the_mount_point(base: Path, refused: Callable[..., str]) -> None:
    assert refused(base / "mnt", "--state", base / "mnt" / "state") == (
        f"the state directory {base}/mnt/state lies inside the mount point {base}/mnt"
    )


def test_an_ssd_tier_inside_the_store(base: Path, refused: Callable[..., str]) -> None:
    (base / "store" / "nvme").mkdir(parents=True)
    assert refused(base / "mnt", "--store", base / "store", "--ssd", f"{base}/store/nvme:16M") == (
        f"the SSD tier {base}/store/nvme lies inside the store {base}/store"
    )


def test_a_state_directory_that_is_something_else(base: Path, refused: Callable[..., str]) -> None:
    home = base / "home"
    home.mkdir()
    (home / "thesis.tex").touch()
    assert refused(base / "mnt", "--state", home) == (
        f"{home} holds other files and is no state directory; name a new or empty one"
    )
    assert refused(base / "mnt", "--state", home / "thesis.tex") == (
        f"the state directory {home}/thesis.tex is not a directory; name another"
    )
    assert refused(base / "mnt", "--state", home / "thesis.tex" / "below") == (
        f"the state directory {home}/thesis.tex/below is not a directory; name another"
    )


# --- the store -------------------------------------------------------------------------------


def test_an_unknown_scheme(base: Path, refused: Callable[..., str]) -> None:
    said = refused(base / "mnt", "--store", "gopher://x/y", code=2)
    assert "gopher://" in said
    assert "s3://" in said


def test_a_store_that_is_not_there(base: Path, refused: Callable[..., str]) -> None:
    assert f"{base}/store" in refused(base / "mnt", "--store", base / "store")


def test_a_store_that_is_a_file(base: Path, refused: Callable[..., str]) -> None:
    (base / "store").touch()
    assert f"{base}/store" in refused(base / "mnt", "--store", base / "store")


@needs_root
def test_a_store_that_cannot_be_written(base: Path, refused: Callable[..., str]) -> None:
    (base / "store").mkdir()
    script = 'mount -t tmpfs -o ro none "$1" && shift && exec "$@"'
    wrapper = ("unshare", "-m", "sh", "-c", script, "sh", str(base / "store"))
    said = refused(base / "mnt", "--store", base / "store", wrapper=wrapper)
    assert f"{base}/store" in said
    assert "writ" in said


# --- this host -------------------------------------------------------------------------------


@needs_root
def test_no_fuse_device(base: Path, refused: Callable[..., str]) -> None:
    script = 'mount --bind /dev/null /dev/fuse && exec "$@"'
    assert refused(base / "mnt", wrapper=("unshare", "-m", "sh", "-c", script, "sh")) == (
        "there is no /dev/fuse; load the module: modprobe fuse; in a container give it "
        "--device /dev/fuse"
    )


@needs_root
def test_root_that_may_not_mount(base: Path, refused: Callable[..., str]) -> None:
    wrapper = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin")
    assert refused(base / "mnt", wrapper=wrapper) == (
        "root has no CAP_SYS_ADMIN here, so it cannot mount; give the container --cap-add SYS_ADMIN"
    )


@pytest.mark.parametrize("installed", [False, True])
def test_a_user_without_fusermount(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(host, "may_mount", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda _name: "/usr/bin/x" if installed else None)
    expected = "only root can mount without fusermount3; install it (package fuse3), or run as root"
    assert host.mount_privilege_problem() == (None if installed else expected)


# --- a state directory in use ----------------------------------------------------------------

HOLD = """
import fcntl, os, sys
lock = open(sys.argv[1] + "/lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
lock.write(f"{os.getpid()}\\n")
lock.flush()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def held(base: Path) -> Iterator["subprocess.Popen[str]"]:
    """A state directory whose lock another process holds, for a mount point elsewhere."""
    state = base / "state"
    state.mkdir(mode=0o700)
    config = {
        "mountpoint": "/elsewhere",
        "state_dir": str(state),
        "store": {"url": "/s"},
        "ram_bytes": 1 << 30,
    }
    (state / "mount.json").write_text(json.dumps(config))
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(state)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with holder:  # closes its stdin and waits
        yield holder


def serve_status(state: Path, status: dict[str, object], asked: threading.Event) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX)
    with socket_address(state / "control.sock") as address:
        listening.bind(address)
    listening.listen()

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                connection.recv(1 << 16)
                connection.sendall(json.dumps({"result": status}).encode() + b"\n")
            asked.set()

    threading.Thread(target=serve, daemon=True).start()
    return listening


def test_a_state_directory_in_use(
    base: Path, refused: Callable[..., str], held: "subprocess.Popen[str]"
) -> None:
    with serve_status(base / "state", {"state": "ready"}, threading.Event()) as listening:
        said = refused(base / "mnt", "--state", base / "state", "--ram", "16M")
        listening.shutdown(socket.SHUT_RDWR)
    assert said == (
        f"the state directory {base}/state is in use by /elsewhere (pid {held.pid}); "
        "run: lmstorfs unmount /elsewhere, or give another --state"
    )


def test_a_draining_mount_is_waited_for(
    base: Path, run: Run, held: "subprocess.Popen[str]"
) -> None:
    asked = threading.Event()
    done = []
    words = ("mount", base / "mnt", "--state", base / "state", "--store", base / "none")
    with serve_status(base / "state", {"state": "draining"}, asked) as listening:
        thread = threading.Thread(target=lambda: done.append(run(*words)))
        thread.start()
        assert asked.wait(60)
        assert held.stdin is not None
        held.stdin.close()  # drained
        held.wait()
        thread.join(60)
        listening.shutdown(socket.SHUT_RDWR)
    waiting, last = done[0].stderr.splitlines()
    assert waiting == (
        "lmstorfs: waiting until the earlier mount of /elsewhere has drained into its store"
    )
    assert f"{base}/none" in last  # went on to the next check


# --- commands without a mount ----------------------------------------------------------------


@pytest.mark.parametrize("command", ["status", "checkpoints", "sync"])
def test_a_command_without_any_mount(run: Run, command: str) -> None:
    done = run(command)
    assert (done.returncode, done.stderr) == (
        1,
        "lmstorfs: there is no mount; make one: lmstorfs mount /ckpt\n",
    )


@pytest.mark.parametrize("command", ["status", "checkpoints", "sync", "latest"])
def test_a_path_outside_of_any_mount(base: Path, run: Run, command: str) -> None:
    done = run(command, base)
    assert done.returncode == 1
    assert done.stderr == (
        f"lmstorfs: {base} is in no lmstorfs mount; there is none: lmstorfs mount /ckpt makes one\n"
    )


def test_unmount_of_what_is_not_mounted(base: Path, run: Run) -> None:
    done = run("unmount", base)
    assert (done.returncode, done.stderr) == (1, f"lmstorfs: {base} is not mounted\n")


def test_version_and_help(run: Run) -> None:
    assert run("--version").stdout.startswith("lmstorfs ")
    for command in ("mount", "status", "checkpoints", "sync", "unmount", "doctor"):
        done = run(command, "--help")
        assert done.returncode == 0
        assert f"lmstorfs {command}" in done.stdout.split("Example")[-1]
        assert max(map(len, done.stdout.splitlines())) <= 80


def test_the_doctor_looks_at_a_store(base: Path, run: Run) -> None:
    done = run("doctor", "--json", "--store", base / "none")
    answer = json.loads(done.stdout)
    assert answer["checks"][-1]["level"] == "fail"
    assert (answer["ok"], done.returncode) == (False, 1)
    assert "can be read and written" in " ".join(run("doctor", "--store", base).stdout.split())
