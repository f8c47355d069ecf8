"""The ways back to a checkpoint, each as a turn: the recovery ladder, and a copy by rclone."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.contenders import COMMAND_TIMEOUT_S, Target, Workspace, mount_tmpfs
from bench.loader import digest_of
from bench.nodes import (
    STORE_LATER,
    lose,
    mount,
    node,
    peer_options,
    start_mirror,
    start_node,
    wait_for_copies,
    wait_until_mirrored,
)
from bench.rivals import program
from bench.turns import Turn, nothing
from bench.workloads import Case, state_dict
from lmstorfs.units import MIB, format_size
from tests.mounting import Mount
from tests.namespaces import Host
from tests.nodes import MirrorNode
from tests.s3servers import BUCKET, S3Server

NAME = "step-1/model.pt"
STORED = "stored"  # the prefix of what the store has
MOUNT = "lmstorfs mount, before"
LOAD, MAPPED = "torch.load", "torch.load mmap"
HOW = {LOAD: "copy", MAPPED: "mmap"}  # what loader.py is told in which case
PROGRAM = Path(__file__).parent / "loader.py"


# --- the process that goes on ----------------------------------------------------------------


class Loader:
    """A process that has imported torch and waits for a path."""

    def __init__(self, case: Case, expected: tuple[int, str]) -> None:
        self._expected = expected
        self._process = subprocess.Popen(
            [sys.executable, PROGRAM, HOW[case.name]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise OSError("loader.py did not start")

    def load(self, path: Path) -> tuple[float, float]:
        """Let it load; return when that began and ended. Raises where the content is wrong."""
        said, _ = self._process.communicate(f"{path}\n", timeout=COMMAND_TIMEOUT_S)
        if self._process.returncode:
            raise OSError("torch.load failed")
        started, ended, size, digest = said.split()
        if (int(size), digest) != self._expected:
            raise OSError(f"torch.load brought {size} bytes with another digest")
        return float(started), float(ended)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


# --- where from ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    """The file that all contenders bring back, on a tmpfs, and what is in it."""

    path: Path
    content: tuple[int, str]

    def copy_to(self, directory: Path) -> None:
        target = directory / NAME
        target.parent.mkdir()
        shutil.copyfile(self.path, target)


def make_checkpoint(place: Workspace, stack: ExitStack, size: int) -> Checkpoint:
    directory = place.folder("tmpfs")
    mount_tmpfs(directory, place.ram_bytes, stack)
    path = directory / "model.pt"
    state = state_dict(size)
    torch.save(state, path)
    made = Checkpoint(path, digest_of(state))
    state_dict.cache_clear()  # its memory is for those that are measured
    return made


class Site:
    """A node, its mirror and the store; each way back is a method that gets its turn ready."""

    def __init__(self, hosts: dict[str, Host], server: S3Server, checkpoint: Checkpoint) -> None:
        self._host = hosts["node"]
        self._mirror_host = hosts["mirror"]
        self._server = server
        self._checkpoint = checkpoint
        self._node: Mount | None = None
        self._mirror: MirrorNode | None = None
        self._new: Mount | None = None

    # --- starting ----------------------------------------------------------------------------

    def start_tmpfs(self, _place: Workspace, _stack: ExitStack) -> Target:
        return Target(self._checkpoint.path.parent, "the file as it lies; nothing can be faster")

    def start_ladder(self, place: Workspace, stack: ExitStack) -> Target:
        """Mount the node whose checkpoint is in RAM and at its mirror, and not in the store."""
        if self._node is None:
            base = place.folder("ladder")
            self._mirror = start_mirror(base, self._mirror_host, place.ram_bytes, stack)
            made = self._make_node(base / "node", place, stack, "ladder")
            start_node(made, *peer_options(self._mirror))
            wait_until_mirrored(made)
            self._checkpoint.copy_to(made.path)
            wait_until_mirrored(made)
            self._node = made
        size = format_size(place.ram_bytes)
        return Target(self._node.path, f"--ram {size}, --mirror on the other host, store S3")

    def start_new(self, place: Workspace, stack: ExitStack) -> Target:
        """Bring the checkpoint to the store by a node that is lost then."""
        if self._new is None:
            made = self._make_node(place.folder("new"), place, stack, STORED)
            start_node(made)
            self._checkpoint.copy_to(made.path)
            wait_for_copies(made, made.path, "store")
            lose(made)
            self._new = made
        size = format_size(place.ram_bytes)
        return Target(self._new.path, f"--ram {size}, store S3, an empty node")

    def _make_node(self, folder: Path, place: Workspace, stack: ExitStack, prefix: str) -> Mount:
        store = ("--store", f"s3://{BUCKET}/{prefix}")
        ram = ("--ram", f"{place.ram_bytes // MIB}M")
        options = ("-o", f"restart_limit=1000,endpoint={self._server.endpoint}")
        environment = self._server.environment
        words = (*store, *ram, *STORE_LATER, *options)
        return node(folder, stack, *words, host=self._host, environment=environment)

    def start_rclone(
        self, place: Workspace, stack: ExitStack, name: str, options: list[str]
    ) -> Target:
        self.start_new(place, stack)  # the store is to have something
        directory = place.folder(name)
        program("rclone")
        return Target(directory, " ".join(["rclone copy", *options]) + "; to the local disk")

    # --- turns -------------------------------------------------------------------------------

    def from_tmpfs(self, case: Case, _target: Target) -> Turn:
        return self._plain(case, self._checkpoint.path)

    def from_ram(self, case: Case, target: Target) -> Turn:
        """The training process died: the next one reads what it wrote."""
        return self._plain(case, target.directory / NAME)

    def _plain(self, case: Case, path: Path) -> Turn:
        loader = Loader(case, self._checkpoint.content)

        def timed() -> float:
            started, ended = loader.load(path)
            return ended - started

        return Turn(timed, loader.close)

    def after_kill(self, case: Case, target: Target) -> Turn:
        """The daemon is killed at the moment when the process starts to load."""
        assert self._node is not None
        _keeper, daemon, *_ = self._node.pids()
        loader = Loader(case, self._checkpoint.content)

        def timed() -> float:
            started = time.monotonic()
            os.kill(daemon, signal.SIGKILL)
            _, ended = loader.load(target.directory / NAME)
            return ended - started

        return Turn(timed, loader.close, self._settle)

    def from_mirror(self, case: Case, _target: Target) -> Turn:
        """The node is lost: another takes its place."""
        assert self._node is not None
        assert self._mirror is not None
        lose(self._node)
        options = peer_options(self._mirror, "--recover-from")
        return self._on_new_node(case, self._node, options, nothing, self._settle)

    def from_store(self, case: Case, _target: Target) -> Turn:
        """The node is lost, and so is its mirror."""
        assert self._new is not None
        self._warm()
        made = self._new
        return self._on_new_node(case, made, (), lambda: lose(made), nothing)

    def _on_new_node(
        self,
        case: Case,
        made: Mount,
        options: tuple[object, ...],
        clean_up: Callable[[], None],
        settle: Callable[[], None],
    ) -> Turn:
        loader = Loader(case, self._checkpoint.content)

        def timed() -> float:
            started = time.monotonic()
            mount(made, *options)
            mounted = time.monotonic()
            _, ended = loader.load(made.path / NAME)
            turn.parts[MOUNT] = mounted - started
            return ended - mounted

        def end() -> None:
            loader.close()
            clean_up()

        turn = Turn(timed, end, settle)
        return turn

    def _settle(self) -> None:
        assert self._node is not None
        wait_until_mirrored(self._node)

    def by_rclone(self, case: Case, target: Target, options: list[str]) -> Turn:
        """Copy the file from the store to the disk, and load it from there."""
        self._warm()
        remote = f":s3,provider=Other,env_auth=true,endpoint='{self._server.endpoint}'"
        source = f"{remote}:{BUCKET}/{STORED}/{NAME}"
        command = [*self._host.prefix, str(program("rclone")), "--config", "", "copy", *options]
        environment = {**os.environ, **self._server.environment}
        loader = Loader(case, self._checkpoint.content)

        def timed() -> float:
            started = time.monotonic()
            done = subprocess.run(
                [*command, source, str(target.directory)],
                env=environment,
                capture_output=True,
                text=True,
                timeout=COMMAND_TIMEOUT_S,
                check=False,
            )
            if done.returncode:
                raise OSError(f"rclone copy: {done.stderr.strip()}")
            copied, ended = loader.load(target.directory / Path(NAME).name)
            turn.parts["rclone copy"] = copied - started
            turn.parts["torch.load"] = ended - copied
            return ended - started

        def end() -> None:
            loader.close()
            for path in target.directory.iterdir():
                path.unlink()

        turn = Turn(timed, end)
        return turn

    def _warm(self) -> None:
        """Have the object in the page cache of the server's machine, for everybody alike."""
        assert self._server.folder is not None
        with (self._server.folder / STORED / NAME).open("rb", buffering=0) as file:
            while file.read(MIB):
                pass
