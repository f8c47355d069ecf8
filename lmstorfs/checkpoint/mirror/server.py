"""The mirror's side: takes connections that proved the secret, and keeps what they bring.

One thread a connection (`Listener`), blocking: bytes go from the socket into the file without
passing through Python, and whoever waits holds nobody else up. An origin reaches only what it is
named for; another's replicas only by asking to recover them, which fences the one that died.
"""

import os
import re
import sqlite3
import threading
from pathlib import Path

import msgspec
import structlog

from lmstorfs.checkpoint.mirror import messages as m
from lmstorfs.checkpoint.mirror.replicas import Budget, Origin, open_origins
from lmstorfs.checkpoint.mirror.transport import Connection
from lmstorfs.digest import BLOCK_BYTES
from lmstorfs.errors import NoRoomError, PeerError, PeerProtocolError

log = structlog.get_logger()

DATA_MAX_BYTES = 4 * BLOCK_BYTES
_NAME = re.compile(r"[0-9a-f]{32}")
_ORIGINS_MAX = 4096
_KEEP_MAX = 1000
_WORKING_IDLE_S = 60.0  # an origin that has nothing to say says so more often than this
_PURPOSES = ("replicate", "read", "recover")


class ReplicaStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What a mirror holds for others."""

    origins: int
    files: int
    bytes: int


class MirrorServer:
    """All origins of one mirror."""

    def __init__(self, root: Path, budget_bytes: int) -> None:
        """Keep replicas in `root`, which an earlier mirror process may have filled."""
        root.mkdir(mode=0o700, exist_ok=True)
        self._root = root
        self._budget = Budget(budget_bytes)
        self._origins = {origin.name: origin for origin in open_origins(root, self._budget)}
        self._writers: dict[str, Connection] = {}
        self._lock = threading.Lock()

    def statistics(self) -> ReplicaStatistics:
        """Return the books."""
        with self._lock:
            origins = list(self._origins.values())
        held = []
        for origin in origins:
            with origin.lock:
                held.append((len(origin.held()), origin.bytes()))
        return ReplicaStatistics(
            origins=sum(1 for files, _ in held if files),
            files=sum(files for files, _ in held),
            bytes=sum(count for _, count in held),
        )

    def serve(self, connection: Connection) -> None:
        """Serve one connection until it ends; for `Listener.serve`."""
        try:
            self._serve(connection)
        except PeerProtocolError as error:
            log.warning("dropped a peer", peer=connection.peer, reason=str(error))
        except PeerError as error:
            log.info("a peer went away", peer=connection.peer, reason=str(error))
        except (OSError, sqlite3.Error, KeyError, NoRoomError) as error:
            log.error("a connection failed", peer=connection.peer, error=repr(error))
        finally:
            connection.close()

    def close(self) -> None:
        """Let go of all files; call it after the listener has ended its connections."""
        with self._lock:
            for origin in self._origins.values():
                with origin.lock:
                    origin.close()

    # --- who is it ---------------------------------------------------------------------------

    def _serve(self, connection: Connection) -> None:
        hello = m.decode_request(connection.receive())
        if not isinstance(hello, m.Hello) or hello.purpose not in _PURPOSES:
            raise PeerProtocolError("it did not say hello")
        origin = self._find(hello)
        if isinstance(origin, m.Refused):
            connection.send(m.encode(origin))
            return
        if hello.purpose == "replicate":
            self._begin_writing(origin, connection)
        session = _Session(connection, origin, writes=hello.purpose == "replicate")
        if hello.purpose == "recover":
            self._recover(connection, origin)
        else:
            with origin.lock:
                connection.send(m.encode(_welcome(origin)))
        connection.idle_s = _WORKING_IDLE_S
        log.info("connected", peer=connection.peer, origin=origin.name, purpose=hello.purpose)
        try:
            session.run()
        finally:
            with self._lock, origin.lock:
                if self._writers.get(origin.name) is connection:
                    del self._writers[origin.name]
                    origin.give_up_rows()

    def _find(self, hello: m.Hello) -> Origin | m.Refused:
        if hello.purpose == "recover":
            return self._wanted(hello)
        if not _NAME.fullmatch(hello.origin):
            raise PeerProtocolError("an origin's name is 32 hex digits")
        with self._lock:
            origin = self._origins.get(hello.origin)
            if origin is None:
                if len(self._origins) >= _ORIGINS_MAX:
                    return m.Refused(reason="the mirror has too many origins", code="full")
                origin = self._origins[hello.origin] = Origin(
                    self._root / hello.origin, self._budget
                )
        with origin.lock:
            if hello.epoch < origin.epoch:
                successor = origin.meta("label")
                return m.Refused(
                    reason=f"another node ({successor}) has taken over; this one is fenced",
                    code="fenced",
                )
            origin.set_meta("epoch", str(hello.epoch))
            for key in ("mountpoint", "store", "label"):
                origin.set_meta(key, getattr(hello, key)[:4096])
            origin.set_meta("keep", str(max(0, min(hello.keep, _KEEP_MAX))))
        return origin

    def _wanted(self, hello: m.Hello) -> Origin | m.Refused:
        """Return the origin that a new node wants to take over."""
        with self._lock:
            known = [origin for origin in self._origins.values() if origin.sequence]
        fitting = [origin for origin in known if origin.name == hello.origin]
        if not hello.origin:
            same = (hello.mountpoint, hello.store)
            fitting = [o for o in known if (o.meta("mountpoint"), o.meta("store")) == same]
            if not fitting:
                fitting = [o for o in known if o.meta("mountpoint") == hello.mountpoint]
        if len(fitting) == 1:
            with fitting[0].lock:
                fitting[0].set_meta("label", hello.label[:4096])
            return fitting[0]
        names = ", ".join(
            f"{o.meta('label')}:{o.meta('mountpoint')} ({o.name})" for o in fitting or known
        )
        if fitting:
            reason = f"several nodes had this mount point: {names}; choose by -o recover_origin=ID"
        else:
            reason = f"it holds no replicas of {hello.mountpoint}; it has: {names or 'none'}"
        return m.Refused(reason=reason, code="unknown")

    def _recover(self, connection: Connection, origin: Origin) -> None:
        """Hand the catalog over; from now on the origin's old node is fenced."""
        with origin.lock:
            origin.give_up_rows()
            origin.begin_epoch()
            fd = origin.catalog_file()
            welcome = _welcome(origin, os.fstat(fd).st_size)
        with self._lock:
            writer = self._writers.pop(origin.name, None)
        if writer is not None:
            writer.close()
        try:
            connection.send(m.encode(welcome))
            connection.send_file(fd, 0, welcome.catalog_bytes)
        finally:
            os.close(fd)

    def _begin_writing(self, origin: Origin, connection: Connection) -> None:
        """One connection at a time writes for an origin: the newest."""
        with self._lock, origin.lock:
            before = self._writers.get(origin.name)
            self._writers[origin.name] = connection
            origin.give_up_rows()  # what that one had begun
        if before is not None:
            before.close()


def _welcome(origin: Origin, catalog_bytes: int = 0) -> m.Welcome:
    return m.Welcome(
        origin=origin.name,
        epoch=origin.epoch,
        sequence=origin.sequence,
        catalog_bytes=catalog_bytes,
        held=origin.held(),
    )


class _Session:
    """One connection of an origin that was welcomed."""

    def __init__(self, connection: Connection, origin: Origin, *, writes: bool) -> None:
        self._connection = connection
        self._origin = origin
        self._writes = writes
        self._epoch = origin.epoch
        self._full: set[int] = set()  # inodes whose data came while there was no room

    def run(self) -> None:
        """Answer until the connection ends."""
        while True:
            request = m.decode_request(self._connection.receive())
            if isinstance(request, m.Fetch):
                self._fetch(request)
            elif isinstance(request, m.Corrupt):
                with self._origin.lock:
                    self._origin.drop(m.Held(request.ino, request.version))
                self._answer(m.Noted())
            elif not self._writes:
                raise PeerProtocolError(f"{type(request).__name__} on a connection for reading")
            elif isinstance(request, m.Data):
                self._data(request)
            else:
                self._answer(self._change(request))

    def _answer(self, answer: m.Answer) -> None:
        self._connection.send(m.encode(answer))

    def _change(self, request: m.Request) -> m.Answer:
        with self._origin.lock:
            if self._origin.epoch != self._epoch:
                return m.Refused(reason="another node has taken over", code="fenced")
            try:
                return self._changed(request)
            except NoRoomError as error:
                return m.Refused(reason=str(error), code="full")

    def _changed(self, request: m.Request) -> m.Answer:
        match request:
            case m.Rows():
                return m.Noted(dropped=self._origin.rows(request))
            case m.Offer():
                self._full.discard(request.ino)
                return m.Wanted(blocks=self._origin.offer(request))
            case m.Commit(ino=ino, version=version):
                whole = self._origin.commit(ino, version)
                if whole is None:
                    return m.Refused(
                        reason="nothing was offered, or it was deleted", code="unknown"
                    )
                if whole:
                    return m.Committed(ino=ino, version=version)
                if ino in self._full:
                    return m.Refused(reason="the mirror's RAM is full", code="full")
                return m.Refused(reason="the content changed on its way", code="differs")
        raise PeerProtocolError(f"{type(request).__name__} at the wrong time")

    def _data(self, data: m.Data) -> None:
        if not 0 < data.count <= DATA_MAX_BYTES or data.offset < 0:
            raise PeerProtocolError(f"{data.count} bytes at {data.offset}")
        try:
            with self._origin.lock:
                part = self._origin.part(data.ino, data.offset + data.count)
        except NoRoomError:
            self._full.add(data.ino)
            self._discard(data.count)
            return
        self._connection.receive_file(part.fd, data.offset, data.count)
        with self._origin.lock:
            part.arrived(data.offset, data.count)

    def _discard(self, count: int) -> None:
        """Take content that there is no room for, so that what follows it can be read."""
        fd = os.memfd_create("lmstorfs-discarded")
        try:
            self._connection.receive_file(fd, 0, count)
        finally:
            os.close(fd)

    def _fetch(self, request: m.Fetch) -> None:
        with self._origin.lock:
            found = self._origin.open_replica(request.ino, request.version)
        if found is None:
            self._answer(m.Refused(reason="there is no such replica", code="unknown"))
            return
        fd, size, digest = found
        try:
            self._answer(m.Replica(size=size, digest=digest))
            for start in range(0, size, DATA_MAX_BYTES):
                self._connection.send_file(fd, start, min(DATA_MAX_BYTES, size - start))
        finally:
            os.close(fd)
