"""The store: where files end up for good."""

from lmstorfs.store.location import open_store
from lmstorfs.store.store import (
    Attributes,
    Cancelled,
    Capacity,
    Kind,
    ObjectInfo,
    Store,
    StoreConfig,
    Unwatched,
    Watch,
)

__all__ = [
    "Attributes",
    "Cancelled",
    "Capacity",
    "Kind",
    "ObjectInfo",
    "Store",
    "StoreConfig",
    "Unwatched",
    "Watch",
    "open_store",
]
