"""The mirror under bad links, full, killed, wrong: writers feel nothing, replicas end whole."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.mounting import Mount, wait_for
from tests.nodes import MIB, Cluster, cluster, contents, mirrored, recovered

pytestmark = [
    pytest.mark.mounted,
    pytest.mark.skipif(
        os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs root and /dev/fuse"
    ),
]

SLOW = ("-o", "flush_delay=600")


def save(node: Mount, step: int, size: int = 24 * MIB) -> dict[str, bytes]:
    """Save a checkpoint without any fsync; return what is in it."""
    folder = node.path / f"step-{step}"
    folder.mkdir()
    wanted = {f"step-{step}/model.pt": os.urandom(size + step)}
    wanted |= {f"step-{step}/rng-{n}": os.urandom(100 + n) for n in range(5)}
    for name, content in wanted.items():
        (node.path / name).write_bytes(content)
    return wanted


def lagging(node: Mount) -> dict[str, object]:
    """Return the mirror's part of the status as soon as that says that it is behind."""

    def look() -> dict[str, object] | None:
        found = dict(node.status()["mirror"])
        return found if found["lag_bytes"] else None

    found = wait_for(look, "the mirror is behind")
    assert found is not None
    return found


def proved_on_another_node(site: Cluster, old: Mount, wanted: dict[str, bytes]) -> None:
    """The replicas are whole: another node, without the store, has all from them."""
    mirrored(old)
    with site.store_away():
        site.is_lost(old)
        new = site.node("new", *SLOW, mirror="--recover-from")
        new.start()
        recovered(new)
        assert contents(new.path) == wanted
        assert new.status()["recovery"]["from_mirror_files"] == len(wanted)


def test_words_tell_where_a_checkpoint_is(tmp_path: Path) -> None:
    with cluster(tmp_path) as site:
        node = site.node("old", *SLOW)
        node.start()
        site.hosts["mirror"].link.cut()
        save(node, 1)
        late = node.run("wait", node.path / "step-1", "--copies", "mirror", "--timeout", "0.2")
        assert late.returncode == 1
        assert "has not enough copies after 0.2 s" in late.stderr
        wait_for(lambda: word(node) == "written", "the RAM tier alone has it")
        site.hosts["mirror"].link.restore()
        mirrored(node)
        assert word(node) == "mirrored"
        assert "mirrored" in node.run("checkpoints", node.path).stdout
        for copies, said in (("2", "two copies"), ("mirror", "a copy at the mirror")):
            done = node.run("wait", node.path / "step-1", "--copies", copies)
            assert done.stdout.startswith(f"{node.path}/step-1 has {said} (6 files, ")
        done = node.run("wait", node.path / "step-1", "--copies", "store", "--timeout", "60")
        assert done.stdout.startswith(f"{node.path}/step-1 has a copy in the store (6 files, ")
        assert word(node) == "stored"


def word(node: Mount) -> str:
    return str(node.status()["checkpoints"][0]["safety"])


def test_a_link_that_is_cut_in_the_middle(tmp_path: Path) -> None:
    with cluster(tmp_path) as site:
        node = site.node("old", *SLOW)
        node.start()
        link = site.hosts["mirror"].link
        link.slow(10 * MIB)
        wanted = save(node, 1)
        lagging(node)
        link.cut()
        wanted |= save(node, 2)
        behind = lagging(node)
        assert behind["lag_bytes"] >= 24 * MIB  # type: ignore[operator]
        link.restore()
        proved_on_another_node(site, node, wanted)


def test_a_slow_and_a_lossy_link(tmp_path: Path) -> None:
    with cluster(tmp_path) as site:
        node = site.node("old", *SLOW)
        node.start()
        link = site.hosts["mirror"].link
        link.slow(10 * MIB)
        wanted = save(node, 1)
        lagging(node)
        mirrored(node)
        link.restore()
        link.lossy(2)
        wanted |= save(node, 2)
        mirrored(node, 120)
        link.restore()
        proved_on_another_node(site, node, wanted)


@pytest.mark.parametrize("keeps_ram", [True, False])
def test_a_mirror_that_is_killed_and_comes_back(tmp_path: Path, keeps_ram: bool) -> None:
    with cluster(tmp_path) as site:
        node = site.node("old", *SLOW)
        node.start()
        wanted = save(node, 1)
        mirrored(node)
        site.hosts["mirror"].link.slow(20 * MIB)
        wanted |= save(node, 2)
        site.mirror.kill()
        wanted |= save(node, 3)
        status = wait_for(lambda: down(node), "the mirror's death is seen")
        assert status["state"] == "degraded"
        assert any(reason.startswith("mirror ") for reason in status["reasons"])
        lagging(node)
        if not keeps_ram:
            site.mirror.lose_ram()
        site.hosts["mirror"].link.restore()
        site.mirror.start()
        proved_on_another_node(site, node, wanted)


def down(node: Mount) -> "dict[str, object] | None":
    status = node.status()
    return status if status["mirror"]["state"] == "down" else None


def test_a_mirror_whose_ram_is_full_takes_more_once_the_store_has_some(tmp_path: Path) -> None:
    with cluster(tmp_path, ram="64M") as site:
        node = site.node("old", *SLOW, "-o", "keep_replicas=0")
        node.start()
        first = save(node, 1)
        mirrored(node)
        second = save(node, 2)
        third = save(node, 3)

        def says_full() -> bool:
            status = node.status()
            return any("RAM is full" in reason for reason in status["reasons"])

        wait_for(says_full, "status says that the mirror is full")
        assert node.status()["mirror"]["state"] == "lagging"
        assert node.status()["mirror"]["lag_bytes"] > 0
        done = node.run("sync", node.path / "step-1")
        assert done.returncode == 0
        done = node.run("sync", node.path / "step-2")
        assert done.returncode == 0
        mirrored(node)
        with site.store_away():
            site.is_lost(node)
            new = site.node("new", *SLOW, mirror="--recover-from")
            new.start()
            found = {name: (new.path / name).read_bytes() for name in third}
            assert found == third
        assert {name: (new.path / name).read_bytes() for name in first | second} == first | second


def test_an_fsync_without_the_mirror_waits_for_the_store(tmp_path: Path) -> None:
    with cluster(tmp_path) as site:
        node = site.node("old", *SLOW)
        node.start()
        site.mirror.kill()
        wait_for(lambda: down(node), "the mirror's death is seen")
        with (node.path / "model.pt").open("wb") as file:
            file.write(b"x" * 100_000)
            file.flush()
            os.fsync(file.fileno())
            assert (site.store / "model.pt").read_bytes() == b"x" * 100_000


def test_an_fsync_returns_by_the_mirror_while_the_store_is_away(tmp_path: Path) -> None:
    with cluster(tmp_path) as site:
        node = site.node("old")
        node.start()
        assert list(node.path.iterdir()) == []  # the store's root is known
        with site.store_away():
            with (node.path / "model.pt").open("wb") as file:
                file.write(b"x" * 100_000)
                file.flush()
                os.fsync(file.fileno())
            assert len(site.mirror.replicas()) == 1


def test_a_wrong_secret_replicates_nothing_and_says_why(tmp_path: Path) -> None:
    with cluster(tmp_path) as site:
        wrong = tmp_path / "wrong"
        wrong.write_text("another secret of the tests\n")
        wrong.chmod(0o600)
        node = site.node("old", "--mirror", site.mirror.address, "--secret-file", wrong, mirror="")
        node.start()
        wanted = save(node, 1, 100_000)
        status = wait_for(lambda: down(node), "the mirror refused")
        assert any("same secret" in reason for reason in status["reasons"])  # type: ignore[attr-defined]
        node.sync()
        assert {name: (site.store / name).read_bytes() for name in wanted} == wanted
        assert site.mirror.replicas() == []


def test_the_doctor_tells_whether_a_mirror_answers(tmp_path: Path) -> None:
    with cluster(tmp_path) as site:
        node = site.node("old", mirror="")
        asked = ("doctor", "--mirror", site.mirror.address, "--secret-file", site.secret)
        assert f"{site.mirror.address} answers and knows the secret" in node.run(*asked).stdout
        site.mirror.kill()
        assert "Connection refused" in node.run(*asked).stdout


def test_two_nodes_mirror_each_other(tmp_path: Path) -> None:
    with cluster(tmp_path) as site:
        one_host, two_host = site.hosts["old"], site.hosts["new"]
        one = site.node(
            "old", *SLOW, "--listen", f"{one_host.address}:7171",
            "--mirror", f"{two_host.address}:7171", "--secret-file", site.secret, mirror="",
        )  # fmt: skip
        two = site.node(
            "new", *SLOW, "--listen", f"{two_host.address}:7171",
            "--mirror", f"{one_host.address}:7171", "--secret-file", site.secret, mirror="",
        )  # fmt: skip
        two.path = tmp_path / "two"
        two.path.mkdir()
        (tmp_path / "store-two").mkdir()
        one.start()
        two.start("--store", tmp_path / "store-two")
        save(one, 1)
        save(two, 2)
        mirrored(one)
        mirrored(two)
        for node in (one, two):
            held = node.status()["replicas"]
            assert (held["origins"], held["files"]) == (1, 6)
            assert held["bytes"] > 24 * MIB
            daemon = node.pids()[1]
            subprocess.run(["kill", "-KILL", str(daemon)], check=True)
        for node in (one, two):
            wait_for(lambda node=node: node.status()["replicas"]["files"] == 6, "still held")
        mirrored(one)
        mirrored(two)


@pytest.mark.parametrize("option", ["--mirror", "--listen", "--recover-from"])
def test_a_peer_beyond_this_machine_needs_a_secret(tmp_path: Path, option: str) -> None:
    node = Mount(tmp_path)
    done = node.run("mount", node.path, "--state", node.state, option, "192.0.2.1:7070")
    assert done.returncode == 1
    assert done.stderr.startswith(f"lmstorfs: {option} 192.0.2.1:7070 needs --secret-file FILE")
    assert not node.state.exists()


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x" * 40)
    secret.chmod(0o644)
    node = Mount(tmp_path)
    words = ("--mirror", "192.0.2.1:7070", "--secret-file", secret)
    done = node.run("mount", node.path, "--state", node.state, *words)
    assert done.returncode == 1
    assert f"run: chmod 600 {secret}" in done.stderr
    assert not node.state.exists()
    words = ("mirror", "--listen", "127.0.0.1:0", "--ram", "64M", "--secret-file", secret)
    assert f"run: chmod 600 {secret}" in node.run(*words).stderr


def test_a_port_in_use_is_told(tmp_path: Path) -> None:
    with cluster(tmp_path) as site:
        host = site.hosts["mirror"]
        node = site.node("mirror", "--secret-file", site.secret, mirror="")
        words = ("--listen", site.mirror.address, "--secret-file", site.secret)
        done = node.run("mount", node.path, "--state", node.state, "--ram", "64M", *words)
        assert done.returncode == 1
        assert f"--listen {host.address}:7070 cannot be bound" in done.stderr
        assert node.pids() == []
        assert not node.state.exists()
