"""Every error that lmstorfs raises on purpose, and the one place where errors become an errno.

Two families: `SetupError` speaks to a person (one line that says what to do; the command line
prints it and exits), the rest speak to a program through an errno.
"""

import errno


class LmstorfsError(Exception):
    """Base of all errors of this package; `errno` is what a program on the mount sees."""

    errno: int = errno.EIO


class SetupError(LmstorfsError):
    """A command cannot do what was asked; the message is one line that says what to do.

    `exit_code` is 1, or 2 where the words of the command were wrong.
    """

    exit_code = 1


class UsageError(SetupError):
    """The words of a command are wrong (exit code 2)."""

    exit_code = 2


class NoRoomError(LmstorfsError):
    """No tier can take the bytes, and nothing can be freed."""

    errno = errno.ENOSPC


class DeadlineError(LmstorfsError):
    """The store did not answer within the time that an operation may take."""

    errno = errno.EIO


class StoreError(LmstorfsError):
    """The store failed; trying again later may help."""


class StoreUnreachableError(StoreError):
    """The store cannot be reached at all (network, DNS, a mount that is gone)."""


class StoreDeniedError(StoreError):
    """The store refused: credentials, policy or file permissions."""

    errno = errno.EACCES


class NotInStoreError(StoreError):
    """The store has no such object."""

    errno = errno.ENOENT


class ChangedInStoreError(StoreError):
    """The object is no longer the one that was asked for (its ETag differs)."""

    errno = errno.ESTALE


class FencedError(LmstorfsError):
    """Another node has taken this one's place: what it writes must not reach the store."""


class SupersededError(LmstorfsError):
    """The file changed while its version was being brought to the store; nothing was published."""


class CorruptCopyError(LmstorfsError):
    """A copy's digest is not its version's."""


class PeerError(LmstorfsError):
    """The mirror's peer cannot be reached, or the connection broke."""


class PeerRefusedError(PeerError):
    """The peer refused: another secret, or something that it does not do."""


class PeerProtocolError(PeerError):
    """The peer spoke rubbish."""


class PeerTimeoutError(PeerError):
    """The peer said nothing for too long."""


def errno_of(error: BaseException) -> int:
    """Return the errno that stands for `error` on the mount."""
    if isinstance(error, LmstorfsError):
        return error.errno
    if isinstance(error, OSError) and error.errno:
        return error.errno
    return errno.EIO


class SaveError(LmstorfsError):
    """A checkpoint could not be saved; the message names its path. Nothing torn is left there."""


class UnsavableError(SaveError):
    """The format cannot hold the object."""

    errno = errno.EINVAL


class PoolFullError(SaveError):
    """No memory of the staging pool came free in time."""

    errno = errno.ENOMEM


class LoadError(LmstorfsError):
    """A checkpoint does not fit what it is to be loaded into."""

    errno = errno.EINVAL
