"""The boto3 client, and what its errors mean to us.

Retries are few and short here: whoever calls retries for ever with a backoff of its own, and
wants to hear soon that a store is out of reach. No message repeats what the server or botocore
said beyond the error's code, as those texts may quote requests and with them credentials.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import boto3
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ReadTimeoutError,
    ResponseStreamingError,
    SSOError,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
)

from lmstorfs.errors import (
    ChangedInStoreError,
    NotInStoreError,
    StoreDeniedError,
    StoreError,
    StoreUnreachableError,
)
from lmstorfs.store.keys import own_name, printable, quote_name
from lmstorfs.store.store import StoreConfig

MAX_KEY_BYTES = 1024  # S3's limit for a key, prefix included
_CONNECT_TIMEOUT_S = 5
_READ_TIMEOUT_S = 60
_ATTEMPTS = 2
_SPARE_CONNECTIONS = 32  # small calls that run beside one large transfer
_DEFAULT_REGION = "us-east-1"  # what servers other than AWS expect, and AWS redirects from
_AWS_DOMAINS = (".amazonaws.com", ".amazonaws.com.cn", ".aws.dev")

_ABSENT = frozenset({"404", "NoSuchKey", "NotFound"})
_CHANGED = frozenset({"412", "PreconditionFailed", "ConditionalRequestConflict"})
_DENIED = frozenset(
    {
        "401",
        "403",
        "AccessDenied",
        "AccountProblem",
        "AllAccessDisabled",
        "AuthorizationHeaderMalformed",
        "ExpiredToken",
        "Forbidden",
        "InvalidAccessKeyId",
        "InvalidToken",
        "SignatureDoesNotMatch",
    }
)
_NO_CREDENTIALS = (
    NoCredentialsError,
    PartialCredentialsError,
    CredentialRetrievalError,
    SSOError,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
)
_CUT_OFF = (
    ConnectionClosedError,
    ConnectTimeoutError,
    EndpointConnectionError,
    HTTPClientError,
    IncompleteReadError,
    ReadTimeoutError,
    ResponseStreamingError,
)


class Bucket:
    """A bucket and a prefix in it, and the client that speaks with its server.

    The client is made when it is first asked for: that may take a second, as the search for
    credentials asks the cloud's metadata server too.
    """

    def __init__(self, config: StoreConfig, name: str, prefix: str) -> None:
        self.name = name
        self.connections = max(1, config.connections)
        self._config = config
        self._prefix = f"{prefix}/" if prefix else ""
        self._lock = threading.Lock()
        self._client: Any = None

    @property
    def client(self) -> Any:
        """The boto3 client; any thread may use it."""
        with self._lock:
            if self._client is None:
                self._client = _make_client(self._config)
            return self._client

    @property
    def endpoint(self) -> str:
        """The server's address, without user and password if it holds any."""
        parts = urlsplit(str(self.client.meta.endpoint_url))
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))

    @property
    def anonymous(self) -> bool:
        """Whether requests are not signed, as there are no credentials."""
        return bool(self.client.meta.config.signature_version is UNSIGNED)

    def object_key(self, key: str) -> str:
        """Return the object's key for ours; `key` may end in `/`, or be empty for the root."""
        full = self._prefix + quote_name(key)
        size = len(full.encode())
        if size > MAX_KEY_BYTES:
            raise StoreError(
                f"{printable(key)}: the key has {size} bytes, S3 takes {MAX_KEY_BYTES}"
            )
        return full

    def own_key(self, full: str) -> str | None:
        """Return our key for an object's; None where no file can have that name."""
        return own_name(full[len(self._prefix) :])

    def close(self) -> None:
        """Close the client's connections."""
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None


def _make_client(config: StoreConfig) -> Any:
    session = boto3.session.Session()
    options: dict[str, Any] = {
        "retries": {"mode": "standard", "total_max_attempts": _ATTEMPTS},
        "connect_timeout": _CONNECT_TIMEOUT_S,
        "read_timeout": _READ_TIMEOUT_S,
        "max_pool_connections": config.connections + _SPARE_CONNECTIONS,
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "tcp_keepalive": True,
    }
    region = session.region_name or _DEFAULT_REGION

    def make() -> Any:
        return session.client(
            "s3", endpoint_url=config.endpoint, region_name=region, config=Config(**options)
        )

    client = make()
    host = urlsplit(client.meta.endpoint_url).hostname or ""
    if host.endswith(_AWS_DOMAINS):
        return client
    options["s3"] = {"addressing_style": "path"}
    if session.get_credentials() is None:
        options["signature_version"] = UNSIGNED  # a server for everybody; AWS is never one
    client.close()
    return make()


@contextmanager
def s3_errors(what: str) -> Iterator[None]:
    """Turn every error of botocore in the block into the `StoreError` that it stands for."""
    try:
        yield
    except (ClientError, BotoCoreError) as error:
        raise s3_error(error, what) from error


def s3_error(error: ClientError | BotoCoreError, what: str) -> StoreError:
    """Return the `StoreError` for `error`, which happened to `what` (a key or a bucket)."""
    what = printable(what)
    if isinstance(error, ClientError):
        code = code_of(error)
        if code in _ABSENT:
            return NotInStoreError(f"{what}: not in the store")
        if code in _CHANGED:
            return ChangedInStoreError(f"{what} changed in the store")
        if code in _DENIED:
            return StoreDeniedError(f"{what}: the store refused ({code})")
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return StoreError(f"{what}: the store failed ({code}, status {status})")
    if isinstance(error, _NO_CREDENTIALS):
        return StoreDeniedError(f"{what}: no usable credentials ({type(error).__name__})")
    if isinstance(error, _CUT_OFF):
        return StoreUnreachableError(f"{what}: no answer ({type(error).__name__})")
    return StoreError(f"{what}: {type(error).__name__}")


def code_of(error: ClientError) -> str:
    """Return the error's code, as S3 names it; a status where there was no body."""
    return str(error.response.get("Error", {}).get("Code", "unknown"))
