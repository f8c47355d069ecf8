"""Which data path a mount takes: passthrough where it is to be had."""

import os
from pathlib import Path

from lmstorfs.fuse.channel import Channel


def why_userspace(wanted: str, channel: Channel, tier: Path) -> str | None:
    """Return why bytes go through the daemon; None: they do not, passthrough works.

    `wanted` is the setting `data_path`, `tier` a directory whose files are to be passed through.
    """
    if wanted == "userspace":
        return "asked for by -o data_path=userspace"
    if os.geteuid() != 0:
        return "passthrough needs root (CAP_SYS_ADMIN)"
    if not channel.passthrough:
        return f"kernel {os.uname().release} has no FUSE passthrough (6.9 and newer have)"
    return _refused(channel, tier / "probe")


def _refused(channel: Channel, probe: Path) -> str | None:
    """Try passthrough with a file of a tier; return why it is not to be had."""
    fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        channel.backing_close(channel.backing_open(fd))
    except OSError as error:
        return f"the kernel refused passthrough: {error.strerror}"
    finally:
        os.close(fd)
        probe.unlink()
    return None
