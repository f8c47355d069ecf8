"""The mirror's side inside a trio program: the listener's threads, started and ended."""

from pathlib import Path

import trio

from lmstorfs.checkpoint.mirror.handshake import read_secret
from lmstorfs.checkpoint.mirror.listener import Listener
from lmstorfs.checkpoint.mirror.server import MirrorServer, ReplicaStatistics
from lmstorfs.checkpoint.mirror.transport import parse_address


class Replicas:
    """Replicas of other nodes' files, kept in one directory."""

    def __init__(
        self, address: str, secret_file: str | None, directory: Path, budget_bytes: int
    ) -> None:
        """Listen at `address`. Raises `SetupError` where that cannot be."""
        host, port = parse_address(address)
        secret = None if secret_file is None else read_secret(Path(secret_file))
        self.held = 0
        """How many replicas were left at the end."""
        self._listener = Listener(host, port, secret)
        try:
            self._server = MirrorServer(directory, budget_bytes)
        except BaseException:
            self._listener.close()
            raise

    @property
    def address(self) -> str:
        """Where it listens."""
        return self._listener.address

    def statistics(self) -> ReplicaStatistics:
        """Return what is kept."""
        return self._server.statistics()

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            await trio.to_thread.run_sync(
                self._listener.serve, self._server.serve, abandon_on_cancel=True
            )
        finally:
            self._listener.close()
            self.held = self._server.statistics().files
            self._server.close()
