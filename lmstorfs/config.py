"""What one mount is told: parsed, checked, and handed to keeper and daemon as a JSON file.

Where it comes from is the business of `settings.py`. Secrets are not in here: credentials come by
boto3's own chain, from the environment or files.
"""

import hashlib
import os
import re
from pathlib import Path

import msgspec

from lmstorfs.store.store import StoreConfig
from lmstorfs.units import MIB


class SsdConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One SSD tier: a directory and its budget in bytes."""

    path: str
    budget_bytes: int


class MountConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a mount needs to know; written to `STATE/mount.json` (mode 0600)."""

    mountpoint: str
    state_dir: str
    store: StoreConfig
    ram_bytes: int
    ssd: tuple[SsdConfig, ...] = ()
    fsync: str = "copy"
    """What `fsync` waits for: `copy` (mirror or store), `store`, or `ram` (nothing)."""
    fsync_timeout_s: float = 600.0
    """After this an `fsync` fails with EIO: every operation has a deadline."""
    read_timeout_s: float = 120.0
    """After this a read that needs the store fails with EIO."""
    read_only: bool = False
    allow_other: bool = True
    data_path: str = "auto"
    """`auto` (passthrough where it is to be had) or `userspace`."""
    attr_timeout_s: float = 5.0
    """For how long what the store said of a file that is not dirty here is believed."""
    flush_delay_s: float = 0.5
    """A closed version waits this long for its rename and attributes; an `fsync` does not."""
    workers: int = 2
    """Processes that upload and download."""
    log_level: str = "info"
    mirror: str | None = None
    """HOST:PORT of the peer that keeps replicas of what is written here."""
    listen: str | None = None
    """HOST:PORT where replicas are taken for other nodes."""
    secret_file: str | None = None
    """A file that holds what proves that two nodes belong together."""
    keep_replicas: int = 2
    """Newest checkpoints whose replicas the mirror keeps after they are stored."""
    replica_bytes: int = 0
    """Share of the RAM tier for other nodes' replicas."""
    recover_from: str | None = None
    """HOST:PORT of the mirror of a node that died, whose place this mount takes."""
    recover_origin: str = ""
    """Which node that was, where the mirror knows several; 32 hex digits."""
    guard: bool = True
    """Whether the bytes of the newest restorable checkpoint outlive its deletion."""
    restart_limit: int = 5
    """A daemon that dies this often within a minute is not started again."""

    @property
    def state(self) -> Path:
        """The state directory."""
        return Path(self.state_dir)


PARTS = {
    "ram": "ram",
    "catalog": "catalog.db",
    "config": "mount.json",
    "socket": "control.sock",
    "lock": "lock",
    "log": "daemon.log",
    "store": "store",
    "down": "down",
    "closed": "closed",
    "replicas": "replicas",
}
MIN_RAM_BYTES = 16 * MIB  # less holds no checkpoint at all, only trouble


def write_config(config: MountConfig) -> None:
    """Write `config` into its state directory, readable by the owner alone."""
    target = config.state / PARTS["config"]
    target.write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2))
    target.chmod(0o600)


def read_config(state: Path) -> MountConfig:
    """Return the configuration that `state` holds."""
    return msgspec.json.decode((state / PARTS["config"]).read_bytes(), type=MountConfig)


def mount_name(mountpoint: str) -> str:
    """Return the name of a mount point's files: `ckpt` for /ckpt, `mnt-ckpt` for /mnt/ckpt.

    Two mount points never share a name: where the plain one would not tell them apart (/a-b and
    /a/b) or is no good file name, a hash is added behind `~`, which plain names do not contain.
    """
    parts = [part for part in mountpoint.split("/") if part]
    plain = "-".join(parts)
    if all(re.fullmatch(r"\w[\w.]*", part, re.ASCII) for part in parts) and 0 < len(plain) < 100:
        return plain
    digest = hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', plain).lstrip('.')[:100]}~{digest}"


def default_state_dir(mountpoint: str) -> str:
    """Return where a mount's state lives when nobody says where."""
    base = os.environ.get("XDG_STATE_HOME")
    if base:
        root = Path(base) / "lmstorfs"
    elif os.geteuid() == 0:
        root = Path("/var/lib/lmstorfs")
    else:
        root = Path.home() / ".local" / "state" / "lmstorfs"
    return str(root / mount_name(mountpoint))
