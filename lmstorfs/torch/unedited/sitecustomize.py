"""Python imports this at its start where `lmstorfs run` has put this directory on its path."""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

_HERE = str(Path(__file__).parent)
_ROOT = str(Path(__file__).parents[3])


def _own() -> None:
    """Run the `sitecustomize` that this one hides."""
    elsewhere = [place for place in sys.path if place != _HERE]
    spec = PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


def _install() -> None:
    try:
        from lmstorfs.torch.unedited.install import install
    except ImportError:
        sys.path.append(_ROOT)  # a Python that lmstorfs is not installed for
        from lmstorfs.torch.unedited.install import install
    install()


_own()
_install()
