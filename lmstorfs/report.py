"""What `status` and `checkpoints` say: read from the parts' own statistics, never kept twice."""

import time
from typing import Any

import msgspec

from lmstorfs.catalog import SqliteCatalog
from lmstorfs.checkpoint import Checkpoint, Flusher, checkpoints
from lmstorfs.checkpoint.guard import Guard
from lmstorfs.checkpoint.ladder import Ladder
from lmstorfs.checkpoint.mirror.client import Mirror
from lmstorfs.checkpoint.mirror.service import Replicas
from lmstorfs.checkpoint.recovery import Adopted
from lmstorfs.checkpoint.surveyor import Surveyor
from lmstorfs.config import PARTS, MountConfig
from lmstorfs.dataset import Fetcher
from lmstorfs.fuse.handles import OpenFiles
from lmstorfs.tiers import Placement, Tier

_RECENT_FILES = 5000  # enough for the newest checkpoints, and bounded whatever the mount holds


class Report:
    """Answers questions about one mount."""

    def __init__(
        self,
        config: MountConfig,
        catalog: SqliteCatalog,
        placement: Placement,
        flusher: Flusher,
        fetcher: Fetcher,
        opened: OpenFiles,
        ladder: Ladder,
        mirror: Mirror | None,
        replicas: Replicas | None,
        guard: Guard,
        surveyor: Surveyor,
    ) -> None:
        self._config = config
        self._catalog = catalog
        self._placement = placement
        self._flusher = flusher
        self._fetcher = fetcher
        self._opened = opened
        self._ladder = ladder
        self._mirror = mirror
        self._replicas = replicas
        self._guard = guard
        self._surveyor = surveyor
        self.adopted = Adopted()
        """What the daemon found when it started."""
        self.restarts = 0
        """How many daemons of this mount have died and were replaced."""
        self._started = time.monotonic()
        self.state = "ready"
        """`ready` or `draining`; `degraded` is found, not set."""
        self.data_path = "userspace"
        self.data_path_reason: str | None = None

    def status(self, pid: int, version: str) -> dict[str, Any]:
        """Return the answer to `status --json`."""
        reasons = self._reasons()
        state = self.state
        if state == "ready" and reasons:
            state = "degraded"
        if state == "ready" and self._ladder.missing:
            state = "recovering"
        return {
            "version": version,
            "mountpoint": self._config.mountpoint,
            "state": state,
            "reasons": reasons,
            "data_path": self.data_path,
            "data_path_reason": self.data_path_reason,
            "pid": pid,
            "uptime_s": round(time.monotonic() - self._started, 1),
            "log": str(self._config.state / PARTS["log"]),
            "fsync": self._config.fsync,
            "store": self._store(),
            "tiers": [self._tier(tier) for tier in self._placement.tiers],
            "mirror": self._mirror_status(),
            "replicas": self._replicas_held(),
            "guarded": msgspec.to_builtins(self._guard.statistics()),
            "reads": {
                key: value
                for key, value in msgspec.to_builtins(self._fetcher.reads).items()
                if key != "corrupt_copies"
            },
            "recovery": {
                "daemon_restarts": self.restarts,
                "adopted_files": self.adopted.files,
                "from_mirror_files": self._ladder.from_mirror_files,
                "from_store_files": self._ladder.from_store_files,
                "missing_files": self._ladder.missing,
                "lost_files": len(self._ladder.lost),
                "rolled_back_files": len(self._ladder.rolled_back),
                "corrupt_copies": self._fetcher.reads.corrupt_copies,
            },
            "checkpoints": self.checkpoints(5),
        }

    def _reasons(self) -> list[str]:
        found = []
        if self._flusher.health.degraded_reason:
            found.append(self._flusher.health.degraded_reason)
        if self._flusher.fence.reason is not None:
            found.append(f"fenced: {self._flusher.fence.reason}")
        mirror = self._mirror.status() if self._mirror is not None else None
        if mirror is not None and mirror.reason:
            found.append(mirror.reason)
        if self._ladder.lost:
            found.append(_name_some("no copy left", list(self._ladder.lost.values())))
        if self._ladder.rolled_back:
            what = "an older version serves, the newest was lost with its RAM"
            found.append(_name_some(what, list(self._ladder.rolled_back.values())))
        torn = [path for path in self.adopted.torn if self._still_torn(path)]
        if torn:
            found.append(_name_some("was being written when the daemon died", torn))
        return found

    def _mirror_status(self) -> dict[str, Any]:
        if self._mirror is None:
            return {"peer": None, "state": "off", "lag_bytes": 0, "lag_s": 0.0}
        return dict(msgspec.to_builtins(self._mirror.status()))

    def _replicas_held(self) -> dict[str, Any]:
        if self._replicas is None:
            return {"origins": 0, "files": 0, "bytes": 0}
        return dict(msgspec.to_builtins(self._replicas.statistics()))

    def _still_torn(self, path: str) -> bool:
        inode = self._catalog.resolve(path)
        return inode is not None and inode.torn

    def torn(self) -> list[str]:
        """Return the files that nobody vouches for and nobody has open now."""
        rows = [row for row in self._catalog.contents.torn() if not self._opened.is_open(row.ino)]
        return [self._catalog.path(row.ino) or "" for row in rows]

    def _store(self) -> dict[str, Any]:
        pending = self._catalog.contents.pending()
        health = self._flusher.health
        oldest = pending.oldest_closed_at
        return {
            "url": self._config.store.url,
            "state": health.state,
            "pending_files": pending.files + len(self._catalog.journal),
            "pending_bytes": pending.bytes,
            "stored_bytes": self._catalog.contents.stored_bytes(),
            "oldest_pending_s": round(max(0.0, time.time() - oldest), 1) if oldest else 0.0,
            "retries": health.retries,
            "last_error": health.last_error,
            "flushing": msgspec.to_builtins(self._flusher.statistics()),
        }

    def _tier(self, tier: Tier) -> dict[str, Any]:
        statistics = msgspec.to_builtins(tier.statistics())
        statistics["dirty_bytes"] = self._catalog.contents.dirty_bytes(tier.name)
        statistics["name"] = "ssd" if tier.name.startswith("ssd") else tier.name
        return dict(statistics)

    def checkpoints(self, limit: int = 1000) -> list[dict[str, Any]]:
        """Return the newest checkpoints, newest first; then those that are deleted and kept."""
        found = checkpoints.group(
            self._catalog.contents.recent(_RECENT_FILES),
            self._catalog.path,
            self._is_written,
            limit,
            self._mirror.holds if self._mirror is not None else lambda ino, version: False,
        )
        seen = self._surveyor.survey()
        lacks = {sighting.path: sighting.lacks for sighting in seen if sighting.number is None}
        for checkpoint in found:
            checkpoint.lacks = lacks.get(checkpoint.path, [])
            checkpoint.complete &= not checkpoint.lacks
        return [_as_dict(checkpoint) for checkpoint in [*found, *self._surveyor.deleted(seen)]]

    def _is_written(self, ino: int) -> bool:
        opened = self._opened.get(ino)
        return opened is not None and opened.writers > 0


def _as_dict(checkpoint: Checkpoint) -> dict[str, Any]:
    return {**msgspec.to_builtins(checkpoint), "safety": checkpoint.word}


def _name_some(what: str, paths: list[str]) -> str:
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"{what}: {paths[0]}{more}"
