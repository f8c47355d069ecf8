"""Hosts in network namespaces: they talk, are cut off, slowed and made lossy, and leave nothing."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from lmstorfs import mounts
from tests.mounting import wait_for
from tests.namespaces import Host, network

pytestmark = [
    pytest.mark.mounted,
    pytest.mark.skipif(
        os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs root and /dev/fuse"
    ),
]

MIB = 1 << 20

# Takes connections one by one and answers the digest of all that came.
SERVER = """
import hashlib, socket, sys
with socket.create_server((sys.argv[1], 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    while True:
        connection, _ = listener.accept()
        with connection:
            digest = hashlib.sha256()
            while data := connection.recv(1 << 16):
                digest.update(data)
            connection.sendall(digest.hexdigest().encode())
"""

# Sends so many bytes and fails unless exactly these arrived.
CLIENT = """
import hashlib, random, socket, sys
address, port, size, timeout_s = sys.argv[1], *map(int, sys.argv[2:])
data = random.Random(1).randbytes(size)
with socket.create_connection((address, port), timeout_s) as connection:
    connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)
    assert connection.recv(64, socket.MSG_WAITALL).decode() == hashlib.sha256(data).hexdigest()
"""


@contextmanager
def serving(address: str, host: Host | None = None) -> Iterator[int]:
    """Run the server on a host, or in the test's own namespace; yields its port."""
    prefix = host.prefix if host else ()
    with subprocess.Popen(
        [*prefix, sys.executable, "-c", SERVER, address], stdout=subprocess.PIPE
    ) as server:
        try:
            assert server.stdout is not None
            yield int(server.stdout.readline())
        finally:
            server.kill()


def send(host: Host, address: str, port: int, size: int = 1000, timeout_s: int = 60) -> str:
    """Return what went wrong, empty when all bytes came."""
    return host.run([sys.executable, "-c", CLIENT, address, port, size, timeout_s]).stderr


def interfaces() -> set[str]:
    """Return the interfaces of the test's own namespace."""
    answer = subprocess.run(["ip", "-json", "link"], capture_output=True, check=True)
    return {link["ifname"] for link in json.loads(answer.stdout)}


def ours() -> set[str]:
    """Return those of this process; others may run networks of their own now."""
    return {name for name in interfaces() if name.startswith(f"lm{os.getpid():x}-")}


def namespaces_held() -> set[str]:
    """Return the namespaces that a descriptor of this process keeps."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # what the listing itself was read from
            found.add(str(path.readlink()))
    return {target for target in found if target.startswith("net:")}


def namespace_of(host: Host) -> str:
    return host.run(["readlink", "/proc/self/ns/net"]).stdout.strip()


def namespace_of_pid(pid: int) -> str:
    return str(Path(f"/proc/{pid}/ns/net").readlink())


def retransmitted(host: Host) -> int:
    """Return how many TCP segments the host sent again."""
    lines = host.run(["cat", "/proc/net/snmp"]).stdout.splitlines()
    names, values = (line.split() for line in lines if line.startswith("Tcp:"))
    return int(values[names.index("RetransSegs")])


def test_hosts_talk_are_cut_off_and_talk_again() -> None:
    with network("a", "b") as hosts:
        a, b = hosts["a"], hosts["b"]
        with serving(b.address, b) as port:
            assert send(a, b.address, port, MIB) == ""
            for link in (a.link, b.link):
                link.cut()
                assert "timed out" in send(a, b.address, port, timeout_s=1)
                link.restore()
                assert send(a, b.address, port, MIB) == ""


def test_a_connection_outlives_a_short_cut() -> None:
    with network("a", "b") as hosts:
        a, b = hosts["a"], hosts["b"]
        a.link.slow(MIB)
        with serving(b.address, b) as port:
            words = [sys.executable, "-c", CLIENT, b.address, port, 16 * MIB, 60]
            with subprocess.Popen([*a.prefix, *map(str, words)]) as client:
                wait_for(lambda: "ESTAB" in a.run(["ss", "-Htn"]).stdout, "they are connected")
                a.link.cut()
                time.sleep(0.5)  # a while in which nothing arrives is what the test is about
                assert client.poll() is None
                a.link.restore()  # at full speed
                assert client.wait(60) == 0


def test_three_hosts_and_one_of_them_cut_off() -> None:
    with network("a", "b", "c") as hosts:
        a, b, c = hosts.values()
        assert [host.name for host in (a, b, c)] == ["a", "b", "c"]
        assert len({host.address for host in hosts.values()}) == 3
        with serving(c.address, c) as port:
            a.link.cut()
            assert "timed out" in send(a, c.address, port, timeout_s=1)
            assert send(b, c.address, port) == ""


@pytest.mark.parametrize("slowed", ["a", "b"])
def test_a_slow_link_takes_its_time_in_both_directions(slowed: str) -> None:
    with network("a", "b") as hosts:
        a, b = hosts["a"], hosts["b"]
        hosts[slowed].link.slow(MIB)
        with serving(b.address, b) as port:
            began = time.monotonic()
            assert send(a, b.address, port, 3 * MIB) == ""
            assert time.monotonic() - began >= 2
            hosts[slowed].link.restore()
            assert send(a, b.address, port, 64 * MIB) == ""


@pytest.mark.parametrize("lossy", ["a", "b"])
def test_a_lossy_link_loses_packets_and_tcp_brings_all_bytes(lossy: str) -> None:
    with network("a", "b") as hosts:
        a, b = hosts["a"], hosts["b"]
        hosts[lossy].link.lossy(2)
        with serving(b.address, b) as port:
            assert send(a, b.address, port, 2 * MIB) == ""
            lost = retransmitted(a)
            assert lost > 0
            hosts[lossy].link.restore()
            assert send(a, b.address, port, 2 * MIB) == ""


def test_a_link_that_loses_everything_is_silent() -> None:
    with network("a", "b") as hosts:
        a, b = hosts["a"], hosts["b"]
        with serving(b.address, b) as port:
            a.link.lossy(100)
            assert "timed out" in send(a, b.address, port, timeout_s=4)  # ARP would fail after 3
            a.link.lossy(0)
            assert send(a, b.address, port) == ""


def test_slow_and_lossy_at_once_and_again() -> None:
    with network("a", "b") as hosts:
        a, b = hosts["a"], hosts["b"]
        for percent in (1, 2):
            a.link.slow(4 * MIB)
            a.link.lossy(percent)
        with serving(b.address, b) as port:
            assert send(a, b.address, port, MIB) == ""
        with pytest.raises(ValueError, match="lets nothing through"):
            a.link.slow(0)
        with pytest.raises(ValueError, match="no share"):
            a.link.lossy(101)


def test_a_host_cut_off_the_outside_still_has_its_peer() -> None:
    with network("a", "b", outside=True) as hosts:
        a, b = hosts["a"], hosts["b"]
        store = a.outside_address
        assert store == b.outside_address
        with serving(store) as outside, serving(b.address, b) as inside:
            assert send(a, store, outside, MIB) == ""
            a.cut_outside()
            assert "timed out" in send(a, store, outside, timeout_s=1)
            assert send(b, store, outside) == ""
            assert send(a, b.address, inside) == ""
            a.restore_outside()
            assert send(a, store, outside) == ""
            a.link.cut()
            assert send(a, store, outside) == ""
            assert "timed out" in send(a, b.address, inside, timeout_s=1)


def test_without_an_outside_there_is_none() -> None:
    with network("a", "b") as hosts:
        with pytest.raises(RuntimeError, match="outside=True"):
            hosts["a"].cut_outside()
        assert not ours()


def test_a_mount_made_on_a_host_is_everybodys(tmp_path: Path) -> None:
    with network("a") as hosts:
        done = hosts["a"].run(["mount", "-t", "tmpfs", "tmpfs", tmp_path])
        try:
            assert done.returncode == 0, done.stderr
            assert mounts.mounted_at(str(tmp_path))
            (tmp_path / "file").write_text("seen")
            assert hosts["a"].run(["cat", tmp_path / "file"]).stdout == "seen"
        finally:
            mounts.detach(str(tmp_path))


def test_two_networks_at_once_do_not_collide() -> None:
    with network("a", "b", outside=True) as one, network("a", "b", outside=True) as other:
        assert one["a"].outside_address != other["a"].outside_address
        assert len(ours()) == 2
        for hosts in (one, other):
            with serving(hosts["a"].outside_address) as port:
                assert send(hosts["b"], hosts["a"].outside_address, port) == ""


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_also_after_a_failure(fails: bool) -> None:
    try:
        with network("a", "b", outside=True) as hosts:
            made = {namespace_of(host) for host in hosts.values()}
            assert len(made) == 2
            assert made <= namespaces_held()
            assert len(ours()) == 1
            forgotten = subprocess.Popen([*hosts["a"].prefix, "sleep", "1000"])
            wait_for(lambda: namespace_of_pid(forgotten.pid) in made, "it runs on the host")
            if fails:
                raise KeyError("a test that fails")
    except KeyError:
        assert fails
    assert forgotten.wait(30) != 0
    assert not made & namespaces_held()
    assert not ours()


def test_nothing_is_left_where_a_network_could_not_be_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = namespaces_held()
    monkeypatch.setattr("tests.namespaces.Link", None)  # called when all but the links is there
    with pytest.raises(TypeError), network("a", "b", outside=True):
        pass
    assert not ours()
    assert namespaces_held() == before


def test_nothing_is_left_of_a_test_that_was_killed() -> None:
    script = """
import os, signal
from tests.namespaces import network
with network("a", "b", outside=True):
    print(os.getpid(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    name = f"lm{int(done.stdout):x}-"
    wait_for(lambda: not any(one.startswith(name) for one in interfaces()), "the kernel tidied up")
