"""Sees which checkpoints one mount has, and which ones the deletion guard keeps."""

import os
from collections.abc import Callable, Iterable

from lmstorfs.catalog.catalog import Inode
from lmstorfs.catalog.guarded import GuardedFile
from lmstorfs.catalog.sqlite import SqliteCatalog
from lmstorfs.checkpoint.checkpoints import Checkpoint, Copies, checkpoint_of, names_step
from lmstorfs.checkpoint.flusher import Flusher
from lmstorfs.checkpoint.survey import Sighting, counts, judge

_RECENT_FILES = 5000  # enough for the newest checkpoints, and bounded whatever the mount holds
_MEMBERS_MAX = 50_000  # a directory with more files is no checkpoint

Files = list[tuple[str, Inode]]


class Surveyor:
    """Makes sightings of the catalog's rows."""

    def __init__(
        self,
        catalog: SqliteCatalog,
        flusher: Flusher,
        mirror_holds: Callable[[int, int], bool],
    ) -> None:
        """Take `mirror_holds`: whether the mirror has this version of an inode."""
        self._catalog = catalog
        self._flusher = flusher
        self._mirror_holds = mirror_holds

    def survey(self, *, but: str | None = None, also: Iterable[Sighting] = ()) -> list[Sighting]:
        """Return all checkpoints that are there or kept, judged.

        Without what is there of the checkpoint `but`; `also` are judged, too.
        """
        there = [sighting for sighting in self._named() if sighting.path != but]
        found = [*there, *also, *self.kept()]
        self._mark_remains(found)
        judge(found)
        return found

    # --- what has its name -------------------------------------------------------------------

    def _named(self) -> list[Sighting]:
        found: dict[str, Sighting] = {}
        inodes = {inode.ino: inode for inode in self._catalog.contents.recent(_RECENT_FILES)}
        inodes |= {row.ino: row for row in self._catalog.contents.torn() if row.is_file}
        for inode in inodes.values():
            path = self._catalog.path(inode.ino)
            if path is not None:
                name = checkpoint_of(path)
                sighting = found.setdefault(name, Sighting(path=name))
                self._add(sighting, path, inode)
        return list(found.values())

    def sighting(self, checkpoint: str, files: Files) -> Sighting:
        """Return the sighting of a checkpoint that has these files."""
        sighting = Sighting(path=checkpoint)
        for path, inode in files:
            self._add(sighting, path, inode)
        return sighting

    def _add(self, sighting: Sighting, path: str, inode: Inode) -> None:
        closed = self.is_closed(inode)
        if not closed and not counts(sighting.path, path):
            return  # a log, which is written on
        second = self.has_second(inode)
        sighting.add(path, inode, closed=closed and self._is_there(inode), second=second)

    def is_closed(self, inode: Inode) -> bool:
        """Whether the file holds its newest version, and nobody is writing another."""
        vouched = inode.version > 0 and bool(inode.sealed)
        return vouched and not self._flusher.is_overtaken(inode)

    def _is_there(self, inode: Inode) -> bool:
        return inode.tier is not None or self.has_second(inode)

    def has_second(self, inode: Inode) -> bool:
        """Whether the mirror or the store have its newest version."""
        stored = inode.version > 0 and not inode.dirty
        return stored or self._mirror_holds(inode.ino, inode.version)

    def files_of(self, checkpoint: str, path: str, inode: Inode) -> Files | None:
        """Return the files of the checkpoint of `path`; None: too many to be one."""
        folder = self._catalog.resolve(checkpoint)
        if path == checkpoint or folder is None:
            return [(path, inode)]
        found: Files = []
        waiting = [(checkpoint, folder)]
        # One that no number in its name tells from others is what lies directly in a directory.
        deep = checkpoint != path.rpartition("/")[0] or names_step(checkpoint)
        while waiting:
            place, directory = waiting.pop()
            for entry in self._catalog.children(directory.ino):
                inner = f"{place}/{os.fsdecode(entry.name)}"
                if entry.inode.is_dir and deep:
                    waiting.append((inner, entry.inode))
                elif entry.inode.is_file and checkpoint_of(inner) == checkpoint:
                    found.append((inner, entry.inode))
            if len(found) > _MEMBERS_MAX:
                return None
        return found

    # --- what is kept ------------------------------------------------------------------------

    def kept(self) -> list[Sighting]:
        """Return the checkpoints of which the guard keeps files."""
        found: dict[int, Sighting] = {}
        for row in self._catalog.guarded.rows():
            sighting = found.setdefault(
                row.number, Sighting(path=row.checkpoint, number=row.number)
            )
            inode = self._catalog.find(row.ino)
            if inode is None or inode.version != row.version:
                if row.weights:
                    sighting.closed = False  # it was changed in place: the checkpoint is no more
                continue
            second = self.has_second(inode)
            sound = bool(inode.sealed) or not inode.writing
            sighting.add(row.path, inode, closed=sound, second=second)
        return list(found.values())

    def deleted_sets(self) -> dict[int, list[GuardedFile]]:
        """Return the sets by number whose checkpoints are not there any more as they were."""
        found: dict[int, list[GuardedFile]] = {}
        for row in self._catalog.guarded.rows():
            found.setdefault(row.number, []).append(row)
        missed = {n: any(self.is_missed(row) for row in rows) for n, rows in found.items()}
        return {number: rows for number, rows in found.items() if missed[number]}

    def deleted(self, seen: list[Sighting]) -> list[Checkpoint]:
        """Return the checkpoints of these that can be brought back, newest first."""
        found = []
        sets = self.deleted_sets()
        for sighting in sorted(seen, key=lambda each: -each.closed_at):
            rows = sets.get(sighting.number or 0)
            if rows is not None:
                checkpoint = Checkpoint(
                    path=sighting.path,
                    files=sighting.files,
                    bytes=sighting.bytes,
                    complete=sighting.whole,
                    weights=sighting.weights,
                    copies=self._copies(rows),
                    closed_at=sighting.closed_at,
                    lacks=sighting.lacks,
                    deleted=True,
                )
                found.append(checkpoint)
        return found

    def _copies(self, rows: list[GuardedFile]) -> Copies:
        copies = Copies()
        for inode in filter(None, (self._catalog.find(row.ino) for row in rows)):
            tier = inode.tier or ""
            copies.ram &= tier == "ram"
            copies.ssd &= tier.startswith("ssd")
            copies.mirror &= self._mirror_holds(inode.ino, inode.version)
            copies.store &= inode.version > 0 and not inode.dirty
        return copies

    def _mark_remains(self, found: list[Sighting]) -> None:
        """Find what is left of a checkpoint that is being deleted or written over."""
        named = {sighting.path: sighting for sighting in found if sighting.number is None}
        sets: dict[int, list[GuardedFile]] = {}
        for row in self._catalog.guarded.rows():
            if row.checkpoint in named:
                sets.setdefault(row.number, []).append(row)
        for rows in sets.values():
            sighting = named[rows[0].checkpoint]
            if any(self.is_as_it_was(row) for row in rows if not row.deleted_at and row.weights):
                missed = [row.path.rpartition("/")[2] for row in rows if self.is_missed(row)]
                sighting.lacks = sighting.lacks or missed

    def is_missed(self, row: GuardedFile) -> bool:
        """Whether the row's checkpoint is not what it was, since this file of it was deleted."""
        if not row.deleted_at or not counts(row.checkpoint, row.path):
            return False
        there = self._catalog.resolve(row.path)
        return bool(row.weights) or there is None or not self.is_closed(there)

    def is_as_it_was(self, row: GuardedFile) -> bool:
        """Whether the file still has its name and its content."""
        inode = self._catalog.find(row.ino)
        is_there = inode is not None and inode.nlink > 0 and inode.version == row.version
        return is_there and not row.deleted_at
