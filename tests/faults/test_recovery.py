"""A node dies: the next one, or the same after its reboot, has all that was acknowledged."""

import errno
import os
import random
import subprocess
import threading
import time
from pathlib import Path

import pytest

from lmstorfs.digest import digest_bytes
from tests.mounting import Mount, wait_for
from tests.nodes import MIB, Cluster, cluster, contents, mirrored, recovered

pytestmark = [
    pytest.mark.mounted,
    pytest.mark.skipif(
        os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs root and /dev/fuse"
    ),
]

SLOW = ("-o", "flush_delay=600")


def synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def seed() -> int:
    return int(os.environ.get("LMSTORFS_TEST_SEED", "0")) or time.time_ns() % 1_000_000


# --- the node is lost ------------------------------------------------------------------------


def test_a_new_node_has_every_fsynced_file_though_the_store_was_away(tmp_path: Path) -> None:
    with cluster(tmp_path) as site:
        old = site.node("old")
        old.start()
        assert list(old.path.iterdir()) == []  # the store's root is known
        with site.store_away():
            wanted = {f"step-1/shard-{n}.bin": os.urandom(n * 3 * MIB + 7) for n in range(5)}
            (old.path / "step-1").mkdir()
            for name, content in wanted.items():
                synced(old.path / name, content)
            (old.path / "step-1" / "link").symlink_to("shard-0.bin")
            os.setxattr(old.path / "step-1/shard-1.bin", "user.note", b"kept")
            (old.path / "step-1/shard-2.bin").chmod(0o600)
            os.utime(old.path / "step-1/shard-3.bin", ns=(5, 10**18))
            folder = os.open(old.path / "step-1", os.O_RDONLY)
            os.fsync(folder)  # the names and attributes, too
            os.close(folder)
            site.is_lost(old)

            new = site.node("new", mirror="--recover-from")
            new.start()
            assert sorted(p.name for p in (new.path / "step-1").iterdir()) == sorted(
                [*(name.partition("/")[2] for name in wanted), "link"]
            )
            assert contents(new.path) == wanted
            assert (new.path / "step-1/link").readlink() == Path("shard-0.bin")
            assert os.getxattr(new.path / "step-1/shard-1.bin", "user.note") == b"kept"
            assert (new.path / "step-1/shard-2.bin").stat().st_mode & 0o777 == 0o600
            assert (new.path / "step-1/shard-3.bin").stat().st_mtime_ns == 10**18
            recovered(new)
            assert new.status()["recovery"]["from_mirror_files"] == len(wanted)
            latest = new.run("latest", new.path)
            assert latest.stdout == f"{new.path}/step-1\n"
        new.sync()
        assert contents(site.store) | wanted == contents(site.store)


class Saver(threading.Thread):
    """Saves and fsyncs files until its node dies; remembers what was acknowledged."""

    def __init__(self, folder: Path, number: int) -> None:
        super().__init__()
        self.folder = folder
        self.random = random.Random(number)
        self.number = number
        self.acknowledged: dict[str, str] = {}
        self.begun: dict[str, set[str]] = {}

    def run(self) -> None:
        for step in range(1000):
            name = f"writer-{self.number}/file-{step % 7}"
            content = self.random.randbytes(self.random.randint(1, 2 * MIB))
            digest = digest_bytes(content)
            self.begun.setdefault(name, set()).add(digest)
            before = self.acknowledged.pop(name, None)
            try:
                synced(self.folder / name, content)
            except OSError:
                if before is not None:
                    self.begun[name].add(before)
                return
            self.acknowledged[name] = digest


@pytest.mark.parametrize("round_", range(3))
def test_whatever_the_moment_what_fsync_promised_is_there(tmp_path: Path, round_: int) -> None:
    moment = random.Random(seed() + round_)
    with cluster(tmp_path) as site:
        old = site.node("old", "-o", "flush_delay=0.05")
        old.start()
        savers = [Saver(old.path, number) for number in range(3)]
        for saver in savers:
            (old.path / f"writer-{saver.number}").mkdir()
            saver.start()
        time.sleep(moment.uniform(0.5, 2.5))  # the moment of the node's death
        site.is_lost(old)
        for saver in savers:
            saver.join(60)
        new = site.node("new", mirror="--recover-from")
        new.start()
        acknowledged = sum(len(saver.acknowledged) for saver in savers)
        assert acknowledged > 0
        for saver in savers:
            for name, digest in saver.acknowledged.items():
                try:
                    found = digest_bytes((new.path / name).read_bytes())
                except OSError as error:
                    found = f"{error}; {new.log()}"
                assert found == digest, f"{name} of {acknowledged}, seed {seed()}"


def test_a_read_waits_for_its_own_file_alone(tmp_path: Path) -> None:
    with cluster(tmp_path) as site:
        old = site.node("old", *SLOW)
        old.start()
        big = os.urandom(60 * MIB)
        (old.path / "big.bin").write_bytes(big)
        (old.path / "small").write_bytes(b"small")
        mirrored(old)
        site.is_lost(old)
        site.hosts["mirror"].link.slow(10 * MIB)
        new = site.node("new", *SLOW, mirror="--recover-from")
        new.start()
        assert (new.path / "small").read_bytes() == b"small"
        status = new.status()
        assert (status["state"], status["recovery"]["missing_files"]) == ("recovering", 1)
        new.sync()  # waits for what is still to come, too
        assert (site.store / "big.bin").read_bytes() == big
        assert (new.path / "big.bin").read_bytes() == big
        site.hosts["mirror"].link.restore()


# --- reboot ----------------------------------------------------------------------------------


def test_after_a_reboot_dirty_versions_come_back_and_go_to_the_store(tmp_path: Path) -> None:
    with cluster(tmp_path) as site:
        node = site.node("old", *SLOW)
        node.start()
        (node.path / "stored.bin").write_bytes(b"stored before")
        node.sync()
        with site.store_away():
            wanted = {f"file-{n}": os.urandom(1000 * n + 1) for n in range(20)}
            for name, content in wanted.items():
                (node.path / name).write_bytes(content)
            mirrored(node)
            site.dies(node)
            node.start()
            assert {name: (node.path / name).read_bytes() for name in wanted} == wanted
            recovered(node)
            assert node.status()["recovery"]["from_mirror_files"] >= len(wanted)
        node.sync()
        found = contents(site.store)
        assert {name: found[name] for name in wanted} == wanted


def test_without_a_mirror_what_was_lost_is_named_and_fails_to_read(tmp_path: Path) -> None:
    with cluster(tmp_path) as site:
        node = site.node("old", *SLOW, mirror="")
        node.start()
        (node.path / "step-1").mkdir()
        (node.path / "step-1" / "model.pt").write_bytes(b"x" * 1000)
        site.dies(node)
        node.start()
        status = node.status()
        assert status["state"] == "degraded"
        assert "no copy left: step-1/model.pt" in status["reasons"]
        with pytest.raises(OSError) as caught:  # noqa: PT011 - its errno is looked at
            (node.path / "step-1/model.pt").read_bytes()
        assert caught.value.errno == errno.EIO
        assert node.run("latest", node.path).returncode == 1
        (node.path / "step-1" / "model.pt").write_bytes(b"y" * 10)  # a new save ends it
        assert (node.path / "step-1/model.pt").read_bytes() == b"y" * 10


# --- both are gone ---------------------------------------------------------------------------


def test_with_node_and_mirror_gone_the_store_has_the_newest_whole_checkpoint(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path) as site:
        old = site.node("old", "-o", "flush_delay=0")
        old.start()
        (old.path / "step-1").mkdir()
        wanted = {f"step-1/part-{n}.pt": os.urandom(MIB + n) for n in range(3)}
        for name, content in wanted.items():
            (old.path / name).write_bytes(content)
        old.sync()
        wait_for(lambda: "event=sealed" in old.log(), "the store can tell that it is whole")
        old.sync()
        site.is_lost(old)
        site.mirror.clean_up()
        new = site.node("new", mirror="")
        new.start()
        assert new.run("latest", new.path).stdout == f"{new.path}/step-1\n"
        assert contents(new.path) == wanted


# --- the old node comes back -----------------------------------------------------------------


def test_a_node_that_comes_back_is_fenced_and_the_store_keeps_the_newer(tmp_path: Path) -> None:
    with cluster(tmp_path) as site:
        old = site.node("old", "-o", "flush_delay=0")
        old.start()
        (old.path / "model.pt").write_bytes(b"first")
        old.sync()
        with site.store_away():
            synced(old.path / "model.pt", b"second, of the old node")
            (old.path / "only-old").write_bytes(b"never to be stored")
            mirrored(old)
            site.dies(old)  # its disk stays
            new = site.node("new", "-o", "flush_delay=0", mirror="--recover-from")
            new.start()
        assert (new.path / "model.pt").read_bytes() == b"second, of the old node"
        synced(new.path / "model.pt", b"third, of the successor")
        new.sync()
        assert (site.store / "model.pt").read_bytes() == b"third, of the successor"
        (new.path / "only-old").unlink()
        new.sync()

        old.path = tmp_path / "elsewhere"
        old.path.mkdir()
        old.start()
        status = wait_for(lambda: fenced(old), "the old node knows that it is fenced")
        assert status["state"] == "degraded"
        (old.path / "late").write_bytes(b"late")
        with pytest.raises(OSError) as caught:  # noqa: PT011 - its errno is looked at
            synced(old.path / "late", b"late")
        assert caught.value.errno == errno.EIO
        ended = old.run("unmount", old.path, "--no-drain")
        assert ended.returncode == 0, ended.stderr
        new.sync()
        assert (site.store / "model.pt").read_bytes() == b"third, of the successor"
        assert not (site.store / "late").exists()
        assert not (site.store / "only-old").exists()


def fenced(node: Mount) -> "dict[str, object] | None":
    status = node.status()
    reasons = status["reasons"]
    return status if any(reason.startswith("fenced: ") for reason in reasons) else None


def test_a_node_that_hung_while_its_successor_went_on_stores_nothing(tmp_path: Path) -> None:
    with cluster(tmp_path) as site:
        old = site.node("old", "-o", "flush_delay=3")
        old.start()
        (old.path / "model.pt").write_bytes(b"first")
        mirrored(old)
        pids = old.pids()
        for pid in pids:
            subprocess.run(["kill", "-STOP", str(pid)], check=True)
        try:
            new = site.node("new", "-o", "flush_delay=0", mirror="--recover-from")
            new.path = tmp_path / "elsewhere"
            new.path.mkdir()
            origin = next((site.mirror.state / "ram" / "replicas").iterdir()).name
            new.start("-o", f"recover_origin={origin}")
            (new.path / "model.pt").write_bytes(b"second, of the successor")
            new.sync()
        finally:
            for pid in pids:
                subprocess.run(["kill", "-CONT", str(pid)], check=True)
        wait_for(lambda: fenced(old), "the old node knows that it is fenced")
        assert (site.store / "model.pt").read_bytes() == b"second, of the successor"


# --- rotten copies ---------------------------------------------------------------------------


def flip(path: Path, *, keep_time: bool) -> None:
    """Change one byte in the middle of a file behind everybody's back."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(before.st_size // 2)
        byte = file.read(1)[0]
        file.seek(before.st_size // 2)
        file.write(bytes([byte ^ 0x40]))
    if keep_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def ram_file(node: Mount, size: int) -> Path:
    files = (path for path in (node.state / "ram").iterdir() if path.name.isdecimal())
    return next(path for path in files if path.stat().st_size == size)


@pytest.mark.parametrize("keep_time", [True, False])
def test_a_rotten_ram_copy_is_replaced_by_the_mirrors(tmp_path: Path, keep_time: bool) -> None:
    content = os.urandom(3 * MIB + 1)
    with cluster(tmp_path) as site:
        node = site.node("old", *SLOW)
        node.start()
        (node.path / "model.pt").write_bytes(content)
        mirrored(node)
        if keep_time:  # no sign but the digest: looked at when a daemon adopts
            node.kill()
        flip(ram_file(node, len(content)), keep_time=keep_time)
        if keep_time:
            node.start()
        assert (node.path / "model.pt").read_bytes() == content
        found = node.status()["recovery"]
        assert (found["corrupt_copies"], found["from_mirror_files"]) == (1, 1)
        node.sync()
        assert (site.store / "model.pt").read_bytes() == content


def test_a_rotten_ram_copy_is_never_stored(tmp_path: Path) -> None:
    content = os.urandom(3 * MIB + 1)
    with cluster(tmp_path) as site:
        node = site.node("old", *SLOW)
        node.start()
        (node.path / "model.pt").write_bytes(content)
        mirrored(node)
        flip(ram_file(node, len(content)), keep_time=True)
        node.sync()
        assert (site.store / "model.pt").read_bytes() == content
        assert node.status()["recovery"]["corrupt_copies"] == 1


def test_a_rotten_only_copy_is_not_served(tmp_path: Path) -> None:
    with cluster(tmp_path) as site:
        node = site.node("old", mirror="")
        node.start()
        assert list(node.path.iterdir()) == []  # the store's root is known
        with site.store_away():
            (node.path / "model.pt").write_bytes(b"x" * 100_000)
            wait_for(lambda: node.status()["checkpoints"][0]["complete"], "its digest is known")
            node.kill()
            flip(ram_file(node, 100_000), keep_time=True)
            node.start()
            with pytest.raises(OSError) as caught:  # noqa: PT011 - its errno is looked at
                (node.path / "model.pt").read_bytes()
            assert caught.value.errno == errno.EIO
            assert node.status()["recovery"]["corrupt_copies"] == 1


def test_a_rotten_ssd_copy_is_replaced_by_the_stores(tmp_path: Path) -> None:
    (tmp_path / "ssd").mkdir()
    content = os.urandom(3 * MIB + 1)
    with cluster(tmp_path) as site:
        options = ("--ram", "16M", "--ssd", f"{tmp_path / 'ssd'}:256M")
        node = site.node("old", *options, mirror="")
        node.start()
        filler = [(node.path / f"filler-{n}") for n in range(5)]
        for path in filler:
            path.write_bytes(os.urandom(3 * MIB))
        (node.path / "model.pt").write_bytes(content)
        node.sync()
        copies = [p for p in (tmp_path / "ssd").rglob("*") if p.is_file()]
        copies = [path for path in copies if path.stat().st_size == len(content)]
        if not copies:
            pytest.skip("it was placed in RAM")
        node.kill()
        flip(copies[0], keep_time=True)
        node.start()
        assert (node.path / "model.pt").read_bytes() == content
        assert node.status()["recovery"]["corrupt_copies"] == 1


def test_a_rotten_replica_is_not_taken_where_the_store_has_it(tmp_path: Path) -> None:
    content = os.urandom(3 * MIB + 1)
    with cluster(tmp_path) as site:
        old = site.node("old", "-o", "flush_delay=0")
        old.start()
        (old.path / "step-1").mkdir()
        (old.path / "step-1/model.pt").write_bytes(content)
        mirrored(old)
        old.sync()
        site.is_lost(old)
        (replica,) = site.mirror.replicas()  # the newest checkpoints' stay
        flip(replica, keep_time=True)
        new = site.node("new", mirror="--recover-from")
        new.start()
        assert (new.path / "step-1/model.pt").read_bytes() == content
        assert new.status()["recovery"]["corrupt_copies"] == 1


def test_a_rotten_replica_without_another_copy_is_not_served(tmp_path: Path) -> None:
    with cluster(tmp_path) as site:
        old = site.node("old", *SLOW)
        old.start()
        (old.path / "model.pt").write_bytes(os.urandom(100_000))
        mirrored(old)
        site.is_lost(old)
        (replica,) = site.mirror.replicas()
        flip(replica, keep_time=True)
        new = site.node("new", *SLOW, mirror="--recover-from")
        new.start()
        with pytest.raises(OSError) as caught:  # noqa: PT011 - its errno is looked at
            (new.path / "model.pt").read_bytes()
        assert caught.value.errno == errno.EIO
        wait_for(lambda: new.status()["recovery"]["corrupt_copies"] == 1, "it is counted")
        assert any("no copy left" in reason for reason in new.status()["reasons"])


def test_a_rotten_object_is_not_served(tmp_path: Path) -> None:
    content = os.urandom(100_000)
    with cluster(tmp_path) as site:
        old = site.node("old", mirror="")
        old.start()
        (old.path / "model.pt").write_bytes(content)
        old.sync()
        assert old.run("unmount", old.path).returncode == 0
        flip(site.store / "model.pt", keep_time=True)
        old.start()
        with pytest.raises(OSError) as caught:  # noqa: PT011 - its errno is looked at
            (old.path / "model.pt").read_bytes()
        assert caught.value.errno == errno.EIO
        assert old.status()["recovery"]["corrupt_copies"] >= 1


# --- who may take over -----------------------------------------------------------------------


def test_bad_ways_to_take_over_say_what_to_do_and_leave_nothing(tmp_path: Path) -> None:
    with cluster(tmp_path) as site:
        old = site.node("old", *SLOW)
        old.start()
        mirrored(old)
        site.dies(old)
        refused(old, site, "needs an empty state directory", "--recover-from", site.mirror.address)
        new = site.node("new", mirror="")
        nothing = ("--recover-from", f"{site.hosts['old'].address}:1")
        refused(new, site, "Connection refused", *nothing)
        new.path = tmp_path / "elsewhere"
        new.path.mkdir()
        refused(new, site, "it holds no replicas of", "--recover-from", site.mirror.address)


def refused(node: Mount, site: Cluster, why: str, *options: object) -> None:
    done = node.run(
        "mount", node.path, "--state", node.state, "--ram", "64M", "--store", site.store,
        "--secret-file", site.secret, *options,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert why in done.stderr
    assert done.stderr.count("\n") == 1
    assert node.pids() == []
    assert not node.path.is_mount()
