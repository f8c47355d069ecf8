"""What this host can do for a mount, found out by trying where that is harmless.

`fail` is what makes a mount impossible, `warn` what makes it slower or smaller than it could be;
each says what to do. Trying to mount happens in a child with its own mount namespace
(`probe.py`), so that nothing of it is ever seen outside.
"""

import gzip
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from lmstorfs import host
from lmstorfs.errors import LmstorfsError, SetupError
from lmstorfs.units import GIB, format_size

PASSTHROUGH_KERNEL = (6, 9)  # the first with FUSE_PASSTHROUGH (linux/fuse.h, protocol 7.40)
PROBE_TIMEOUT_S = 20.0
SMALL_MEMORY_BYTES = 4 * GIB  # less holds hardly any checkpoint of a language model


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at."""

    name: str
    level: str
    """`ok`, `warn` or `fail`."""
    text: str
    advice: str = ""


def ok(name: str, text: str) -> Finding:
    """Return a finding that is as it should be."""
    return Finding(name=name, level="ok", text=text)


def warn(name: str, text: str, advice: str) -> Finding:
    """Return a finding that a mount can live with."""
    return Finding(name=name, level="warn", text=text, advice=advice)


def fail(name: str, text: str, advice: str = "") -> Finding:
    """Return a finding that makes a mount impossible."""
    return Finding(name=name, level="fail", text=text, advice=advice)


def can_mount(found: list[Finding]) -> bool:
    """Whether nothing stands in the way of a mount."""
    return all(finding.level != "fail" for finding in found)


def examine(
    store: str | None = None,
    endpoint: str | None = None,
    mirror: str | None = None,
    secret_file: str | None = None,
) -> list[Finding]:
    """Return all findings; `store` and `mirror` are looked at too where they are named."""
    facts = probe() if host.may_mount() and host.fuse_device_problem() is None else {}
    found = [_device(), _privilege(), _passthrough(facts), _huge_pages(facts)]
    found += [_fusermount(), *_allow_other(), _memory(), _python(), _pyfuse3()]
    if store:
        found.append(_store(store, endpoint))
    if mirror:
        found.append(_mirror(mirror, secret_file))
    return found


def probe() -> dict[str, Any]:
    """Return what trying showed (see `probe.py`); empty where trying was not possible."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "lmstorfs.probe"],
            capture_output=True,
            timeout=PROBE_TIMEOUT_S,
            check=True,
        )
        return dict(json.loads(done.stdout))
    except subprocess.TimeoutExpired:
        return {"error": "the trial did not end in time"}
    except (subprocess.CalledProcessError, ValueError) as error:
        return {"error": f"the trial failed: {error}"}


def _device() -> Finding:
    problem = host.fuse_device_problem()
    if problem is None:
        return ok("/dev/fuse", "there, and can be opened")
    what, _, advice = problem.partition("; ")
    return fail("/dev/fuse", what, advice)


def _privilege() -> Finding:
    problem = host.mount_privilege_problem()
    if problem is not None:
        what, _, advice = problem.partition("; ")
        return fail("privileges", what, advice)
    if host.may_mount():
        return ok("privileges", "may mount (CAP_SYS_ADMIN)")
    return warn(
        "privileges",
        "no CAP_SYS_ADMIN: fusermount3 mounts, but passthrough and a private tmpfs need root",
        "run as root for writes at memory speed",
    )


def _passthrough(facts: dict[str, Any]) -> Finding:
    name = "passthrough"
    release = os.uname().release
    slower = "a mount works, but all bytes go through the daemon"
    if host.kernel_version() < PASSTHROUGH_KERNEL:
        return warn(name, f"kernel {release} is older than 6.9; {slower}", "use a newer kernel")
    if "passthrough" in facts:  # the kernel itself said so
        if not facts["passthrough"]:
            return warn(
                name,
                f"kernel {release} was built without it; {slower}",
                "use a kernel with CONFIG_FUSE_PASSTHROUGH=y",
            )
        return ok(name, f"kernel {release} offers it (FUSE {facts['fuse_version']})")
    setting = kernel_setting("CONFIG_FUSE_PASSTHROUGH")
    if setting == "n":
        advice = "use a kernel with CONFIG_FUSE_PASSTHROUGH=y"
        return warn(name, f"kernel {release} was built without it; {slower}", advice)
    if not host.may_mount():
        return warn(name, f"needs CAP_SYS_ADMIN, which this user lacks; {slower}", "run as root")
    why = facts.get("error") or "it could not be tried"
    if setting == "y":
        return ok(name, f"kernel {release} was built with it ({why})")
    return warn(name, f"kernel {release} may have it; {why}", "see the mount's status")


def kernel_setting(name: str) -> str | None:
    """Return how the running kernel was built, `y`, `m` or `n`; None where nothing tells."""
    release = os.uname().release
    files = ("/proc/config.gz", f"/boot/config-{release}", f"/lib/modules/{release}/config")
    for path in map(Path, files):
        try:
            data = path.read_bytes()
        except OSError:
            continue
        text = gzip.decompress(data) if path.suffix == ".gz" else data
        for line in text.decode(errors="replace").splitlines():
            if line.startswith(f"{name}="):
                return line.split("=", 1)[1]
        return "n"
    return None


def _huge_pages(facts: dict[str, Any]) -> Finding:
    name = "huge pages"
    if "huge_tmpfs" not in facts:
        why = facts.get("error") or "only root can try"
        return warn(name, f"a tmpfs with huge=within_size could not be tried: {why}", "run as root")
    policy = _shmem_policy()
    if facts["huge_tmpfs"] is not None:
        advice = "use a kernel with CONFIG_TRANSPARENT_HUGEPAGE=y; writes are slower without"
        return warn(name, f"no tmpfs with huge=within_size: {facts['huge_tmpfs']}", advice)
    if policy == "deny":
        path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
        return warn(name, "denied for tmpfs by the system", f"run: echo never > {path}")
    return ok(name, "tmpfs takes huge=within_size")


def _shmem_policy() -> str | None:
    path = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    try:
        words = path.read_text().split()
    except OSError:
        return None
    return next((word.strip("[]") for word in words if word.startswith("[")), None)


def _fusermount() -> Finding:
    path = host.fusermount()
    if path:
        return ok("fusermount3", path)
    if host.may_mount():
        return ok("fusermount3", "not installed, and not needed by root")
    return fail("fusermount3", "not installed", "install the package fuse3")


def _allow_other() -> Iterator[Finding]:
    if os.geteuid() == 0:
        return
    if host.user_allow_other():
        yield ok("allow_other", "user_allow_other is in /etc/fuse.conf")
    else:
        yield warn(
            "allow_other",
            "only you will see your mount",
            "to share it, add the line user_allow_other to /etc/fuse.conf",
        )


def _memory() -> Finding:
    memory = host.memory()
    text = f"{format_size(memory.available)} free of {format_size(memory.total)}"
    text += " (limited by the cgroup)" if memory.limited_by == "cgroup" else ""
    text += f"; the default RAM tier takes {format_size(memory.available // 2)}"
    if memory.available < SMALL_MEMORY_BYTES:
        return warn("memory", text, "checkpoints larger than the tiers wait for the store")
    return ok("memory", text)


def _python() -> Finding:
    return ok("python", f"{platform.python_version()} ({sys.executable})")


def _pyfuse3() -> Finding:
    try:
        import pyfuse3  # noqa: F401 - whether its library loads is the question
    except ImportError as error:
        return fail("pyfuse3", f"cannot be loaded: {error}", "install libfuse3 and pyfuse3")
    return ok("pyfuse3", metadata.version("pyfuse3"))


def _store(url: str, endpoint: str | None) -> Finding:
    from lmstorfs.settings import PARSERS
    from lmstorfs.store import open_store
    from lmstorfs.store.store import StoreConfig

    try:
        config = StoreConfig(url=PARSERS["store"](url), endpoint=endpoint)
        opened = open_store(config)
        try:
            opened.probe(write=True)
        finally:
            opened.close()
    except LmstorfsError as error:
        return fail("store", str(error))
    return ok("store", f"{config.url} can be read and written")


def _mirror(address: str, secret_file: str | None) -> Finding:
    from lmstorfs.checkpoint.mirror.peer import PeerAddress

    try:
        PeerAddress(address=address, secret_file=secret_file).connect().close()
    except SetupError as error:
        return fail("mirror", str(error))
    except LmstorfsError as error:
        return warn(
            "mirror",
            str(error),
            f"on the peer run: lmstorfs mirror --listen {address} --ram SIZE; look at the firewall "
            "and that both nodes have the same --secret-file",
        )
    return ok("mirror", f"{address} answers and knows the secret")
