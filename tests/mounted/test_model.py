"""Random calls on the mount and on a local directory: contents, sizes, modes and errors are equal.

At the end, and now and then between, the store has exactly the same files.
"""

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.mounted.conftest import Site

Facts = dict[str, tuple[str, int, bytes | None]]

NAMES = ("a", "b.pt", "c.tmp")  # a name of weights: what is deleted may be kept
names = st.sampled_from(NAMES)
paths = st.one_of(names, st.tuples(names, names).map("/".join))
sizes = st.one_of(st.integers(0, 300), st.integers(4000, 4200), st.integers(100_000, 200_000))
seeds = st.integers(0, 255)
MAX_OPEN = 3


def content(seed: int, size: int) -> bytes:
    """Return `size` bytes that differ from seed to seed and from place to place."""
    return (bytes((seed + step) & 255 for step in range(251)) * (size // 251 + 1))[:size]


def facts(root: Path) -> Facts:
    """Return name → (kind and mode, size, content) of all below `root`."""
    found: Facts = {}
    for path in root.rglob("*"):
        status = path.lstat()
        regular = stat.S_ISREG(status.st_mode)
        found[str(path.relative_to(root))] = (
            oct(status.st_mode),
            status.st_size if regular else 0,
            path.read_bytes() if regular else None,
        )
    return found


class Twins(RuleBasedStateMachine):
    """The same calls here and there."""

    site: Site

    def __init__(self) -> None:
        super().__init__()
        self.mount = Path(tempfile.mkdtemp(dir=self.site.path))
        self.local = Path(tempfile.mkdtemp())
        self.mount.chmod(0o755)
        self.local.chmod(0o755)
        self.opened: list[tuple[int, int]] = []

    def both(self, call: Callable[[Path], object]) -> tuple[object, object] | None:
        """Do `call` on both sides; None where both refuse, with the same errno."""
        results: list[object] = []
        codes: list[int | None] = []
        for root in (self.mount, self.local):
            try:
                results.append(call(root))
                codes.append(None)
            except OSError as error:
                codes.append(error.errno)
        names_of = [code and errno.errorcode[code] for code in codes]
        assert names_of[0] == names_of[1], names_of
        if len(results) < 2:
            return None
        return results[0], results[1]

    # --- whole files -------------------------------------------------------------------------

    @rule(path=paths, seed=seeds, size=sizes)
    def write(self, path: str, seed: int, size: int) -> None:
        self.both(lambda root: (root / path).write_bytes(content(seed, size)))

    @rule(path=paths, seed=seeds, size=sizes)
    def append(self, path: str, seed: int, size: int) -> None:
        def call(root: Path) -> None:
            with (root / path).open("ab", buffering=0) as file:
                file.write(content(seed, size))

        self.both(call)

    @rule(path=paths, seed=seeds, offset=sizes, size=sizes)
    def overwrite(self, path: str, seed: int, offset: int, size: int) -> None:
        def call(root: Path) -> None:
            with (root / path).open("r+b", buffering=0) as file:
                file.seek(offset)
                file.write(content(seed, size))

        self.both(call)

    @rule(path=paths, size=sizes)
    def truncate(self, path: str, size: int) -> None:
        self.both(lambda root: os.truncate(root / path, size))

    @rule(path=paths, mode=st.sampled_from([0o644, 0o600, 0o755, 0o444]))
    def chmod(self, path: str, mode: int) -> None:
        self.both(lambda root: (root / path).chmod(mode))

    # --- files that stay open ----------------------------------------------------------------

    @rule(
        path=paths,
        flags=st.sampled_from([0, os.O_CREAT, os.O_CREAT | os.O_TRUNC, os.O_CREAT | os.O_EXCL]),
    )
    def open(self, path: str, flags: int) -> None:
        if len(self.opened) >= MAX_OPEN:
            self.close(0)
        pair = self.both(lambda root: os.open(root / path, os.O_RDWR | flags, 0o644))
        if pair is not None:
            first, second = pair
            assert isinstance(first, int)
            assert isinstance(second, int)
            self.opened.append((first, second))

    @rule(which=st.integers(0, MAX_OPEN - 1), seed=seeds, offset=sizes, size=sizes)
    def write_open(self, which: int, seed: int, offset: int, size: int) -> None:
        for fd in self._which(which):
            os.pwrite(fd, content(seed, size), offset)

    @rule(which=st.integers(0, MAX_OPEN - 1), size=sizes)
    def truncate_open(self, which: int, size: int) -> None:
        for fd in self._which(which):
            os.ftruncate(fd, size)

    @rule(which=st.integers(0, MAX_OPEN - 1))
    def fsync_open(self, which: int) -> None:
        for fd in self._which(which):
            os.fsync(fd)

    @rule(which=st.integers(0, MAX_OPEN - 1))
    def close(self, which: int) -> None:
        pair = self._which(which)
        for fd in pair:
            os.close(fd)
        if pair:
            self.opened.remove(pair)

    def _which(self, which: int) -> tuple[int, int] | tuple[()]:
        return self.opened[which % len(self.opened)] if self.opened else ()

    # --- names -------------------------------------------------------------------------------

    @rule(path=paths)
    def unlink(self, path: str) -> None:
        self.both(lambda root: (root / path).unlink())

    @rule(path=paths)
    def mkdir(self, path: str) -> None:
        self.both(lambda root: (root / path).mkdir(0o755))

    @rule(path=paths)
    def rmdir(self, path: str) -> None:
        self.both(lambda root: (root / path).rmdir())

    @rule(name=names)
    def rmtree(self, name: str) -> None:
        if (self.local / name).is_dir():
            self.both(lambda root: shutil.rmtree(root / name))

    @rule(old=paths, new=paths)
    def rename(self, old: str, new: str) -> None:
        self.both(lambda root: (root / old).rename(root / new))

    # --- what must hold ----------------------------------------------------------------------

    @rule()
    def sync(self) -> None:
        """Half of the calls should meet files that are stored already."""
        self.site.sync()

    @invariant()
    def equal(self) -> None:
        here, there = facts(self.mount), facts(self.local)
        assert here == there
        for first, second in self.opened:
            size = os.fstat(second).st_size
            assert os.fstat(first).st_size == size
            assert os.pread(first, size + 1, 0) == os.pread(second, size + 1, 0)

    def teardown(self) -> None:
        while self.opened:
            self.close(0)
        self.site.discard()
        self.site.sync(settle=True)
        stored = self.site.stored(self.mount)
        want = facts(self.local)
        got = facts(stored) if stored.exists() else {}
        if self.site.server is not None:  # objects have no modes or directories of their own
            want = {name: ("", *shown[1:]) for name, shown in want.items() if shown[2] is not None}
            got = {name: ("", *shown[1:]) for name, shown in got.items() if shown[2] is not None}
        assert got == want
        shutil.rmtree(self.mount)
        shutil.rmtree(self.local)
        self.site.discard()
        self.site.sync(settle=True)
        assert not (stored.exists() and facts(stored))


def test_the_mount_behaves_as_a_local_directory(site: Site) -> None:
    class OfThisSite(Twins):
        pass

    OfThisSite.site = site
    run_state_machine_as_test(
        OfThisSite,
        settings=settings(
            max_examples=10,
            stateful_step_count=30,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
