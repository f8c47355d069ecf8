"""`lmstorfs run`: a training script as it is, with saves that do not stop it."""

import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

import lmstorfs
from lmstorfs.errors import SetupError, UsageError

runs = typer.Typer()
_PATH = "PYTHONPATH"


@runs.command(
    epilog="Examples:\n\n  lmstorfs run -- python train.py\n\n"
    "  lmstorfs run -- torchrun --nproc-per-node 8 train.py",
)
def run(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND…", help="What starts the training.")
    ],
) -> None:
    """Run a training script unedited; its saves to a mount go on in the background.

    torch.save and safetensors' save_file return once tensors are copied; the file appears, whole,
    when it is written. Whoever looks at it, replaces or removes files on the way, passes a barrier
    or ends, waits for it. A save that failed is raised by the next one, or at the end.
    """
    program = shutil.which(command[0])
    if program is None:
        raise UsageError(f"{command[0]}: there is no such program")
    unedited = Path(lmstorfs.__file__).parent / "torch" / "unedited"
    paths = [str(unedited), *filter(None, [os.environ.get(_PATH)])]
    try:
        os.execve(program, command, {**os.environ, _PATH: os.pathsep.join(paths)})
    except OSError as error:
        raise SetupError(f"{program}: {error.strerror}") from error
