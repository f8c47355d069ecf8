"""Nodes for tests: mounts and mirrors on hosts of their own, that die, reboot and come back."""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from lmstorfs import mounts
from lmstorfs.digest import digest_file
from tests.mounting import Mount, wait_for
from tests.namespaces import Host, network

PORT = 7070
MIB = 1 << 20


class MirrorNode:
    """`lmstorfs mirror` on a host."""

    def __init__(self, host: Host, folder: Path, secret: Path, ram: str) -> None:
        self.host = host
        self.address = f"{host.address}:{PORT}"
        self.state = folder / "mirror"
        self.log = folder / "mirror.log"
        self._secret = secret
        self.ram = ram
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start it; return when it listens."""
        words = ["mirror", "--listen", self.address, "--ram", self.ram, "--state", self.state]
        words += ["--secret-file", self._secret]
        command = [*self.host.prefix, sys.executable, "-m", "lmstorfs.cli", *map(str, words)]
        with self.log.open("a") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        assert said == f"keeping replicas at {self.address}\n", self.log.read_text()

    def kill(self) -> None:
        """End it by SIGKILL; what it holds stays in its tmpfs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None

    def lose_ram(self) -> None:
        """Let its memory go, as a reboot does; it must not run."""
        while mounts.mounted_at(str(self.state / "ram")):
            mounts.detach(str(self.state / "ram"))

    def replicas(self) -> list[Path]:
        """Return the files of whole replicas."""
        found = (self.state / "ram" / "replicas").glob("*/[0-9]*")
        return [path for path in found if path.name.isdecimal()]

    def clean_up(self) -> None:
        """Leave nothing running and nothing mounted."""
        self.kill()
        self.lose_ram()


class Cluster:
    """Nodes that share one mount point (one at a time), a store in a directory, and a secret."""

    def __init__(self, folder: Path, hosts: dict[str, Host], ram: str) -> None:
        self.folder = folder
        self.hosts = hosts
        self.store = folder / "objects"
        self.store.mkdir()
        self.secret = folder / "secret"
        self.secret.write_text("a secret of the tests' own\n")
        self.secret.chmod(0o600)
        self.mirror = MirrorNode(hosts["mirror"], folder, self.secret, ram)
        self.nodes: list[Mount] = []

    def node(self, name: str, *options: object, mirror: str = "--mirror") -> Mount:
        """Return a node that is not mounted yet; `mirror` is how it is told of the mirror."""
        home = self.folder / f"{name}-{len(self.nodes)}"
        home.mkdir()
        peer = (mirror, self.mirror.address, "--secret-file", self.secret) if mirror else ()
        node = Mount(home, "--store", self.store, "--ram", "1G", *peer, *options)
        node.prefix = self.hosts[name].prefix
        if self.nodes:
            node.path.rmdir()
            node.path = self.nodes[0].path
        self.nodes.append(node)
        return node

    def dies(self, node: Mount) -> None:
        """The node goes down at once: its processes, its RAM and its mount are gone."""
        node.kill()
        for target in (str(node.path), str(node.state / "ram")):
            while mounts.mounted_at(target):
                mounts.detach(target)

    def is_lost(self, node: Mount) -> None:
        """The node dies and its disk is gone, too."""
        self.dies(node)
        shutil.rmtree(node.state)

    @contextmanager
    def store_away(self) -> Iterator[None]:
        """Cut everybody off the store."""
        aside = self.store.with_name("aside")
        self.store.rename(aside)
        try:
            yield
        finally:
            aside.rename(self.store)

    def clean_up(self) -> None:
        for node in self.nodes:
            node.clean_up()
        self.mirror.clean_up()


@contextmanager
def cluster(folder: Path, *, ram: str = "1G", outside: bool = False) -> Iterator[Cluster]:
    """Give hosts `old`, `new` and `mirror`, the mirror running; leave nothing behind.

    With `outside` they also reach what the test itself serves, as in `network`.
    """
    with network("old", "new", "mirror", outside=outside) as hosts, ExitStack() as stack:
        made = Cluster(folder, hosts, ram)
        stack.callback(made.clean_up)
        made.mirror.start()
        yield made


def mirrored(node: Mount, timeout_s: float = 60.0) -> None:
    """Return when the mirror has all that is on the node, and answers."""

    def whole() -> bool:
        found = node.status()["mirror"]
        return bool(found["state"] == "ok" and found["lag_bytes"] == 0)

    wait_for(whole, "the mirror has all", timeout_s)
    done = node.run("wait", node.path, "--copies", "2", "--timeout", str(timeout_s))
    assert done.returncode == 0, done.stderr


def recovered(node: Mount) -> None:
    """Return when nothing is missing any more."""
    wait_for(lambda: node.status()["recovery"]["missing_files"] == 0, "nothing is missing")


class Entry(NamedTuple):
    """What a name stands for."""

    mode: int
    mtime_ns: int
    content: str | None
    """A file's digest, a symlink's target."""
    xattrs: dict[str, bytes]


def tree(folder: Path, *, read: bool = True) -> dict[str, Entry]:
    """Return all that is below `folder`; without `read` no file is opened."""
    found = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        content, xattrs = None, {}
        if stat.S_ISLNK(status.st_mode):
            content = str(path.readlink())
        else:
            xattrs = {name: os.getxattr(path, name) for name in os.listxattr(path)}
        if read and stat.S_ISREG(status.st_mode):
            content = digest_file(path)
        entry = Entry(status.st_mode, status.st_mtime_ns, content, xattrs)
        found[str(path.relative_to(folder))] = entry
    return found


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files below `folder`."""
    found = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}
