"""The keeper: holds a mount, so that the mount has no reason to die.

It takes the state directory's lock, mounts the private tmpfs of the RAM tier, opens `/dev/fuse`
and mounts, starts the daemon with the descriptor inherited, starts another one when it dies, and
tidies up when the daemon is done. It imports the standard library (and modules of ours that do no
more) and decides nothing: what could go wrong is elsewhere.

The tmpfs outlives both processes on purpose. After `kill -9` of keeper and daemon it still holds
what was acknowledged, and the next `lmstorfs mount` takes it over.
"""

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from lmstorfs.fuse.caretaker import take_care
from lmstorfs.fuse.mounting import MountError, mount_fuse, unmount_fuse
from lmstorfs.ramfs import mount_ram, unmount_ram

LOCK_TRIES = 20
NOTHING_LEFT = 0  # the daemon's exit code when the store has everything: the RAM tier may go
DIRTY_LEFT = 3  # its exit code when the mount is gone and the RAM tier is still needed
DEATHS_WITHIN_S = 60.0
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Keeper:
    """One mount."""

    def __init__(self, state: Path, ready_fd: int) -> None:
        self.state = state
        self.ready_fd = ready_fd
        self.config: dict[str, Any] = json.loads((state / "mount.json").read_text())
        self.daemon: subprocess.Popen[bytes] | None = None
        self.asked: int | None = None  # the last signal that no daemon has heard
        self.lock_fd = os.open(state / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def run(self) -> int:
        """Mount, keep, tidy up; return the exit code."""
        self.take_lock()
        for name in ("down", "control.sock"):  # an earlier keeper's
            (self.state / name).unlink(missing_ok=True)
        mount_ram(self.state / "ram", self.config["ram_bytes"])
        device = mount_fuse(
            self.config["mountpoint"],
            source=self.config["store"]["url"],
            allow_other=self.config["allow_other"],
            read_only=self.config["read_only"],
        )
        for number in SIGNALS:
            signal.signal(number, self.forward)
        code = self.keep(device)
        os.close(device)
        if code >= 0:  # it ended of its own will; one that failed to start left the mount behind
            unmount_fuse(self.config["mountpoint"])
        if code == NOTHING_LEFT:
            unmount_ram(self.state / "ram")
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

    # --- the daemon --------------------------------------------------------------------------

    def keep(self, device: int) -> int:
        """Have a daemon serve the mount until it is gone; return the last one's exit code."""
        deaths: list[float] = []
        restarts = 0
        while True:
            code = self.run_daemon(device, restarts)
            # The first one came so far that it answered commands, or there is no mount to keep.
            served = restarts > 0 or (self.state / "control.sock").exists()
            if code in (NOTHING_LEFT, DIRTY_LEFT) or not served:
                return code
            now = time.monotonic()
            deaths = [death for death in deaths if now - death < DEATHS_WITHIN_S] + [now]
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            self.say(f"the daemon died ({how})")
            if len(deaths) >= self.config["restart_limit"]:
                self.stay_down(device, f"{len(deaths)} times within a minute, at last: {how}")
                return DIRTY_LEFT
            restarts += 1

    def run_daemon(self, device: int, restarts: int) -> int:
        """Start a daemon on the device and wait for its end; return its exit code."""
        fds = [device, self.ready_fd, self.lock_fd]
        command = [sys.executable, "-m", "lmstorfs.daemon", "--state", str(self.state)]
        command += ["--device-fd", str(device), "--ready-fd", str(self.ready_fd)]
        command += ["--restarts", str(restarts)]
        # The daemon takes signals once it can act on them; until then they wait.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self.daemon = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if restarts == 0:  # it tells who mounts when the mount answers; later ones tell nobody
            os.close(self.ready_fd)
            self.ready_fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        if self.asked is not None:
            self.daemon.send_signal(self.asked)
        return self.daemon.wait()

    def stay_down(self, device: int, why: str) -> None:
        """Start no daemon any more; return when the mount is gone."""
        mountpoint = self.config["mountpoint"]
        reason = (
            f"the daemon of {mountpoint} died {why}; it stays down, what was written stays in "
            f"{self.state}. Its log is {self.state / 'daemon.log'}; to start again run: "
            f"lmstorfs unmount {mountpoint}, then lmstorfs mount {mountpoint} as before"
        )
        (self.state / "down").write_text(reason + "\n")
        self.say(reason)
        take_care(device, self.state / "ram", self.state / "closed")

    def say(self, what: str) -> None:
        """Put one line into the log."""
        print(f"keeper: {what}", file=sys.stderr, flush=True)  # noqa: T201

    def forward(self, number: int, _frame: FrameType | None) -> None:
        """Pass a signal on: draining is the daemon's."""
        self.asked = number
        if (self.state / "down").exists():
            unmount_fuse(self.config["mountpoint"])
        elif self.daemon is not None and self.daemon.poll() is None:
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
