"""Whatever happens to names while uploads are under way, the store ends up as the namespace is.

A machine plays the kernel's part (names), the workers' (uploads that are published before or
after their answer comes, or never), the journal's and the crash's, in any order. The namespace is
held against plain dictionaries; the stores are the real directory store and one that keeps
objects as S3 does.
"""

import errno
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lmstorfs.catalog import ROOT_INO, Inode, JournalEntry, NamespaceError, SqliteCatalog
from lmstorfs.catalog.sqlite import RENAME_EXCHANGE, RENAME_NOREPLACE
from lmstorfs.checkpoint import Flusher, NameSync
from lmstorfs.checkpoint.fence import Fence
from lmstorfs.checkpoint.flusher import Flight, attributes_of
from lmstorfs.digest import digest_bytes
from lmstorfs.errors import NotInStoreError, StoreError
from lmstorfs.store import Attributes, Kind, ObjectInfo
from tests.unit.modelstores import SHARED, FolderStore, ObjectStore, Tree

NAMES = (b"a", b"b", b"c")
DEPTH = 3
ROUNDS_TO_QUIET = 3000


class Sent(msgspec.Struct):
    """An upload under way, as the machine knows it."""

    inode: Inode
    flight: Flight
    content: bytes
    attributes: Attributes
    info: ObjectInfo | None = None
    """The store's answer, once it is published."""


class NamesAndUploads(RuleBasedStateMachine):
    """See the module."""

    store_type: Callable[[], Any] = ObjectStore

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="lmstorfs-catalog-", dir=SHARED))
        self.store = type(self).store_type()
        self.tree: Tree = {}
        self.contents: dict[int, bytes] = {}
        self.counter = 0
        self.open_daemon()

    @initialize()
    def begin(self) -> None:
        """Start empty."""

    def open_daemon(self) -> None:
        self.catalog = SqliteCatalog(self.folder / "catalog.db")
        self.flusher = Flusher(
            self.catalog,
            None,  # type: ignore[arg-type]  # content is the machine's
            self.store,
            None,  # type: ignore[arg-type]
            Fence(self.store, self.catalog.db, enabled=False, label=""),
            delay_s=0.0,
        )
        self.names = NameSync(self.catalog, self.store, self.flusher)
        self.sent: dict[int, Sent] = {}
        self.told: JournalEntry | None = None

    # --- the kernel's part -------------------------------------------------------------------

    def parent(self, path: str) -> int:
        found = self.catalog.resolve(path.rpartition("/")[0])
        return -1 if found is None else found.ino

    def paths(self) -> list[str]:
        return sorted(self.tree)

    def places(self) -> list[str]:
        """Return all paths where something can be made, taken or not."""
        folders = ["", *(path for path, content in self.tree.items() if content is None)]
        return [
            f"{folder}/{name.decode()}".lstrip("/")
            for folder in sorted(folders)
            if folder.count("/") + bool(folder) < DEPTH
            for name in NAMES
        ]

    def expect(self, code: int | None, call: Callable[[], Any]) -> Any:
        if code is None:
            return call()
        with pytest.raises(NamespaceError) as caught:
            call()
        assert caught.value.errno == code
        return None

    def name(self, path: str) -> bytes:
        return os.fsencode(path.rpartition("/")[2])

    @rule(data=st.data())
    def mkdir(self, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(self.places()), "mkdir")
        code = errno.EEXIST if path in self.tree else None
        self.expect(
            code,
            lambda: self.catalog.create(
                self.parent(path), self.name(path), mode=stat.S_IFDIR | 0o755, uid=0, gid=0
            ),
        )
        if code is None:
            self.tree[path] = None

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        """Make or rewrite a file and close it."""
        path = data.draw(st.sampled_from(self.places()), "write")
        if path in self.tree and self.tree[path] is None:
            return
        found = self.catalog.resolve(path) if path in self.tree else None
        if found is None:
            found = self.catalog.create(
                self.parent(path),
                self.name(path),
                mode=stat.S_IFREG | 0o644,
                uid=0,
                gid=0,
                writing=True,
                tier="ram",
            )
        self.catalog.contents.begin_writing(found.ino, "ram")
        self.counter += 1
        content = f"{path} {self.counter}".encode()
        self.contents[found.ino] = self.tree[path] = content
        version = self.catalog.contents.close_version(
            found.ino, len(content), self.counter, writing=False
        )
        self.catalog.contents.set_digest(found.ino, version, digest_bytes(content))

    @precondition(lambda self: self.tree)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(self.paths()), "remove")
        if self.tree[path] is None:
            code = errno.ENOTEMPTY if self.below(path) else None
            self.expect(code, lambda: self.catalog.rmdir(self.parent(path), self.name(path)))
            self.expect(
                errno.EISDIR if code else errno.ENOENT,
                lambda: self.catalog.unlink(self.parent(path), self.name(path)),
            )
        else:
            code = None
            self.expect(
                errno.ENOTDIR, lambda: self.catalog.rmdir(self.parent(path), self.name(path))
            )
            self.gone(self.catalog.unlink(self.parent(path), self.name(path)))
        if code is None:
            del self.tree[path]

    def below(self, path: str) -> list[str]:
        return [other for other in self.tree if other.startswith(path + "/")]

    def gone(self, inode: Inode) -> None:
        """What `Operations._gone` does, and the kernel's FORGET."""
        self.flusher.cancel(inode.ino)
        if inode.ino % 2:  # some the kernel remembers longer
            self.catalog.purge(inode.ino)

    @precondition(lambda self: self.tree)
    @rule(data=st.data(), mode=st.sampled_from([0o700, 0o755]))
    def chmod(self, data: st.DataObject, mode: int) -> None:
        inode = self.catalog.resolve(data.draw(st.sampled_from(self.paths()), "chmod"))
        assert inode is not None
        changed = stat.S_IFMT(inode.mode) | mode
        self.catalog.set_attributes(inode.ino, mode=changed, ctime_ns=time.time_ns())

    @precondition(lambda self: self.tree)
    @rule(
        data=st.data(),
        flags=st.sampled_from([0, 0, 0, 0, RENAME_NOREPLACE, RENAME_EXCHANGE]),
    )
    def rename(self, data: st.DataObject, flags: int) -> None:
        old = data.draw(st.sampled_from(self.paths()), "old")
        new = data.draw(st.sampled_from(self.places()), "new")
        code = self.refusal(old, new, flags)
        replaced = self.expect(
            code,
            lambda: self.catalog.rename(
                self.parent(old), self.name(old), self.parent(new), self.name(new), flags
            ),
        )
        if code is not None or old == new:
            return
        if replaced is not None:
            self.gone(replaced)
        moved = {path: self.tree.pop(path) for path in [old, *self.below(old)]}
        back = {}
        if flags & RENAME_EXCHANGE:
            back = {path: self.tree.pop(path) for path in [new, *self.below(new)]}
        for path, content in moved.items():
            self.tree[new + path[len(old) :]] = content
        for path, content in back.items():
            self.tree[old + path[len(new) :]] = content

    def refusal(self, old: str, new: str, flags: int) -> int | None:
        """Return the errno that rename(2) answers."""
        if flags & RENAME_EXCHANGE:
            if new not in self.tree:
                return errno.ENOENT
            inside = new.startswith(old + "/") or old.startswith(new + "/")
            return errno.EINVAL if inside else None
        if old == new:
            return None
        if flags & RENAME_NOREPLACE and new in self.tree:
            return errno.EEXIST
        if new in self.tree:
            if self.tree[new] is None and self.tree[old] is not None:
                return errno.EISDIR
            if self.tree[old] is None and self.tree[new] is not None:
                return errno.ENOTDIR
            if self.tree[new] is None and self.below(new):
                return errno.ENOTEMPTY
        return errno.EINVAL if new.startswith(old + "/") else None

    # --- the flusher's part ------------------------------------------------------------------

    def ready(self) -> list[Inode]:
        dirty = self.catalog.contents.dirty(-1)
        return [inode for inode in dirty if self.flusher._ready_in(inode) is not None]

    @precondition(lambda self: self.ready())
    @rule(data=st.data())
    def start_upload(self, data: st.DataObject) -> None:
        inos = [inode.ino for inode in self.ready()]
        inode = self.catalog.get(data.draw(st.sampled_from(inos), "upload"))
        key = self.catalog.path(inode.ino)
        assert key is not None
        flight = Flight(key, inode.version, inode.version_size, scope=new_scope())
        self.flusher.in_flight[inode.ino] = flight
        content = self.contents.get(inode.ino, b"")
        self.sent[inode.ino] = Sent(inode, flight, content, attributes_of(inode, {}))
        if inode.dirty:
            self.catalog.contents.upload_began(inode.ino, key + "/" * inode.is_dir)

    def superseded(self, sent: Sent) -> bool:
        return not sent.inode.is_dir and self.contents[sent.inode.ino] != sent.content

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        """A worker's upload takes effect; its answer is on its way."""
        sent = self.sent[data.draw(st.sampled_from(sorted(self.sent)), "publish")]
        if sent.info is not None or self.superseded(sent):
            return
        attributes = sent.attributes
        try:
            if not sent.inode.dirty:
                kind = Kind.DIRECTORY if sent.inode.is_dir else Kind.FILE
                sent.info = self.store.set_attributes(sent.flight.key, kind, attributes)
            elif sent.inode.is_dir:
                sent.info = self.store.put_directory(sent.flight.key, attributes)
            else:
                sent.info = self.store.put(sent.flight.key, sent.content, attributes)
        except StoreError:
            self.end(sent, known=False)

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), answered=st.sampled_from([True, True, True, False]))
    def finish(self, data: st.DataObject, answered: bool) -> None:
        """The answer comes, or is lost."""
        sent = self.sent[data.draw(st.sampled_from(sorted(self.sent)), "finish")]
        self.end(sent, known=answered)

    def end(self, sent: Sent, *, known: bool) -> None:
        ino = sent.inode.ino
        if known and sent.info is not None and not sent.inode.dirty:
            self.catalog.contents.attributes_stored(sent.inode, sent.info.etag)
        elif known and sent.info is not None:
            self.flusher._record(sent.inode, sent.flight, sent.info, sent.attributes)
        else:
            self.flusher._given_up(sent.inode, sent.flight)
        del self.flusher.in_flight[ino], self.sent[ino]

    # --- the journal's part ------------------------------------------------------------------

    def next_entries(self) -> list[JournalEntry]:
        """Return what `NameSync` could do next."""
        waiting: list[JournalEntry] = []
        free: list[JournalEntry] = []
        for entry in self.catalog.journal.entries():
            if self.names._must_wait(entry, [*waiting, *free]):
                waiting.append(entry)
            else:
                free.append(entry)
        return free

    @precondition(lambda self: self.told is None and self.next_entries())
    @rule(data=st.data())
    def tell(self, data: st.DataObject) -> None:
        """The store does an entry; that it did is not written yet."""
        entry = data.draw(st.sampled_from(self.next_entries()), "tell")
        if entry.op == "delete":
            self.store.delete([entry.key])
        elif entry.op == "rmdir":
            self.store.remove_directory(entry.key)
        elif entry.op == "rename":
            assert entry.new_key is not None
            kind = Kind.DIRECTORY if entry.is_dir else Kind.FILE
            try:
                self.store.rename(entry.key, entry.new_key, kind)
            except NotInStoreError:
                assert entry.is_dir, f"{entry} had nothing to move"
                self.catalog.contents.lost_in_store(entry.new_key)
        self.told = entry

    @precondition(lambda self: self.told is not None)
    @rule()
    def note(self) -> None:
        assert self.told is not None
        self.catalog.journal.done([self.told.seq])
        self.told = None

    # --- the crash's part --------------------------------------------------------------------

    @rule()
    def crash(self) -> None:
        self.catalog.close()
        self.open_daemon()
        self.catalog.contents.recover_uploads()
        for ino in self.catalog.orphans():
            self.catalog.purge(ino)

    # --- what must hold ----------------------------------------------------------------------

    def namespace(self) -> Tree:
        found: Tree = {}
        for inode in self.catalog.below(ROOT_INO):
            path = self.catalog.path(inode.ino)
            assert path is not None
            found[path] = None if inode.is_dir else self.contents[inode.ino]
        return found

    @invariant()
    def names_are_as_the_calls_made_them(self) -> None:
        assert self.namespace() == self.tree

    def teardown(self) -> None:
        try:
            self.become_quiet()
            assert self.store.tree() == self.tree
            for inode in self.catalog.below(ROOT_INO):
                assert inode.stored_key == self.catalog.path(inode.ino)
            assert not self.catalog.contents.uploads()
        finally:
            self.catalog.close()
            self.store.close()
            shutil.rmtree(self.folder)

    def become_quiet(self) -> None:
        drawn = First()
        for _ in range(ROUNDS_TO_QUIET):
            if self.told is not None:
                self.note()
            elif self.sent:
                self.publish(drawn)
                if self.sent:
                    self.finish(drawn, answered=True)
            elif self.next_entries():
                self.tell(drawn)
            elif self.ready():
                self.start_upload(drawn)
            else:
                break
        left = self.catalog.journal.entries(), self.catalog.contents.dirty(-1), self.sent
        assert left == ([], [], {}), f"never quiet: {left}"


class First:
    """Draws what comes first."""

    def draw(self, strategy: Any, label: str = "") -> Any:
        return strategy.elements[0]


def new_scope() -> Any:
    """Return a scope that only remembers its cancellation."""

    class Scope:
        cancel_called = False

        def cancel(self) -> None:
            self.cancel_called = True

    return Scope()


class OnADirectory(NamesAndUploads):
    """The same on the real directory store."""

    store_type = FolderStore


@pytest.mark.parametrize("machine", [NamesAndUploads, OnADirectory])
def test_the_store_ends_up_as_the_namespace_is(machine: type[NamesAndUploads]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=int(os.environ.get("LMSTORFS_TEST_EXAMPLES", "60")),
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
