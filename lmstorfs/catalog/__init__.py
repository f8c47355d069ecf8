"""The catalog: inodes, names, sizes, versions and states of all files."""

from lmstorfs.catalog.catalog import ROOT_INO, Entry, Inode, JournalEntry, Pending
from lmstorfs.catalog.listing import Changes, Merger
from lmstorfs.catalog.sqlite import NamespaceError, SqliteCatalog

__all__ = [
    "ROOT_INO",
    "Changes",
    "Entry",
    "Inode",
    "JournalEntry",
    "Merger",
    "NamespaceError",
    "Pending",
    "SqliteCatalog",
]
