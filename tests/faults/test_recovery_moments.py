"""Nodes that die at drawn moments, and in the middle of other trouble; `test_recovery.py` goes on.

With S3 as the store, cut off by its cable or by a proxy; with a mirror that is behind; with
a predecessor that is still alive.
"""

import contextlib
import errno
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from lmstorfs.digest import digest_bytes, digest_file
from tests.mounting import Mount, wait_for
from tests.nodes import MIB, Cluster, cluster, contents, mirrored, recovered, tree
from tests.proxy import Proxy, proxied
from tests.s3servers import S3Server

pytestmark = [
    pytest.mark.mounted,
    pytest.mark.skipif(
        os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs root and /dev/fuse"
    ),
]

KEPT_HERE = ("-o", "flush_delay=600")
DEATHS = 4
WRITERS = 3


def seeded() -> random.Random:
    seed = int(os.environ.get("LMSTORFS_TEST_SEED", "0")) or time.time_ns() % 1_000_000
    print(f"LMSTORFS_TEST_SEED={seed}")  # pytest shows it where the test fails
    return random.Random(seed)


def synced(path: Path, content: bytes) -> None:
    with path.open("wb", buffering=0) as file:
        assert file.write(content) == len(content)
        os.fsync(file.fileno())


def sync_names(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def lose(site: Cluster, node: Mount, host: str) -> None:
    """Lose the node as a power cut does: nobody hears of it."""
    site.hosts[host].link.cut()
    if site.hosts[host].outside is not None:
        site.hosts[host].cut_outside()
    site.is_lost(node)


def replace_host(site: Cluster, host: str) -> None:
    """Put a new machine in the dead one's place."""
    site.hosts[host].link.restore()


# --- S3, cut off ---------------------------------------------------------------------------------


@contextmanager
def s3_cluster(
    folder: Path, server: S3Server, prefix: str, *, ram: str = "1G"
) -> Iterator[tuple[Cluster, Proxy, Callable[..., Mount]]]:
    """Give a cluster whose nodes have S3 as their store, the proxy before it, and a maker."""
    with cluster(folder, ram=ram, outside=True) as site:
        gate = site.hosts["old"].outside_address
        with proxied(server.endpoint, gate) as proxy:
            url = f"s3://{server.bucket}/{prefix}"
            options = ("--store", url, "-o", f"endpoint={proxy.endpoint},part_size=5M")

            def node(host: str, *more: object, **named: str) -> Mount:
                made = site.node(host, *options, *more, **named)
                made.environment |= server.environment
                return made

            try:
                yield site, proxy, node
            finally:
                proxy.restore()


def objects(server: S3Server, prefix: str) -> dict[str, str]:
    """Return the digests of all files that S3 holds below `prefix`."""
    client = server.client()
    found = {}
    for key in server.keys(f"{prefix}/"):
        body = client.get_object(Bucket=server.bucket, Key=key)["Body"].read()
        name = key.removeprefix(f"{prefix}/")
        if not name.endswith("/") and not name.startswith(".lmstorfs"):
            found[name] = digest_bytes(body)
    return found


def furnish(folder: Path, drawn: random.Random) -> None:
    """Make one of everything, fsynced."""
    folder.mkdir()
    (folder / "empty").mkdir()
    (folder / "deep" / "er").mkdir(parents=True)
    sizes = [0, 1, 4096, 8 * MIB, 8 * MIB + 1, *(drawn.randrange(20 * MIB) for _ in range(3))]
    for number, size in enumerate(sizes):
        path = folder / drawn.choice(["", "deep", "deep/er"]) / f"file-{number} é.bin"
        synced(path, drawn.randbytes(size))
        path.chmod(drawn.choice([0o600, 0o644, 0o755, 0o4711]))
        os.utime(path, ns=(drawn.getrandbits(60), drawn.getrandbits(60)))
        os.setxattr(path, "user.number", b"%d" % number)
    with (folder / "sparse").open("wb") as file:
        file.seek(9 * MIB)
        file.write(b"end")
        file.flush()
        os.fsync(file.fileno())
    (folder / "link").symlink_to("deep/er")
    (folder / "dangling").symlink_to("/nowhere/at all")
    os.setxattr(folder / "deep", "user.note", b"\x00\xff")
    (folder / "deep" / "er").chmod(0o700)
    os.utime(folder / "empty", ns=(1, drawn.getrandbits(60)))
    for path in (folder, folder / "deep", folder / "deep" / "er", folder.parent):
        sync_names(path)


@pytest.mark.parametrize("cut", ["cable", "reset"])
def test_a_new_node_has_namespace_and_fsynced_files_while_s3_is_cut_off(
    tmp_path: Path, server: S3Server, cut: str
) -> None:
    drawn = seeded()
    with s3_cluster(tmp_path, server, f"namespace-{cut}") as (site, proxy, node):
        old = node("old", *KEPT_HERE)
        old.start()
        furnish(old.path / "before", drawn)
        old.sync()
        if cut == "cable":
            site.hosts["old"].cut_outside()
            site.hosts["new"].cut_outside()
        else:
            proxy.cut()
        furnish(old.path / "step-2", drawn)
        names, wanted = tree(old.path, read=False), tree(old.path)
        lose(site, old, "old")
        new = node("new", *KEPT_HERE, mirror="--recover-from")
        new.start()
        assert tree(new.path, read=False) == names
        assert list((new.path / "before" / "empty").iterdir()) == []
        (new.path / "before" / "empty" / "made").mkdir()
        (new.path / "before" / "empty" / "made").rmdir()
        os.utime(new.path / "before" / "empty", ns=(1, wanted["before/empty"].mtime_ns))
        found = tree(new.path / "step-2")
        assert {f"step-2/{name}": entry for name, entry in found.items()} == {
            name: entry for name, entry in wanted.items() if name.startswith("step-2/")
        }
        recovered(new)
        if cut == "cable":
            site.hosts["new"].restore_outside()
        else:
            proxy.restore()
        assert tree(new.path) == wanted
        new.sync()
        stored = objects(server, f"namespace-{cut}")
        files = {name: entry.content for name, entry in wanted.items() if entry.mode >> 12 == 8}
        assert {name: stored[name] for name in files} == files


# --- drawn moments -------------------------------------------------------------------------------


class Said:
    """What the writers in one folder said: for each file what may be found."""

    def __init__(self, log: Path) -> None:
        self.may_be: dict[str, set[str | None]] = {}
        """Digests; None where it need not be there (then neither need its content)."""
        self.acknowledged = 0
        for line in log.read_text().splitlines():
            word, digest, name = line.split(" ")
            if word == "begin":
                self.may_be.setdefault(name, {None}).add(digest)
            elif word == "synced":
                self.may_be[name] = {digest}
                self.acknowledged += 1
            else:
                self.may_be[name].add(None)

    def check(self, folder: Path, where: str) -> None:
        """Compare with what is there, which then is what must be there from now on."""
        for name, may_be in self.may_be.items():
            why, found = "it is another one", None
            try:
                found = digest_file(folder / name)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.EIO):
                    raise
                why = str(error)
            if None in may_be and found not in may_be:
                found = None  # it was created, and nothing was promised of what is in it
            assert found in may_be, f"{where}: an fsync of {name} had returned, and now: {why}"
            self.may_be[name] = {found} if found is not None else {None, *may_be}


@contextmanager
def writing(folder: Path, logs: Path, drawn: random.Random) -> Iterator[list[Path]]:
    """Run the writers; they end when their node dies."""
    script = Path(__file__).with_name("synced_writer.py")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    logs.mkdir()
    running: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(WRITERS):
            words = [sys.executable, script, folder / str(number), drawn.getrandbits(30)]
            with (logs / str(number)).open("wb") as log:
                running.append(subprocess.Popen(list(map(str, words)), stdout=log, env=environment))
        yield [logs / str(number) for number in range(WRITERS)]
    finally:
        for process in running:
            process.kill()
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):  # in a call that nobody answers
                process.wait(10)


@pytest.mark.parametrize("store", ["away", "there"])
def test_from_one_death_to_the_next_all_that_was_fsynced_is_handed_on(
    tmp_path: Path, server: S3Server, store: str
) -> None:
    drawn = seeded()
    prefix = f"deaths-{store}"
    with s3_cluster(tmp_path, server, prefix, ram="3G") as (site, proxy, node):
        options = ("--ram", "3G", "-o", f"flush_delay={0.05 if store == 'there' else 600}")
        current = node("old", *options)
        current.start()
        assert list(current.path.iterdir()) == []
        if store == "away":
            proxy.cut()
        said: dict[Path, Said] = {}
        for death in range(DEATHS):
            folder = current.path / f"run-{death}"
            folder.mkdir()
            with writing(folder, tmp_path / f"logs-{death}", drawn) as logs:
                for log in logs:
                    wait_for(lambda log=log: b"synced" in log.read_bytes(), "it has begun")
                time.sleep(drawn.uniform(0, 1.5))  # the moment of the node's death
                here, there = ("old", "new") if death % 2 == 0 else ("new", "old")
                lose(site, current, here)
            said |= {folder / log.name: Said(log) for log in logs}
            site.hosts[here].restore_outside()
            site.hosts[here].link.restore()
            current = node(there, *options, mirror="--recover-from")
            current.start()
            for where, known in said.items():
                known.check(where, f"death {death}, {where.relative_to(current.path)}")
        assert sum(known.acknowledged for known in said.values()) > DEATHS * WRITERS
        proxy.restore()
        recovered(current)
        current.sync()
        stored = objects(server, prefix)
        for where, known in said.items():
            for name, may_be in known.may_be.items():
                key = str((where / name).relative_to(current.path))
                assert stored.get(key) in may_be, f"{key} in the store"


# --- a mirror that is behind ---------------------------------------------------------------------


@pytest.mark.parametrize("fate", ["lost", "reboots"])
@pytest.mark.parametrize("how", ["rewritten", "appended", "renamed over"])
def test_what_was_fsynced_is_there_where_the_mirror_lacks_what_came_after(
    tmp_path: Path, how: str, fate: str
) -> None:
    before, after = os.urandom(3 * MIB), os.urandom(40 * MIB)
    with cluster(tmp_path) as site:
        node = site.node("old", *KEPT_HERE)
        node.start()
        model, other = node.path / "model.pt", node.path / "other"
        synced(model, before)
        synced(other, b"other")
        mirrored(node)
        site.hosts["old"].link.slow(4 * MIB)
        expected = {before}
        if how == "rewritten":
            model.write_bytes(after)
            expected.add(after)
        elif how == "appended":
            with model.open("ab") as file:
                file.write(after)
            expected.add(before + after)
        else:
            (node.path / "next").write_bytes(after)
            (node.path / "next").replace(model)
            expected.add(after)
        sync_names(node.path)  # the mirror knows that there is something newer, and lacks it
        assert node.status()["mirror"]["lag_bytes"] >= len(after)
        with site.store_away():
            site.hosts["old"].link.cut()
            if fate == "lost":
                site.is_lost(node)
                node = site.node("new", *KEPT_HERE, mirror="--recover-from")
            else:
                site.dies(node)
                site.hosts["old"].link.restore()
            node.start()
            recovered(node)
            assert (node.path / "other").read_bytes() == b"other"
            if how == "renamed over":  # never fsynced: as on a disk, nothing was promised
                with contextlib.suppress(OSError):
                    assert (node.path / "model.pt").read_bytes() in expected
            else:
                assert (node.path / "model.pt").read_bytes() in expected
        (node.path / "model.pt").write_bytes(b"the next save")
        node.sync()
        assert (site.store / "model.pt").read_bytes() == b"the next save"


def test_after_a_reboot_a_read_does_not_wait_for_the_rest(tmp_path: Path) -> None:
    with cluster(tmp_path) as site:
        node = site.node("old", *KEPT_HERE)
        node.start()
        wanted = {"oldest": os.urandom(100_000)}
        wanted |= {f"shard-{number}.pt": os.urandom(12 * MIB) for number in range(4)}
        assert list(node.path.iterdir()) == []
        with site.store_away():
            for name, content in wanted.items():
                synced(node.path / name, content)
            site.hosts["old"].link.cut()
            site.dies(node)
            site.hosts["old"].link.restore()
            site.hosts["old"].link.slow(8 * MIB)
            node.start()
            assert (node.path / "oldest").read_bytes() == wanted["oldest"]
            assert node.status()["recovery"]["missing_files"] >= 2
            assert (node.path / "shard-0.pt").stat().st_size == 12 * MIB
            site.hosts["old"].link.restore()
            assert contents(node.path) == wanted
            recovered(node)
            assert node.status()["recovery"]["from_mirror_files"] == len(wanted)
        node.sync()
        found = contents(site.store)
        assert {name: found[name] for name in wanted} == wanted


# --- both are gone -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("directory", "in a file"),
        ("s3", "in a file"),
        ("directory", "between files"),
    ],
)
def test_with_node_and_mirror_gone_latest_is_what_the_store_holds_whole(
    tmp_path: Path, server: S3Server, kind: str, where: str
) -> None:
    with s3_cluster(tmp_path, server, f"both-{where[:2]}") as (site, proxy, s3_node):
        make = s3_node if kind == "s3" else site.node
        old = make("old", "-o", "flush_delay=0,attr_timeout=0")
        old.start()
        for step in (100, 200):
            folder = old.path / f"run/step-{step}"
            folder.mkdir(parents=True)
            for number in range(3):
                (folder / f"part-{number}.pt").write_bytes(os.urandom(MIB + number))
            os.setxattr(folder / "part-1.pt", "user.note", b"kept")
            (folder / "part-2.pt").chmod(0o600)
            old.sync()
        wait_for(lambda: old.log().count("event=sealed") >= 2, "the store can tell that it is so")
        old.sync()
        wanted = tree(old.path)
        newer = old.path / "run/step-300"
        newer.mkdir()
        with ExitStack() as stack:
            if where == "in a file":
                stack.enter_context((newer / "part-1.pt").open("wb")).write(b"begun")
            (newer / "part-0.pt").write_bytes(os.urandom(MIB))
            old.sync()  # a part of the newest is stored
            if where == "between files":
                wait_for(lambda: old.log().count("event=sealed") >= 3, "it is taken for whole")
                old.sync()
            away = site.store_away() if kind == "directory" else contextlib.nullcontext()
            with away:
                proxy.cut()
                synced(newer / "part-2.pt", os.urandom(MIB))  # the rest is not
                lose(site, old, "old")
            stack.pop_all()  # nothing is left to close
        site.mirror.clean_up()
        proxy.restore()
        new = make("new", mirror="")
        new.start()
        found = tree(new.path)
        for name, entry in wanted.items():
            there = found[name]
            if entry.mode >> 12 == 8:  # a directory has the time of what came into it last
                assert there.mtime_ns == entry.mtime_ns, name
            assert (there.mode, there.content) == (entry.mode, entry.content), name
            assert {key: there.xattrs.get(key) for key in entry.xattrs} == entry.xattrs, name
        assert [path.name for path in (new.path / "run/step-300").iterdir()] == ["part-0.pt"]
        assert new.run("latest", new.path).stdout == f"{new.path}/run/step-200\n"


# --- the old node is still alive -----------------------------------------------------------------


def fenced(node: Mount) -> bool:
    status = node.status()
    told = any(reason.startswith("fenced: ") for reason in status["reasons"])
    return told and bool(status["state"] == "degraded")


@pytest.mark.parametrize(
    ("cut", "reaches"),
    [
        ("reset", "mirror"),
        ("reset", "store"),
        ("reset", "both"),
        pytest.param(
            "cable",
            "both",
            marks=pytest.mark.xfail(
                strict=False,
                reason="a PUT that hangs in the cut cable arrives when that is mended; only a"
                " conditional PUT could tell",
            ),
        ),
    ],
)
def test_a_node_that_was_only_cut_off_stores_nothing_once_it_has_a_successor(
    tmp_path: Path, server: S3Server, cut: str, reaches: str
) -> None:
    prefix = f"alive-{cut}-{reaches}"
    with (
        s3_cluster(tmp_path, server, prefix) as (site, _, node),
        proxied(server.endpoint, site.hosts["old"].outside_address) as own,
    ):
        host = site.hosts["old"]
        old = node("old", "-o", f"flush_delay=0,fsync_timeout=20,endpoint={own.endpoint}")
        old.start()
        synced(old.path / "model.pt", b"first")
        old.sync()
        host.link.cut()
        if cut == "cable":
            host.cut_outside()
        else:
            own.cut()
        (old.path / "model.pt").write_bytes(b"of the old node, after it was cut off")
        (old.path / "only-old").write_bytes(b"of the old node, after it was cut off")

        new = node("new", "-o", "flush_delay=0", mirror="--recover-from")
        new.path = tmp_path / "elsewhere"
        new.path.mkdir()
        origin = next((site.mirror.state / "ram" / "replicas").iterdir()).name
        new.start("-o", f"recover_origin={origin}")
        assert (new.path / "model.pt").read_bytes() == b"first"
        synced(new.path / "model.pt", b"second, of the successor")
        new.sync()
        wanted = {"model.pt": digest_bytes(b"second, of the successor")}
        assert objects(server, prefix) == wanted

        if reaches in ("mirror", "both"):
            host.link.restore()
        if reaches in ("store", "both"):
            host.restore_outside()
            own.restore()
        wait_for(lambda: fenced(old), "the old node knows that it is fenced", 90)
        with pytest.raises(OSError) as caught:  # noqa: PT011 - its errno is looked at
            synced(old.path / "late", b"late")
        assert caught.value.errno == errno.EIO
        host.link.restore()
        host.restore_outside()
        own.restore()
        assert old.run("unmount", old.path, "--no-drain").returncode == 0
        (new.path / "after").write_bytes(b"after")
        new.sync()
        wanted["after"] = digest_bytes(b"after")
        assert objects(server, prefix) == wanted
        assert server.uploads(prefix) == []
