"""Tries, in a mount namespace of its own, what only trying tells; run as a program by the doctor.

Prints one JSON object. A FUSE file system is mounted and never served: the kernel's first request,
FUSE_INIT, lists all that the kernel can do, passthrough among it, and no answer is needed. All is
gone with this process.
"""

import ctypes
import json
import os
import select
import sys
import tempfile
from pathlib import Path
from typing import Any

from lmstorfs.fuse import protocol as fuse
from lmstorfs.fuse.mounting import mount

CLONE_NEWNS = 0x00020000  # linux/sched.h
MS_REC, MS_PRIVATE = 0x4000, 1 << 18  # linux/mount.h
INIT_TIMEOUT_S = 5.0

_libc = ctypes.CDLL(None, use_errno=True)


def _own_namespace() -> None:
    if _libc.unshare(CLONE_NEWNS) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    mount("none", "/", "none", MS_REC | MS_PRIVATE, "")


def _try_huge_tmpfs(target: str) -> str | None:
    """Return why a tmpfs with huge pages cannot be mounted, None where it can."""
    try:
        mount("probe", target, "tmpfs", 0, "size=1M,huge=within_size")
    except OSError as error:
        return error.strerror
    return None


def _try_fuse(target: str) -> dict[str, Any]:
    """Return what the kernel says that it can do."""
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    try:
        data = f"fd={device},rootmode=40000,user_id=0,group_id=0"
        mount("probe", target, "fuse", 0, data)
        if not select.select([device], [], [], INIT_TIMEOUT_S)[0]:
            return {"error": "the kernel sent no FUSE_INIT"}
        request = os.read(device, 1 << 20)
    finally:
        os.close(device)
    if fuse.OPCODE_UNIQUE_NODE.unpack_from(request)[0] != fuse.FUSE_INIT:
        return {"error": "the kernel's first request was no FUSE_INIT"}
    offer = fuse.Init(request[fuse.IN_HEADER_BYTES :])
    return {
        "fuse_version": f"{offer.major}.{offer.minor}",
        "passthrough": offer.offers_passthrough,
    }


def main() -> None:
    """Print what was found."""
    facts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as base:
        tmpfs, device = Path(base, "tmpfs"), Path(base, "fuse")
        tmpfs.mkdir()
        device.mkdir()
        pid = os.fork()
        if pid == 0:  # its namespace ends with it; the directories are then free to be removed
            try:
                _own_namespace()
                facts["huge_tmpfs"] = _try_huge_tmpfs(str(tmpfs))
                facts |= _try_fuse(str(device))
            except OSError as error:
                facts["error"] = str(error)
            sys.stdout.write(json.dumps(facts) + "\n")
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
