"""From a store's URL to the store: the one place that knows which schemes there are."""

from urllib.parse import unquote, urlsplit

from lmstorfs.errors import UsageError
from lmstorfs.store.store import Store, StoreConfig

_WORKING = "write s3://BUCKET/PREFIX, or an absolute path such as /mnt/nfs/checkpoints"


def open_store(config: StoreConfig) -> Store:
    """Return the store that `config.url` names; nothing is contacted before it is used.

    Raises `UsageError` for a URL that names none.
    """
    url = config.url
    if url.startswith("/"):
        return _directory(url)
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise UsageError(f"the store '{url}' is a relative path; {_WORKING}")
    match scheme.lower():
        case "s3":
            # boto3 takes half a second to import, which a directory's users need not pay
            from lmstorfs.store.s3 import S3Store

            bucket, _, prefix = rest.partition("/")
            if not bucket:
                raise UsageError(f"the store '{url}' names no bucket; {_WORKING}")
            return S3Store(config, bucket, prefix.strip("/"))
        case "file":
            parts = urlsplit(url)
            if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
                raise UsageError(f"the store '{url}' is no absolute path; {_WORKING}")
            return _directory(unquote(parts.path))
    raise UsageError(f"stores of the kind '{scheme}://' do not exist; {_WORKING}")


def _directory(path: str) -> Store:
    from lmstorfs.store.directory import DirectoryStore

    return DirectoryStore(path)
