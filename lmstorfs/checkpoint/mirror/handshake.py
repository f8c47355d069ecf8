"""Both ends prove that they know the same secret, before either believes a byte.

    mirror → origin   MAGIC, its nonce
    origin → mirror   MAGIC, its nonce, HMAC(secret, "origin", both nonces)
    mirror → origin   HMAC(secret, "mirror", both nonces)

Fresh nonces on both sides make a recorded exchange worthless. HMAC is SHA-256; the keys that later
messages are signed with come from the same nonces, one for each direction.
"""

import hmac
import os
import stat
from collections.abc import Callable
from pathlib import Path

from lmstorfs.errors import (
    PeerError,
    PeerProtocolError,
    PeerRefusedError,
    PeerTimeoutError,
    SetupError,
)

MAGIC = b"LMSTRFS\x01"  # the last byte is the protocol's version
NONCE_BYTES = 32
_PROOF_BYTES = 32
_SECRET_MIN_BYTES = 16

Send = Callable[[bytes], None]
Receive = Callable[[int], bytes]


def _mac(secret: bytes, what: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, what + nonces, "sha256")


def prove_as_origin(secret: bytes, send: Send, receive: Receive) -> tuple[bytes, bytes]:
    """Do the origin's part; return the keys for sending and receiving. Raises `PeerError`."""
    greeting = receive(len(MAGIC) + NONCE_BYTES)
    _check_magic(greeting)
    nonce = os.urandom(NONCE_BYTES)
    nonces = greeting[len(MAGIC) :] + nonce
    send(MAGIC + nonce + _mac(secret, b"origin", nonces))
    try:
        proof = receive(_PROOF_BYTES)
    except PeerTimeoutError:
        raise
    except PeerError as error:  # it heard the proof and hung up
        raise PeerRefusedError("the mirror refused; both nodes need the same secret") from error
    if not hmac.compare_digest(proof, _mac(secret, b"mirror", nonces)):
        raise PeerRefusedError("the mirror does not know the secret")
    return _mac(secret, b"from origin", nonces), _mac(secret, b"from mirror", nonces)


def prove_as_mirror(secret: bytes, send: Send, receive: Receive) -> tuple[bytes, bytes]:
    """Do the mirror's part; return the keys for sending and receiving. Raises `PeerError`."""
    own = os.urandom(NONCE_BYTES)
    send(MAGIC + own)
    answer = receive(len(MAGIC) + NONCE_BYTES + _PROOF_BYTES)
    _check_magic(answer)
    nonces = own + answer[len(MAGIC) : -_PROOF_BYTES]
    if not hmac.compare_digest(answer[-_PROOF_BYTES:], _mac(secret, b"origin", nonces)):
        raise PeerRefusedError("it does not know the secret")
    send(_mac(secret, b"mirror", nonces))
    return _mac(secret, b"from mirror", nonces), _mac(secret, b"from origin", nonces)


def _check_magic(data: bytes) -> None:
    if data[: len(MAGIC) - 1] != MAGIC[:-1]:
        raise PeerProtocolError("it does not speak this protocol")
    if data[len(MAGIC) - 1] != MAGIC[-1]:
        raise PeerProtocolError("it speaks another version of the protocol; upgrade the older node")


def read_secret(path: Path) -> bytes:
    """Return the secret in the file. Raises `SetupError` where others could read or guess it."""
    try:
        # O_NONBLOCK: a FIFO would be waited for; one open file, so that what is checked is read
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as file:  # noqa: PTH123 - by its descriptor
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise SetupError(f"the secret file {path} is no file")
            secret = file.read().rstrip()
    except OSError as error:
        raise SetupError(f"the secret file {path} cannot be read: {error.strerror}") from error
    if found.st_mode & 0o077:
        raise SetupError(f"others can read the secret file {path}; run: chmod 600 {path}")
    if found.st_uid != os.geteuid() and os.geteuid() != 0:
        raise SetupError(f"the secret file {path} belongs to another user")
    if len(secret) < _SECRET_MIN_BYTES:
        raise SetupError(
            f"the secret in {path} is shorter than {_SECRET_MIN_BYTES} bytes; make one: "
            f"(umask 077; head -c 32 /dev/urandom | base64 > {path})"
        )
    return secret
