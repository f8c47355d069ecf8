"""Brings back what was deleted and is kept: `lmstorfs undelete`."""

import os
import stat
from collections.abc import Callable
from typing import Any

import structlog
import trio

from lmstorfs.catalog.catalog import ROOT_INO, Inode
from lmstorfs.catalog.guarded import GuardedFile
from lmstorfs.catalog.sqlite import SqliteCatalog
from lmstorfs.checkpoint.digester import Digester
from lmstorfs.checkpoint.flusher import Flusher
from lmstorfs.checkpoint.guard import Guard
from lmstorfs.checkpoint.ladder import Ladder
from lmstorfs.checkpoint.mirror.client import Mirror
from lmstorfs.checkpoint.survey import counts
from lmstorfs.checkpoint.surveyor import Surveyor
from lmstorfs.errors import LmstorfsError, SetupError
from lmstorfs.tiers import Placement

log = structlog.get_logger()

_SETTLED_S = 10.0  # nobody waits longer for digests, nor for the store to move things back
_LOOK_S = 0.05


class Undeleter:
    """The kept checkpoints of one mount."""

    def __init__(
        self,
        catalog: SqliteCatalog,
        placement: Placement,
        guard: Guard,
        surveyor: Surveyor,
        ladder: Ladder,
        flusher: Flusher,
        digester: Digester,
        mirror: Mirror | None,
        made_here: Callable[[int], None],
    ) -> None:
        """Take `made_here`, told of directories that the store need not be asked for."""
        self._catalog = catalog
        self._placement = placement
        self._guard = guard
        self._surveyor = surveyor
        self._ladder = ladder
        self._flusher = flusher
        self._digester = digester
        self._mirror = mirror
        self._made_here = made_here

    def kept(self) -> list[dict[str, Any]]:
        """Return what can be brought back, the newest first; paths are below the mount point."""
        found = []
        sets = self._surveyor.deleted_sets()
        for sighting in sorted(self._surveyor.survey(), key=lambda each: -each.closed_at):
            rows = sets.get(sighting.number or 0)
            if rows is not None:
                found.append(
                    {
                        "path": sighting.path,
                        "files": sighting.files,
                        "bytes": sighting.bytes,
                        "complete": sighting.whole,
                        "closed_at": sighting.closed_at,
                        "deleted_at": max(row.deleted_at for row in rows),
                        "still_there": [r.path for r in rows if self._surveyor.is_as_it_was(r)],
                    }
                )
        return found

    def _find(self, path: str) -> tuple[int, list[GuardedFile]]:
        sets = self._surveyor.deleted_sets()
        found = {number: rows for number, rows in sets.items() if rows[0].checkpoint == path}
        if not found:
            others = sorted({rows[0].checkpoint for rows in sets.values()})
            known = f"; what can be brought back is {', '.join(others)}" if others else ""
            raise SetupError(f"no deleted checkpoint {path} is kept{known}")
        return max(found.items())

    # --- bringing back -----------------------------------------------------------------------

    def discard(self, path: str) -> None:
        """Let a kept checkpoint go for good, or all (`""`). Raises `SetupError` for an unknown."""
        numbers = {row.number for row in self._catalog.guarded.rows()}
        for number in sorted(numbers) if not path else [self._find(path)[0]]:
            self._guard.let_go(number)

    async def undelete(self, path: str, to: str | None) -> dict[str, Any]:
        """Bring the kept checkpoint `path` back, under its name or as `to`.

        Returns when its files can be read, or it is known why not. Raises `SetupError`, with
        nothing changed, where a name is taken or a content is gone.
        """
        number, rows = self._find(path)
        targets = {}
        for row in rows:
            if row.deleted_at:
                target = (to if to is not None else path) + row.path[len(path) :]
                taken = self._catalog.resolve(target) is not None
                if taken and self._is_in_the_way(row):
                    raise SetupError(f"{target} is there again; rename it, or give --to NEWPATH")
                if not taken:
                    self._check_content(row)
                    targets[row.ino] = target
        with self._catalog.db.transaction():
            keys = [self._catalog.get(ino).stored_key for ino in targets]
            for ino, target in targets.items():
                inode = self._catalog.get(ino)
                folder, _, name = target.rpartition("/")
                parent = self._directory(folder, inode)
                self._catalog.guarded.forget(row for row in rows if row.ino == ino)
                self._catalog.restore(parent, os.fsencode(name), ino)
            self._catalog.guarded.came_back(keys)
        self._guard.let_go(number)  # logs that have been begun anew, and notes
        log.info("undeleted", checkpoint=path, to=to, files=len(targets))
        back = [self._catalog.get(ino) for ino in targets]
        problems = [problem for inode in back if (problem := await self._make_ready(inode))]
        left = {row.ino: row.path for row in rows if not row.deleted_at and to is None}
        for ino in left:
            self._flusher.urgent(ino)
        with trio.move_on_after(_SETTLED_S):
            await self._settled({**left, **targets})
        return {
            "path": to if to is not None else path,
            "paths": sorted(targets.values()),
            "files": len(targets),
            "bytes": sum(inode.version_size for inode in back),
            "problems": problems,
        }

    def _is_in_the_way(self, row: GuardedFile) -> bool:
        """Whether a file that is where the row's was may be of another save."""
        if not counts(row.checkpoint, row.path):
            return False
        return self._surveyor.is_missed(row) or self._catalog.guarded.keeps_weights(row.number)

    def _check_content(self, row: GuardedFile) -> None:
        inode = self._catalog.get(row.ino)
        tier = self._placement.tier(inode.tier)
        try:
            same = tier is None or inode.is_version(tier.path(inode.ino).stat())
        except FileNotFoundError:
            same = False
        if not same or inode.version != row.version:
            raise SetupError(f"{row.path} was written to after it was deleted: it is no more")

    def _directory(self, path: str, like: Inode) -> int:
        """Return the directory `path`, made for the owner of `like` where it is gone."""
        ino = ROOT_INO
        for part in filter(None, path.split("/")):
            found = self._catalog.lookup(ino, os.fsencode(part))
            if found is None:
                found = self._catalog.create(
                    ino, os.fsencode(part), mode=stat.S_IFDIR | 0o755, uid=like.uid, gid=like.gid
                )
                self._made_here(found.ino)
            elif not found.is_dir:
                raise SetupError(f"{path} is no directory any more; give --to NEWPATH")
            ino = found.ino
        return ino

    async def _make_ready(self, inode: Inode) -> str | None:
        """See to it that the file can be read, and gets its copies; return what is in the way."""
        if inode.tier is not None and inode.digest is None:
            self._digester.add(inode.ino, inode.version)
        elif self._mirror is not None and inode.dirty:
            self._mirror.closed(inode.ino, inode.version, None)
        if inode.dirty:
            self._flusher.urgent(inode.ino)  # it is what there is to go on from
        if inode.tier is None and inode.dirty:
            try:
                await self._ladder.bring(inode)
            except LmstorfsError as error:
                return str(error)
        return None

    async def _settled(self, targets: dict[int, str]) -> None:
        """Return when the files have digests, and the store has what it has in its place."""
        while any(self._catalog.journal.blocks(path) for path in targets.values()) or any(
            inode.digest is None and inode.tier is not None
            for inode in filter(None, map(self._catalog.find, targets))
        ):
            with trio.move_on_after(_LOOK_S):
                await self._flusher.changed()
