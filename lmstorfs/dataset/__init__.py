"""Reading what only the store has."""

from lmstorfs.dataset.fetcher import Fetcher, ReadStatistics

__all__ = ["Fetcher", "ReadStatistics"]
