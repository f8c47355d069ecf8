"""A mirror in trouble at a drawn moment: writers feel nothing, status says so, all is whole later.

That the replicas are whole is proved where it counts: the node is lost, and another one has it all.
"""

import errno
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lmstorfs.control_client import ControlClient
from tests.mounting import Mount, wait_for
from tests.nodes import MIB, Cluster, cluster, contents, mirrored, recovered

pytestmark = [
    pytest.mark.mounted,
    pytest.mark.skipif(
        os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs root and /dev/fuse"
    ),
]

KEPT_HERE = ("-o", "flush_delay=600")
"""The store gets nothing by itself: what a successor has came from the mirror."""


def seeded() -> random.Random:
    seed = int(os.environ.get("LMSTORFS_TEST_SEED", "0")) or time.time_ns() % 1_000_000
    print(f"LMSTORFS_TEST_SEED={seed}")  # pytest shows it where the test fails
    return random.Random(seed)


def ask(node: Mount) -> dict[str, Any]:
    """Return the status, without the cost of a command: it is asked for again and again here."""
    return dict(ControlClient(node.state).call("status", timeout=30))


def save(node: Mount, step: int, size: int = 30 * MIB) -> dict[str, bytes]:
    """Save a checkpoint of a large file and a few small ones; every call must succeed."""
    folder = node.path / f"step-{step}"
    folder.mkdir()
    wanted = {f"step-{step}/model.pt": os.urandom(size + step)}
    wanted |= {f"step-{step}/rng-{number}": os.urandom(500 + number) for number in range(3)}
    for name, content in wanted.items():
        with (node.path / name).open("wb", buffering=0) as file:
            for start in range(0, len(content), MIB):
                piece = content[start : start + MIB]
                assert file.write(piece) == len(piece)
    return wanted


def fsynced(path: Path, content: bytes) -> None:
    with path.open("wb", buffering=0) as file:
        assert file.write(content) == len(content)
        os.fsync(file.fileno())


@contextmanager
def in_background(work: Callable[[], None]) -> Iterator[threading.Thread]:
    """Run `work`; what it raises is raised at the end of the block, where it must have ended."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield thread
    thread.join(60)
    assert not thread.is_alive()
    if failed:
        raise failed[0]


def under_way(site: Cluster) -> int:
    """Return how much of a replica has come that is not whole yet, bytes."""
    parts = (site.mirror.state / "ram" / "replicas").glob("*/*.part")
    return max((part.stat().st_blocks * 512 for part in parts if part.exists()), default=0)


def in_the_middle(site: Cluster, node: Mount, moments: random.Random) -> dict[str, bytes]:
    """Save, and return while a drawn share of the large file has come to the mirror."""
    size = 40 * MIB
    moment = moments.randrange(MIB, size - 10 * MIB)
    site.hosts["mirror"].link.slow(60 * MIB)
    wanted = save(node, 2, size)
    wait_for(lambda: under_way(site) > moment, "the replica is under way")
    return wanted


def is_behind(node: Mount, *states: str) -> dict[str, Any]:
    """Return the status as soon as it says that the mirror is in one of these states."""

    def look() -> dict[str, Any] | None:
        status = ask(node)
        seen = status["mirror"]["state"] in states and status["mirror"]["lag_bytes"] > 0
        return status if seen else None

    found = wait_for(look, f"the mirror is {' or '.join(states)}")
    assert found is not None
    return found


def down(node: Mount) -> None:
    """Return when status says that the mirror is down since when and why, and is degraded."""
    status = is_behind(node, "down")
    assert status["state"] == "degraded"
    (said,) = (text for text in status["reasons"] if text.startswith("mirror "))
    assert re.fullmatch(rf"mirror {status['mirror']['peer']} down since \d\d:\d\d:\d\d: .+", said)


def another_node_has_all(site: Cluster, node: Mount, wanted: dict[str, bytes]) -> None:
    """Lose the node and prove that its successor reads every byte from the mirror."""
    site.hosts["old"].link.cut()
    site.is_lost(node)
    new = site.node("new", *KEPT_HERE, mirror="--recover-from")
    new.start()
    assert contents(new.path) == wanted
    recovered(new)
    status = ask(new)
    assert status["recovery"]["from_mirror_files"] == len(wanted)
    assert (status["recovery"]["corrupt_copies"], status["recovery"]["lost_files"]) == (0, 0)


# --- the link ------------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", ["blip", "cut", "slow", "lossy"])
def test_a_replica_that_a_bad_link_disturbs_is_whole_in_the_end(
    tmp_path: Path, trouble: str
) -> None:
    moments = seeded()
    with cluster(tmp_path) as site:
        link = site.hosts["mirror"].link
        node = site.node("old", *KEPT_HERE)
        node.start()
        wanted = save(node, 1)
        mirrored(node)
        wanted |= in_the_middle(site, node, moments)
        if trouble == "slow":
            link.slow(10 * MIB)
        elif trouble == "lossy":
            link.lossy(2)
        else:
            link.cut()
        wanted |= save(node, 3)
        wanted |= save(node, 4, 10 * MIB)
        assert contents(node.path) == wanted
        if trouble == "cut":
            down(node)
        elif trouble == "slow":
            link.slow(4 * MIB)
            wanted |= save(node, 5, 160 * MIB)  # alone more than a mirror called ok may be behind
            assert is_behind(node, "lagging")["reasons"] == []
        link.restore()
        mirrored(node)
        assert ask(node)["reasons"] == []
        another_node_has_all(site, node, wanted)


# --- the mirror's process and its memory ---------------------------------------------------------


@pytest.mark.parametrize("memory", ["kept", "lost"])
def test_a_mirror_that_dies_in_the_middle_of_a_replica_has_all_once_it_is_back(
    tmp_path: Path, memory: str
) -> None:
    moments = seeded()
    with cluster(tmp_path) as site:
        node = site.node("old", *KEPT_HERE)
        node.start()
        wanted = save(node, 1)
        mirrored(node)
        before = {path: path.stat().st_ino for path in site.mirror.replicas()}
        assert len(before) == len(wanted)
        wanted |= in_the_middle(site, node, moments)
        site.mirror.kill()
        wanted |= save(node, 3)
        down(node)
        wanted |= save(node, 4, 10 * MIB)
        assert contents(node.path) == wanted
        if memory == "lost":
            site.mirror.lose_ram()
        site.hosts["mirror"].link.restore()
        site.mirror.start()
        mirrored(node)
        assert ask(node)["reasons"] == []
        after = {path: path.stat().st_ino for path in site.mirror.replicas()}
        assert len(after) == len(wanted)
        if memory == "kept":
            assert before.items() <= after.items(), "what it had was sent again"
        another_node_has_all(site, node, wanted)


def test_a_full_mirror_says_so_and_takes_the_rest_when_the_store_has_made_room(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path, ram="64M") as site:
        node = site.node("old", "-o", "flush_delay=0", "--keep-replicas", "0")
        node.start()
        (node.path / "first").write_bytes(b"first")
        node.sync()
        with site.store_away():
            wanted = save(node, 1, 40 * MIB)
            mirrored(node)
            wanted |= save(node, 2, 40 * MIB)
            wanted |= save(node, 3, 40 * MIB)
            status = is_behind(node, "lagging")
            assert status["state"] == "degraded"
            (said,) = (text for text in status["reasons"] if text.startswith("mirror "))
            assert said == f"mirror {site.mirror.address}: the mirror's RAM is full"
            assert status["mirror"]["lag_bytes"] >= 80 * MIB
            content = os.urandom(40 * MIB)
            with in_background(lambda: fsynced(node.path / "late.pt", content)) as late:
                wanted |= save(node, 4, MIB)
                written = node.path / "late.pt"
                wait_for(
                    lambda: written.exists() and written.stat().st_size == len(content), "written"
                )
                assert late.is_alive(), "no second copy, and yet fsync returned"
                assert contents(node.path) == {**wanted, "first": b"first", "late.pt": content}
                (site.folder / "aside").rename(site.store)  # the store is back
                try:
                    late.join(60)
                    assert (site.store / "late.pt").read_bytes() == content
                finally:
                    site.store.rename(site.folder / "aside")
        node.sync()
        wanted["late.pt"] = content
        found = contents(site.store)
        assert {name: found[name] for name in wanted} == wanted
        mirrored(node)
        assert ask(node)["reasons"] == []
        with site.store_away():  # and it mirrors again
            more = save(node, 5, 40 * MIB)
            mirrored(node)
            site.is_lost(node)
            new = site.node("new", *KEPT_HERE, mirror="--recover-from")
            new.start()
            assert {name: (new.path / name).read_bytes() for name in more} == more


# --- fsync ---------------------------------------------------------------------------------------


def test_an_fsync_without_the_mirror_waits_for_the_store(tmp_path: Path) -> None:
    content = os.urandom(3 * MIB + 1)
    with cluster(tmp_path) as site:
        node = site.node("old", *KEPT_HERE)
        node.start()
        fsynced(node.path / "before", b"mirrored")
        site.mirror.kill()
        with in_background(lambda: fsynced(node.path / "model.pt", content)) as fsync:
            with site.store_away():
                wait_for(lambda: ask(node)["store"]["retries"] > 1, "the store was asked")
                assert ask(node)["mirror"]["state"] == "down"
                assert fsync.is_alive(), "no second copy, and yet fsync returned"
            fsync.join(60)
            assert (site.store / "model.pt").read_bytes() == content


def test_an_fsync_without_the_store_returns_when_the_mirror_is_back(tmp_path: Path) -> None:
    content = os.urandom(3 * MIB + 1)
    with cluster(tmp_path) as site:
        node = site.node("old", *KEPT_HERE)
        node.start()
        fsynced(node.path / "before", b"mirrored")
        site.mirror.kill()
        with site.store_away():
            with in_background(lambda: fsynced(node.path / "model.pt", content)) as fsync:
                wait_for(lambda: ask(node)["store"]["retries"] > 1, "the store was asked")
                assert fsync.is_alive(), "no second copy, and yet fsync returned"
                site.mirror.start()
            another_node_has_all(site, node, {"before": b"mirrored", "model.pt": content})


def test_two_that_write_and_fsync_the_same_file_both_get_their_second_copy(tmp_path: Path) -> None:
    rounds = 40
    with cluster(tmp_path) as site:
        node = site.node("old", *KEPT_HERE, "-o", "fsync_timeout=10")
        node.start()
        (node.path / "log").write_bytes(b"")
        done: list[int] = []

        def append(number: int) -> None:
            with (node.path / "log").open("ab", buffering=0) as file:
                for _ in range(rounds):
                    file.write(b"%d" % number * 50_000)
                    os.fsync(file.fileno())
                    done.append(number)

        with site.store_away(), in_background(lambda: append(1)), in_background(lambda: append(2)):
            append(3)
        assert sorted(done) == [1] * rounds + [2] * rounds + [3] * rounds


def test_large_files_that_are_fsynced_at_one_time_all_get_their_second_copy(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path) as site:
        node = site.node("old", *KEPT_HERE, "-o", "fsync_timeout=60")
        node.start()
        assert list(node.path.iterdir()) == []
        site.hosts["mirror"].link.slow(60 * MIB)
        with site.store_away():
            wanted = save(node, 1, 40 * MIB)  # on its way, and not urgent
            large = {f"large-{number}": os.urandom(20 * MIB + number) for number in range(4)}
            large |= {f"small-{number}": os.urandom(1000 + number) for number in range(4)}
            with ExitStack() as stack:
                for name, content in large.items():
                    work = partial(fsynced, node.path / name, content)
                    stack.enter_context(in_background(work))
            mirrored(node)
            site.hosts["mirror"].link.restore()
            another_node_has_all(site, node, wanted | large)


# --- what people are told ------------------------------------------------------------------------


def word(node: Mount) -> str:
    (checkpoint,) = ask(node)["checkpoints"]
    assert checkpoint["path"] == "step-1"
    return str(checkpoint["safety"])


def test_wait_returns_when_it_is_so_and_tells_when_it_is_not(tmp_path: Path) -> None:
    with cluster(tmp_path) as site:
        node = site.node("old", *KEPT_HERE)
        node.start()
        list(node.path.iterdir())
        folder = node.path / "step-1"

        def wait(copies: str, *more: object) -> Any:
            return node.run("wait", folder, "--copies", copies, *more)

        def fails(copies: str) -> None:
            done = wait(copies, "--timeout", "0.5")
            assert (done.returncode, done.stdout) == (1, "")
            assert done.stderr == (
                f"lmstorfs: {folder} has not enough copies after 0.5 s; lmstorfs status says why\n"
            )

        with site.store_away():
            site.mirror.kill()
            save(node, 1, MIB)
            wait_for(lambda: word(node) == "written", "the digests are known")
            for copies in ("2", "mirror", "store"):
                fails(copies)
            site.mirror.start()
            for copies, what in (("2", "two copies"), ("mirror", "a copy at the mirror")):
                done = wait(copies, "--timeout", "60")
                assert (done.returncode, done.stderr) == (0, "")
                assert f"has {what} (4 files, " in done.stdout
            assert word(node) == "mirrored"
            assert "mirrored" in node.run("checkpoints", node.path).stdout
            fails("store")
        done = wait("store", "--timeout", "60")
        assert (done.returncode, done.stderr) == (0, "")
        assert word(node) == "stored"
        assert "stored" in node.run("checkpoints", node.path).stdout
        for copies in ("2", "mirror"):
            assert wait(copies, "--timeout", "60").returncode == 0


def test_who_knows_another_secret_cannot_take_a_nodes_place(tmp_path: Path) -> None:
    with cluster(tmp_path) as site:
        node = site.node("old", *KEPT_HERE)
        node.start()
        fsynced(node.path / "model.pt", b"mine")
        wrong = tmp_path / "wrong"
        wrong.write_text("another secret than the mirror's\n")
        wrong.chmod(0o600)
        thief = site.node("new", mirror="--recover-from")
        done = thief.run(
            *("mount", tmp_path, "--state", thief.state, "--ram", "64M", "--store", site.store),
            *("--secret-file", wrong, "--recover-from", site.mirror.address),
        )
        assert done.returncode == 1
        fsynced(node.path / "model.pt", b"still mine")  # nobody has fenced it
        assert ask(node)["mirror"]["state"] == "ok"


def test_writes_and_names_go_on_while_nobody_has_noticed_that_the_link_is_cut(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path) as site:
        node = site.node("old", *KEPT_HERE)
        node.start()
        wanted = save(node, 1)
        mirrored(node)
        site.hosts["mirror"].link.cut()  # the connection hangs, and nobody has noticed
        wanted |= save(node, 2)
        (node.path / "step-1/model.pt").rename(node.path / "step-1/renamed.pt")
        wanted["step-1/renamed.pt"] = wanted.pop("step-1/model.pt")
        (node.path / "step-1/rng-0").unlink()
        del wanted["step-1/rng-0"]
        assert contents(node.path) == wanted
        assert ask(node)["mirror"]["state"] in ("ok", "lagging"), "the link was missed already"
        with pytest.raises(OSError) as caught:  # noqa: PT011 - its errno is looked at
            (node.path / "step-1/rng-0").read_bytes()
        assert caught.value.errno == errno.ENOENT
        site.hosts["mirror"].link.restore()
