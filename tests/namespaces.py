"""Hosts for tests: network namespaces of their own, on a switch whose links can be made bad.

    with network("a", "b", outside=True) as hosts:
        hosts["a"].run(["lmstorfs", ...])  # or `mount.prefix = hosts["a"].prefix`
        hosts["a"].link.cut()  # off its peers
        hosts["a"].cut_outside()  # off whatever the test itself serves at `outside_address`

A host has a network of its own and nothing else: files, mounts and processes are everybody's. Its
prefix is `nsenter --net` and not `ip netns exec`, which would make a mount namespace as well (for
/sys, which for that reason shows the test's interfaces here), and hide the host's mounts.

No namespace has a name below /run/netns. Each is held by a file descriptor of the test's process,
so that even a test that dies by SIGKILL leaves no interface, and parallel runs cannot collide: the
one interface in the test's own namespace has the process's id in its name.
"""

import fcntl
import itertools
import json
import os
import random
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from ipaddress import IPv4Interface, IPv4Network
from pathlib import Path

from tests.mounting import COMMAND_S, wait_for

_BURST_BYTES = 32 << 10
_QUEUE_BYTES = 256 << 10
_MANY = 65535  # the kernel's own gso_max_segs
_numbers = itertools.count()


class Namespace:
    """A network namespace, there until `close`."""

    def __init__(self) -> None:
        # a process makes it, waits until there is a descriptor that keeps it, and may then go
        with subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo && read _"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as maker:
            assert maker.stdout is not None
            if not maker.stdout.readline():
                raise RuntimeError("no network namespace can be made here")
            self._held = os.open(f"/proc/{maker.pid}/ns/net", os.O_RDONLY)
        self.path = f"/proc/{os.getpid()}/fd/{self._held}"
        """Names the namespace to `ip` and to every process that the test starts."""
        self.prefix: Sequence[str] = ["nsenter", f"--net={self.path}"]
        """What stands before a command that is to run in here."""

    def do(self, words: str, *more: str) -> None:
        """Run a command that must succeed."""
        _do([*self.prefix, *words.split(), *more])

    def pids(self) -> list[int]:
        """Return the processes in here, whoever started them."""
        here, found = os.fstat(self._held), []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                if os.path.samestat(here, (process / "ns/net").stat()):
                    found.append(int(process.name))
        return found

    def close(self) -> None:
        """Kill what still runs in here, which would keep it, and let it go."""
        try:
            wait_for(lambda: not self._kill(), "nothing runs in the namespace")
        finally:
            os.close(self._held)

    def _kill(self) -> list[int]:
        pids = self.pids()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return pids


class Link:
    """The cable between a host and a switch; what is done to it holds in both directions.

    By `tc`, with what is in the kernels of small virtual machines too: the shaper tbf, and for
    losses a filter in BPF (cls_bpf), as such kernels lack netem. The filter stands where packets
    arrive (sch_ingress), and not where they leave: the sender's TCP is told of a packet that is
    dropped on its own machine, and would not take it for lost. There is no way to add latency.
    """

    def __init__(self, host: Namespace, interface: str, switch: Namespace, port: str) -> None:
        self._ends = ((host, interface), (switch, port))

    def cut(self) -> None:
        """Pull the cable: the host's interface has no carrier, and what is sent is gone.

        Nobody is told: connections hang as they do with a dead peer, or find no neighbour.
        """
        switch, port = self._ends[1]  # the host's own end would take its routes along
        switch.do(f"ip link set {port} down")

    def restore(self) -> None:
        """Be a good link again: neither cut nor slow nor lossy."""
        self._shape(None)
        self.lossy(0)
        switch, port = self._ends[1]
        switch.do(f"ip link set {port} up")

    def slow(self, bytes_per_s: int) -> None:
        """Let this much through in each direction, headers included."""
        if bytes_per_s <= 0:
            raise ValueError("a link that lets nothing through is cut() or lossy(100)")
        queue = max(_QUEUE_BYTES, bytes_per_s // 5)  # what comes in a fifth of a second
        burst = max(_BURST_BYTES, bytes_per_s // 100)  # and in the longest tick of a kernel
        self._shape(f"tbf rate {bytes_per_s}bps burst {burst} limit {queue}")  # tc's bps: bytes

    def lossy(self, percent: float) -> None:
        """Lose this share of the packets in each direction; all of them with 100.

        Then, other than after `cut`, the interface stays up and the neighbour known.
        """
        if not 0 <= percent <= 100:
            raise ValueError(f"{percent} is no share in percent")
        for namespace, end in self._ends:
            # else one packet on this link is up to 64 KiB, and a few of them are the whole file
            namespace.do(f"ip link set {end} gso_max_segs {1 if percent else _MANY}")
            namespace.do(f"tc qdisc replace dev {end} clsact")
            if percent:
                drops = f"tc filter replace dev {end} ingress prio 1 handle 1 bpf da bytecode"
                namespace.do(drops, _losing(percent))
            else:
                namespace.do(f"tc qdisc del dev {end} clsact")

    def _shape(self, shaper: str | None) -> None:
        # noqueue is what these interfaces have of themselves; replacing it is no error, unlike
        # deleting a shaper that is not there
        for namespace, end in self._ends:
            namespace.do(f"tc qdisc replace dev {end} root {shaper or 'noqueue'}")


class Host:
    """A namespace with an address, on links that a test controls."""

    def __init__(self, name: str, namespace: Namespace, address: str, link: Link) -> None:
        self.name = name
        self.address = address
        """Where its peers find it."""
        self.prefix = namespace.prefix
        """What stands before a command that is to run on it."""
        self.link = link
        """To its peers."""
        self.outside: tuple[str, Link] | None = None
        """Address and link, with `outside=True`; the properties below do without the None."""

    def run(
        self, words: Sequence[object], timeout_s: float = COMMAND_S
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command on this host and return what became of it."""
        return subprocess.run(
            [*self.prefix, *map(str, words)],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    @property
    def outside_address(self) -> str:
        """Where the host finds what the test itself serves; the same for all hosts."""
        return self._need_outside()[0]

    @property
    def outside_link(self) -> Link:
        """To the test's own namespace; no way to a peer."""
        return self._need_outside()[1]

    def cut_outside(self) -> None:
        self.outside_link.cut()

    def restore_outside(self) -> None:
        self.outside_link.restore()

    def _need_outside(self) -> tuple[str, Link]:
        if self.outside is None:
            raise RuntimeError("only network(..., outside=True) has an outside")
        return self.outside


@contextmanager
def network(*names: str, outside: bool = False) -> Iterator[dict[str, Host]]:
    """Make hosts that reach each other, and with `outside` the test's own namespace.

    Whatever happens, nothing is left of them, processes that were started on them included.
    """
    with ExitStack() as stack:
        switch = _namespace(stack)
        hosts: dict[str, Host] = {}
        with _addresses_locked():
            peers, outer = _free_networks(2)
            switch.do("ip link add peers up type bridge")
            if outside:
                gate = _open_gate(stack, switch, outer)
        for number, name in enumerate(names):
            namespace = _namespace(stack)
            address = _member(peers, number + 1)
            link = _plug(namespace, "peers", switch, f"p{number}", address)
            hosts[name] = Host(name, namespace, str(address.ip), link)
            if outside:
                address = _member(outer, number + 2)
                link = _plug(namespace, "outside", switch, f"o{number}", address)
                switch.do(f"bridge link set dev o{number} isolated on")  # to the gate only
                hosts[name].outside = (str(gate.ip), link)
        yield hosts


def _namespace(stack: ExitStack) -> Namespace:
    namespace = Namespace()
    stack.callback(namespace.close)
    namespace.do("ip link set lo up")
    return namespace


def _open_gate(stack: ExitStack, switch: Namespace, network: IPv4Network) -> IPv4Interface:
    """Join a second bridge of the switch to the test's own namespace; returns our address."""
    address, name = _member(network, 1), f"lm{os.getpid():x}-{next(_numbers)}"
    switch.do("ip link add outside up type bridge")
    _do(["ip", "link", "add", name, "type", "veth", "peer", "gate", "netns", switch.path])
    # at once: the switch's end would take it along only when the kernel gets to it
    stack.callback(_do, ["ip", "link", "del", name])
    switch.do("ip link set gate up master outside")
    _do(["ip", "address", "add", str(address), "dev", name])
    _do(["ip", "link", "set", name, "up"])
    return address


def _plug(
    host: Namespace, interface: str, switch: Namespace, port: str, address: IPv4Interface
) -> Link:
    """Lay a cable from the host to the bridge that is called as its interface is."""
    switch.do(f"ip link add {port} type veth peer {interface} netns {host.path}")
    switch.do(f"ip link set {port} up master {interface}")
    host.do(f"ip address add {address} dev {interface}")
    host.do(f"ip link set {interface} up")
    return Link(host, interface, switch, port)


@contextmanager
def _addresses_locked() -> Iterator[None]:
    """Keep others in this namespace from choosing the same addresses at the same time."""
    with Path("/proc/self/ns/net").open() as here:
        fcntl.flock(here, fcntl.LOCK_EX)
        yield


def _free_networks(count: int) -> list[IPv4Network]:
    """Return networks below 10.0.0.0/8 that no route of this machine leads to."""
    words = ["ip", "-json", "-4", "route", "show", "table", "all"]
    answer = subprocess.run(words, capture_output=True, check=True, timeout=COMMAND_S)
    named = [route["dst"] for route in json.loads(answer.stdout or "[]")]
    routes = [IPv4Network(name) for name in named if name != "default"]
    taken = [route for route in routes if route.prefixlen > 1]  # /1: a default route in halves
    numbers = random.sample(range(1 << 16), 1 << 16)
    spare = (IPv4Network(f"10.{number >> 8}.{number & 255}.0/24") for number in numbers)
    free = (one for one in spare if not any(one.overlaps(route) for route in taken))
    found = list(itertools.islice(free, count))
    if len(found) < count:
        raise RuntimeError("the routes of this machine leave nothing free below 10.0.0.0/8")
    return found


def _member(network: IPv4Network, number: int) -> IPv4Interface:
    return IPv4Interface((int(network.network_address) + number, network.prefixlen))


def _losing(percent: float) -> str:
    """Return a classic BPF program for tc's direct-action mode: it drops at random.

    It spares ARP: three questions lost in a row would end a connection with an error, and a test
    of losses would fail now and then.
    """
    limit = max(0, round(percent / 100 * (1 << 32)) - 1)
    ancillary = 0xFFFFF000  # SKF_AD_OFF
    program = (
        (0x28, 0, 0, ancillary),  # A = the packet's protocol
        (0x15, 3, 0, 0x0806),  # ARP passes
        (0x20, 0, 0, ancillary + 56),  # A = 32 random bits
        (0x25, 1, 0, limit),  # above the limit passes
        (0x06, 0, 0, 2),  # TC_ACT_SHOT
        (0x06, 0, 0, 0),  # TC_ACT_OK
    )
    return ",".join((str(len(program)), *(" ".join(map(str, line)) for line in program)))


def _do(words: Sequence[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
