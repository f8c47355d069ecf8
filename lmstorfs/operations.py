"""What the control socket's operations do; each is asked by one of the commands in `cli*.py`."""

import os
from pathlib import Path
from typing import Any

import msgspec
import trio

from lmstorfs import __version__
from lmstorfs.catalog import SqliteCatalog
from lmstorfs.checkpoint import Flusher
from lmstorfs.checkpoint.guard import Guard
from lmstorfs.checkpoint.mirror.client import Mirror
from lmstorfs.checkpoint.undelete import Undeleter
from lmstorfs.config import MountConfig
from lmstorfs.control import Handler, Progress
from lmstorfs.draining import Drainer
from lmstorfs.errors import LmstorfsError, SetupError
from lmstorfs.fuse.mounting import unmount_fuse
from lmstorfs.report import Report
from lmstorfs.searching import StoreSearch
from lmstorfs.waiting import Waiter


class ControlOperations:
    """The operations of one mount."""

    def __init__(
        self,
        config: MountConfig,
        catalog: SqliteCatalog,
        flusher: Flusher,
        mirror: Mirror | None,
        drainer: Drainer,
        report: Report,
        search: StoreSearch,
        guard: Guard,
        undeleter: Undeleter,
    ) -> None:
        self._config = config
        self._catalog = catalog
        self._flusher = flusher
        self._mirror = mirror
        self._drainer = drainer
        self._report = report
        self._search = search
        self._guard = guard
        self._undeleter = undeleter
        self.drain_at_end = True
        """Whether what is dirty is brought to the store once the mount is gone."""

    def handlers(self) -> dict[str, Handler]:
        """Return what does each operation."""
        return {
            "status": self._status,
            "checkpoints": self._checkpoints,
            "latest": self._latest,
            "sync": self._sync,
            "unmount": self._unmount,
            "wait": self._wait,
            "undelete": self._undelete,
        }

    async def _status(self, request: dict[str, Any], progress: Progress) -> dict[str, Any]:
        return self._report.status(os.getpid(), __version__)

    async def _checkpoints(self, request: dict[str, Any], progress: Progress) -> dict[str, Any]:
        found = self._report.checkpoints()
        return {"checkpoints": found, "newest": _newest_of_each(found)}

    async def _latest(self, request: dict[str, Any], progress: Progress) -> dict[str, Any]:
        await self._catch_up()
        below = _relative(request["path"], self._config.mountpoint)
        found = self._report.checkpoints()
        for checkpoint in found:
            if _is_usable(checkpoint) and _is_within(checkpoint["path"], below):
                return {"path": checkpoint["path"]}
        lacking = [each["path"] for each in found if each["lacks"] and not each["deleted"]]
        deleted = [each["path"] for each in found if each["deleted"] and each["complete"]]
        newest = next((path for path in deleted if _is_within(path, below)), None)
        try:
            return {"path": await self._search.newest(below, lacking), "deleted": newest}
        except LmstorfsError:
            if newest is None:
                raise
            return {"path": None, "deleted": newest}  # that one is at hand, whatever the store has

    async def _undelete(self, request: dict[str, Any], progress: Progress) -> dict[str, Any]:
        await self._catch_up()
        path = _relative(request["path"], self._config.mountpoint)
        if request.get("discard"):
            self._undeleter.discard(path)
            return {"path": path}
        if not path:
            return {"kept": self._undeleter.kept()}
        if self._config.read_only:
            raise SetupError(f"{self._config.mountpoint} is mounted read-only")
        to = request.get("to")
        target = None if to is None else _relative(to, self._config.mountpoint)
        if target == "":
            raise SetupError(f"--to {to}: name a new path below the mount point")
        return await self._undeleter.undelete(path, target)

    async def _sync(self, request: dict[str, Any], progress: Progress) -> dict[str, Any]:
        await self._catch_up()
        paths = [_relative(path, self._config.mountpoint) for path in request.get("paths", [])]
        return dict(msgspec.to_builtins(await self._drainer.drain(paths, progress)))

    async def _wait(self, request: dict[str, Any], progress: Progress) -> dict[str, Any]:
        await self._catch_up()
        path = _relative(request["path"], self._config.mountpoint)
        waiter = Waiter(self._catalog, self._flusher, self._mirror)
        with trio.move_on_after(request.get("give_up_s") or float("inf")):
            return await waiter.wait(path, str(request["copies"]), progress)
        raise SetupError(
            f"{request['path']} has not enough copies after {request['give_up_s']:g} s; "
            "lmstorfs status says why"
        )

    async def _catch_up(self) -> None:
        """Let the requests that the kernel queued before this one come first (a RELEASE)."""
        await trio.to_thread.run_sync(os.statvfs, self._config.mountpoint, abandon_on_cancel=True)

    async def _unmount(self, request: dict[str, Any], progress: Progress) -> dict[str, Any]:
        drain = bool(request.get("drain", True))
        self._report.state = "draining"
        try:
            if drain:
                await self._catch_up()
                await self._drainer.drain([], progress)
            self.drain_at_end = drain
            kept = self._guard.only_here()
            await trio.to_thread.run_sync(
                lambda: unmount_fuse(self._config.mountpoint, lazy=False), abandon_on_cancel=True
            )
        except OSError as error:
            raise SetupError(_busy(self._config.mountpoint, error)) from error
        finally:
            self._report.state = "ready"
        return {"unmounted": True, "torn": self._report.torn(), "kept_bytes": kept}


def _is_usable(checkpoint: dict[str, Any]) -> bool:
    return checkpoint["complete"] and checkpoint["weights"] and not checkpoint["deleted"]


def _is_within(path: str, below: str) -> bool:
    return f"{path}/".startswith(f"{below}/" if below else "")


def _newest_of_each(found: list[dict[str, Any]]) -> dict[str, str | None]:
    """Return for each place the newest complete checkpoint that it holds whole."""
    newest: dict[str, str | None] = dict.fromkeys(("ram", "ssd", "mirror", "store"))
    for checkpoint in reversed(found):
        if _is_usable(checkpoint):
            for place, has_all in checkpoint["copies"].items():
                if has_all:
                    newest[place] = checkpoint["path"]
    return newest


def _relative(path: str, mountpoint: str) -> str:
    relative = os.path.relpath(path, mountpoint)
    if relative == ".." or relative.startswith("../"):
        raise SetupError(f"{path} is not below {mountpoint}")
    return "" if relative == "." else relative


def _busy(mountpoint: str, error: OSError) -> str:
    users = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and _uses(process, mountpoint):
            users.append(f"{(process / 'comm').read_text().strip()} ({process.name})")
    who = f"; in use by {', '.join(users)}" if users else ""
    return f"{mountpoint} cannot be unmounted: {error.strerror}{who}; stop them and try again"


def _uses(process: Path, mountpoint: str) -> bool:
    links = [process / "cwd", process / "root"]
    try:
        links += (process / "fd").iterdir()
        targets = [str(link.readlink()) for link in links]
    except OSError:
        return False  # it ended meanwhile
    return any(target == mountpoint or target.startswith(mountpoint + "/") for target in targets)
