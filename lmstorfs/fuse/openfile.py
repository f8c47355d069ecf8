"""One inode that is open on the mount.

The kernel's rule: all opens of one inode at one time are in passthrough with the same backing
id, or none is. So all that the opens share lives here, by inode, and is gone after the last
RELEASE.
"""

from lmstorfs.fuse.handle import handle_mappable, handle_writable
from lmstorfs.tiers import Tier


class OpenFile:
    """What all opens of one inode share."""

    def __init__(
        self, ino: int, name: bytes, fd: int | None, tier: Tier | None, *, passthrough: bool
    ) -> None:
        self.ino = ino
        self.name = name
        self.fd = fd
        """The tier's file; None where it is in no tier and reads go to the store."""
        self.tier = tier
        self.passthrough = passthrough
        self.backing_id: int | None = None
        self.readers = 0
        self.writers = 0
        self.written = False
        """Whether the content may differ from the newest version in ways that stat hides."""
        self.anew = False
        """Whether the content began anew, empty, with an open that lasts."""
        self.mappable = False
        self.vouched = False
        """Whether a close or an fsync made a version since the first writer came."""
        self.last_size = 0
        """Size when the reservation was looked after last."""

    @property
    def count(self) -> int:
        """Opens that are not released yet."""
        return self.readers + self.writers

    def add(self, handle: int) -> None:
        """One more open."""
        if handle_writable(handle):
            self.writers += 1
            self.mappable |= handle_mappable(handle)
        else:
            self.readers += 1

    def remove(self, handle: int) -> None:
        """One open less."""
        if handle_writable(handle):
            self.writers -= 1
        else:
            self.readers -= 1
