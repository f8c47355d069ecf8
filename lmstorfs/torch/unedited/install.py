"""Patches each module when the script imports it, and nothing that it does not import."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmstorfs.torch.unedited.pending import Pending

Patch = Callable[[ModuleType], None]

_PATCHES = {
    "torch": "torch_itself",
    "safetensors": "safetensors_open",
    "safetensors.torch": "safetensors_save_file",
}
_MARK = "__lmstorfs__"
_NOT_IN = ("lmstorfs", "safetensors", "torch")


class _Loader(importlib.abc.Loader):
    """Loads as the module's own loader does, and patches then."""

    def __init__(self, own: importlib.abc.Loader, patch: Patch) -> None:
        self._own = own
        self._patch = patch

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Leave it to the module's own loader."""
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then patch it."""
        self._own.exec_module(module)
        self._patch(module)


class Finder(importlib.abc.MetaPathFinder):
    """Finds modules as the finders behind it do; `patches` are by the modules' names."""

    def __init__(self, patches: dict[str, Patch]) -> None:
        self._patches = patches

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module that is to be patched."""
        patch = self._patches.get(fullname)
        if patch is None:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, patch)
                return spec
        return None


def install() -> None:
    """Have the saves of this process go on in the background, as soon as it imports torch."""
    sys.meta_path.insert(0, Finder({name: partial(_patch, name) for name in _PATCHES}))


def activate() -> Pending:
    """Do so in a process that has imported torch already; return its saves."""
    for name in _PATCHES:
        module = importlib.import_module(name)
        if not hasattr(module, _MARK):
            _patch(name, module, everywhere=True)
    return _pending()


def _patch(name: str, module: ModuleType, *, everywhere: bool = False) -> None:
    # Not before: without torch there is nothing to save, and this imports it.
    from lmstorfs.torch.unedited import patches

    before = dict(vars(module))
    getattr(patches, _PATCHES[name])(module, _pending())
    setattr(module, _MARK, True)
    if everywhere:
        changed = {id(old): getattr(module, key) for key, old in before.items()
                   if getattr(module, key, old) is not old}  # fmt: skip
        _rebind(changed)


def _rebind(changed: dict[int, object]) -> None:
    """Replace what other modules have imported by name."""
    for module in list(sys.modules.values()):
        if module is None or module.__name__.partition(".")[0] in _NOT_IN:
            continue
        for key, value in list(vars(module).items()):
            if id(value) in changed:
                setattr(module, key, changed[id(value)])


@cache
def _pending() -> Pending:
    """Return this process's saves; there is one of it, as there is one `torch.save`."""
    from lmstorfs.torch.checkpointer import Checkpointer
    from lmstorfs.torch.unedited.pending import Pending

    pending = Pending(Checkpointer(checksums=True))
    pending.watch()
    return pending
