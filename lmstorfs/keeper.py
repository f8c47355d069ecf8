"""The keeper: holds a mount, so that the mount has no reason to die.

It takes the state directory's lock, mounts the private tmpfs of the RAM tier, opens `/dev/fuse`
and mounts, starts the daemon with the descriptor inherited, and tidies up when the daemon is
done. It imports the standard library (and `fuse/mounting.py`, which does as much) and decides
nothing: what could go wrong is elsewhere.

The tmpfs outlives both processes on purpose. After `kill -9` of keeper and daemon it still holds
what was acknowledged, and the next `lmstorfs mount` takes it over.
"""

import argparse
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from lmstorfs.fuse.mounting import (
    MS_NODEV,
    MS_NOSUID,
    MS_REMOUNT,
    MountError,
    is_mountpoint,
    mount,
    mount_fuse,
    unmount_dir,
    unmount_fuse,
)

LOCK_TRIES = 20
NOTHING_LEFT = 0  # the daemon's exit code when the store has everything: the RAM tier may go


class Keeper:
    """One mount."""

    def __init__(self, state: Path, ready_fd: int) -> None:
        self.state = state
        self.ready_fd = ready_fd
        self.config: dict[str, Any] = json.loads((state / "mount.json").read_text())
        self.daemon: subprocess.Popen[bytes] | None = None
        self.lock_fd = os.open(state / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def run(self) -> int:
        """Mount, keep, tidy up; return the exit code."""
        self.take_lock()
        self.mount_ram()
        device = mount_fuse(
            self.config["mountpoint"],
            source=self.config["store"]["url"],
            allow_other=self.config["allow_other"],
            read_only=self.config["read_only"],
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.forward)
        self.start_daemon(device)
        assert self.daemon is not None
        code = self.daemon.wait()
        os.close(device)
        if code >= 0:  # it ended of its own will; one that failed to start left the mount behind
            unmount_fuse(self.config["mountpoint"])
        else:  # killed: the dead mount stays, so that no program writes below it unawares
            print(f"keeper: the daemon was killed by signal {-code}", file=sys.stderr)  # noqa: T201
        if code == NOTHING_LEFT:
            self.unmount_ram()
        return 0 if code == NOTHING_LEFT else 1

    def take_lock(self) -> None:
        """Hold the state directory; the daemon inherits the hold."""
        for _ in range(LOCK_TRIES):  # a command that asks who holds it does so for a moment
            try:
                fcntl.flock(self.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
        else:
            raise MountError(
                f"the state directory {self.state} is in use by another mount; unmount that "
                "one first, or give another --state"
            ) from None
        os.ftruncate(self.lock_fd, 0)
        os.write(self.lock_fd, f"{os.getpid()}\n".encode())

    # --- the RAM tier ------------------------------------------------------------------------

    @property
    def ram(self) -> Path:
        """Where the RAM tier is."""
        return self.state / "ram"

    def mount_ram(self) -> None:
        """Mount the private tmpfs, or take over the one that an earlier keeper left.

        Without the privilege to mount, a directory in /dev/shm stands in for it.
        """
        if is_mountpoint(self.ram):
            flags = MS_REMOUNT | MS_NOSUID | MS_NODEV
            with contextlib.suppress(OSError):  # smaller than what it holds: the books hold it
                mount("lmstorfs", str(self.ram), "tmpfs", flags, f"size={self.config['ram_bytes']}")
            return
        if self.ram.is_symlink():
            self.use_shared_memory()
            return
        self.ram.mkdir(mode=0o700, exist_ok=True)
        size = f"mode=0700,nr_inodes=0,size={self.config['ram_bytes']}"
        for data in (f"huge=within_size,{size}", size):  # a kernel without huge pages refuses
            try:
                mount("lmstorfs", str(self.ram), "tmpfs", MS_NOSUID | MS_NODEV, data)
            except OSError as error:
                if error.errno == errno.EPERM:
                    break
                if error.errno != errno.EINVAL:
                    raise MountError(f"cannot mount a tmpfs at {self.ram}: {error}") from error
            else:
                return
        self.use_shared_memory()

    def use_shared_memory(self) -> None:
        """Make `ram` a link to a directory of our own in /dev/shm, where that is to be had."""
        if not os.access("/dev/shm", os.W_OK):
            return
        name = hashlib.sha256(os.fsencode(self.state)).hexdigest()[:16]  # one a state directory
        shared = Path("/dev/shm") / f"lmstorfs-{os.getuid()}-{name}"
        if self.ram.is_symlink():
            shared = self.ram.readlink()  # gone after a reboot
        shared.mkdir(mode=0o700, exist_ok=True)
        if shared.lstat().st_uid != os.getuid() or shared.is_symlink():
            raise MountError(f"{shared} belongs to somebody else; remove it")
        if not self.ram.is_symlink():
            self.ram.rmdir()
            self.ram.symlink_to(shared)

    def unmount_ram(self) -> None:
        """Give the memory back: the store has everything."""
        if is_mountpoint(self.ram):
            unmount_dir(self.ram)
        elif self.ram.is_symlink():
            shutil.rmtree(self.ram.resolve(), ignore_errors=True)
            self.ram.unlink()

    # --- the daemon --------------------------------------------------------------------------

    def start_daemon(self, device: int) -> None:
        """Start the daemon; it says by `ready_fd` when the mount answers."""
        fds = [device, self.ready_fd, self.lock_fd]
        command = [sys.executable, "-m", "lmstorfs.daemon", "--state", str(self.state)]
        command += ["--device-fd", str(device), "--ready-fd", str(self.ready_fd)]
        self.daemon = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL)
        os.close(self.ready_fd)

    def forward(self, number: int, _frame: FrameType | None) -> None:
        """Pass a signal on: draining is the daemon's."""
        if self.daemon is not None and self.daemon.poll() is None:
            self.daemon.send_signal(number)


def main() -> int:
    """Run the keeper of the mount whose state directory the command line names."""
    parser = argparse.ArgumentParser(prog="lmstorfs-keeper")
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--ready-fd", type=int, required=True)
    args = parser.parse_args()
    try:
        return Keeper(args.state, args.ready_fd).run()
    except MountError as error:
        answer = json.dumps({"error": str(error), "exit_code": 1}) + "\n"
        os.write(args.ready_fd, answer.encode())
        return 1


if __name__ == "__main__":
    sys.exit(main())
