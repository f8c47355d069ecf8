"""One file: everything that programs do to it, compared with what a local disk does."""

import errno
import fcntl
import mmap
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mounted.conftest import Site

LOCKER = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
try:
    getattr(fcntl, sys.argv[2])(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit(7)
"""


def test_append_truncate_and_sparse(site: Site) -> None:
    path = site.fresh("shape") / "file"
    path.write_bytes(b"0123456789")
    with path.open("ab") as file:
        file.write(b"abc")
    os.truncate(path, 5)
    assert path.read_bytes() == b"01234"
    os.truncate(path, 8)
    assert path.read_bytes() == b"01234\0\0\0"
    with path.open("r+b") as file:
        file.seek(1 << 20)
        file.write(b"end")
        file.truncate((1 << 20) + 2)
    want = b"01234" + bytes((1 << 20) - 5) + b"en"
    assert path.read_bytes() == want
    site.mount.sync()
    assert site.stored(path).read_bytes() == want


def test_two_appenders_do_not_overwrite_each_other(site: Site) -> None:
    path = site.fresh("append") / "log"
    with path.open("ab", buffering=0) as one, path.open("ab", buffering=0) as other:
        for number in range(100):
            (one if number % 2 else other).write(b"%03d\n" % number)
    assert path.read_bytes() == b"".join(b"%03d\n" % number for number in range(100))


def test_direct_io(site: Site) -> None:
    path = site.fresh("direct") / "file"
    block = mmap.mmap(-1, 1 << 20)
    block.write(os.urandom(1 << 20))
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    try:
        assert os.pwrite(fd, block, 0) == 1 << 20
        got = mmap.mmap(-1, 1 << 20)
        assert os.preadv(fd, [got], 0) == 1 << 20
        assert got[:] == block[:]
    finally:
        os.close(fd)
    site.mount.sync()
    assert site.stored(path).read_bytes() == block[:]


@pytest.mark.parametrize("call", ["flock", "lockf"])
def test_locks_hold_between_processes(site: Site, call: str) -> None:
    path = site.fresh(f"lock-{call}") / "file"
    path.write_bytes(b"x")

    def other() -> int:
        return subprocess.run([sys.executable, "-c", LOCKER, path, call], check=False).returncode

    with path.open("r+b") as file:
        getattr(fcntl, call)(file, fcntl.LOCK_EX)
        assert other() == 7
        getattr(fcntl, call)(file, fcntl.LOCK_UN)
        assert other() == 0


def test_attributes_of_a_stored_file_reach_the_store(site: Site) -> None:
    path = site.fresh("attributes") / "file"
    path.write_bytes(b"content")
    site.mount.sync()
    path.chmod(0o640)
    os.chown(path, 1234, 4321)
    os.utime(path, ns=(1_600_000_000_123_456_789, 1_500_000_000_987_654_321))
    os.setxattr(path, "user.color", b"blue")
    site.mount.sync()
    found = path.stat()
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (0o640, 1234, 4321)
    assert found.st_mtime_ns == 1_500_000_000_987_654_321
    assert path.read_bytes() == b"content"
    if site.server is None:
        stored = site.stored(path).stat()
        assert (stored.st_mode, stored.st_uid, stored.st_gid) == (found.st_mode, 1234, 4321)
        assert stored.st_mtime_ns == found.st_mtime_ns
        assert os.getxattr(site.stored(path), "user.color") == b"blue"
    else:
        key = f"{site.objects.name}/{path.relative_to(site.path)}"
        head = site.server.client().head_object(Bucket=site.server.bucket, Key=key)
        shown = {name.lower(): value for name, value in head["Metadata"].items()}
        assert shown["mode"] == str(found.st_mode)
        assert (shown["uid"], shown["gid"]) == ("1234", "4321")
        assert shown["mtime"] == "1500000000.987654321"


def test_xattrs(directory_site: Site) -> None:
    path = directory_site.fresh("xattrs") / "file"
    path.touch()
    os.setxattr(path, "user.a", b"1")
    os.setxattr(path, "user.b", b"2" * 4000)
    assert sorted(os.listxattr(path)) == ["user.a", "user.b"]
    assert os.getxattr(path, "user.b") == b"2" * 4000
    os.removexattr(path, "user.a")
    with pytest.raises(OSError, match="No data") as missing:
        os.getxattr(path, "user.a")
    assert missing.value.errno == errno.ENODATA
    with pytest.raises(OSError, match="not supported"):
        os.setxattr(path, "security.mine", b"1")


def test_holes(site: Site) -> None:
    path = site.fresh("holes") / "file"
    with path.open("w+b") as file:
        file.write(b"x" * (1 << 20))
        file.flush()
        os.posix_fallocate(file.fileno(), 0, 3 << 20)
        assert os.fstat(file.fileno()).st_size == 3 << 20
        file.seek(2 << 20)
        file.write(b"y")
        file.flush()
        assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) in range(1 << 20, (3 << 20) + 1)
        assert os.lseek(file.fileno(), 0, os.SEEK_DATA) == 0
    assert path.read_bytes()[: 1 << 20] == b"x" * (1 << 20)


def test_copies_within_the_mount(site: Site) -> None:
    folder = site.fresh("copy")
    content = os.urandom(5 << 20)
    (folder / "from").write_bytes(content)
    subprocess.run(["cp", "--sparse=always", folder / "from", folder / "to"], check=True)
    with (folder / "from").open("rb") as source, (folder / "range").open("wb") as target:
        left = len(content)
        while left:
            left -= os.copy_file_range(source.fileno(), target.fileno(), left)
    site.mount.sync()
    for name in ("to", "range"):
        assert (folder / name).read_bytes() == content
        assert site.stored(folder / name).read_bytes() == content


def test_a_writer_without_root_loses_the_set_id_bits(directory_site: Site) -> None:
    folder = directory_site.fresh("setid")
    folder.chmod(0o777)
    path = folder / "tool"
    path.write_bytes(b"x")
    path.chmod(0o6777)
    as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    subprocess.run([*as_nobody, "sh", "-c", "echo y >> tool"], cwd=folder, check=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o777
    assert path.read_bytes() == b"xy\n"


def test_permissions_are_the_kernels(directory_site: Site) -> None:
    folder = directory_site.fresh("permissions")
    path = folder / "secret"
    path.write_bytes(b"x")
    path.chmod(0o600)
    as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    command = [*as_nobody, "cat", "secret"]
    done = subprocess.run(command, cwd=folder, capture_output=True, check=False)
    assert done.returncode == 1
    assert b"Permission denied" in done.stderr
    path.chmod(0o604)
    assert subprocess.run(command, cwd=folder, capture_output=True, check=True).stdout == b"x"


def test_a_fifo_and_a_symlink(directory_site: Site) -> None:
    folder = directory_site.fresh("special")
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to("pipe")
    assert stat.S_ISFIFO((folder / "pipe").stat().st_mode)
    assert (folder / "link").readlink() == Path("pipe")
    directory_site.mount.sync()
    assert directory_site.stored(folder / "link").readlink() == Path("pipe")


def test_room_is_told(directory_site: Site) -> None:
    here, there = os.statvfs(directory_site.path), os.statvfs(directory_site.objects)
    assert here.f_blocks * here.f_frsize == there.f_blocks * there.f_frsize
    assert here.f_bavail > 0
    assert here.f_namemax == 255
