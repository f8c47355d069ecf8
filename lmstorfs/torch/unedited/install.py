"""Patches each module when the script imports it, and nothing that it does not import."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

Patch = Callable[[ModuleType], None]


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
    state: list[object] = []

    def patched(name: str) -> Patch:
        def patch(module: ModuleType) -> None:
            # Not before: without torch there is nothing to save, and this imports it.
            from lmstorfs.torch.checkpointer import Checkpointer
            from lmstorfs.torch.unedited import patches
            from lmstorfs.torch.unedited.pending import Pending

            if not state:
                pending = Pending(Checkpointer(checksums=True))
                pending.watch()
                state.append(pending)
            getattr(patches, name)(module, state[0])

        return patch

    sys.meta_path.insert(
        0,
        Finder(
            {
                "safetensors": patched("safetensors_open"),
                "safetensors.torch": patched("safetensors_save_file"),
                "torch": patched("torch_itself"),
            }
        ),
    )
