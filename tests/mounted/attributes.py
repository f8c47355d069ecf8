"""A directory tree with every kind of attribute, and what there is to compare of it."""

import os
import stat
from pathlib import Path

Facts = dict[str, tuple[object, ...]]
XATTRS = {"user.note": b"\x00\xffbytes", "user.empty": b""}


def make_tree(root: Path) -> None:
    """Make files, directories and symlinks with modes, owners, times and xattrs of all sorts."""
    (root / "step_10" / "shards").mkdir(parents=True)
    contents = {
        "step_10/model.pt": os.urandom(3_000_001),
        "step_10/shards/rank 0 \u00fc.bin": os.urandom(70_000),
        "step_10/empty": b"",
        "latest.txt": b"step_10\n",
    }
    for number, (name, content) in enumerate(contents.items()):
        path = root / name
        path.write_bytes(content)
        path.chmod((0o600, 0o444, 0o755, 0o640)[number])
        os.chown(path, 1000 + number, 2000 + number)
    (root / "latest").symlink_to("step_10/model.pt")
    (root / "broken").symlink_to("../nowhere")
    (root / "empty directory").mkdir(mode=0o710)
    for name, value in XATTRS.items():
        os.setxattr(root / "step_10/model.pt", name, value)
    times = 1_700_000_000_123_456_789
    for directory, folders, names in os.walk(root, topdown=False):
        for name in [*names, *folders]:
            times += 86_400_000_000_001
            os.utime(Path(directory, name), ns=(times, times), follow_symlinks=False)


def facts(root: Path) -> Facts:
    """Return, by path, all that must be equal: kind, mode, owner, time, xattrs, content."""
    found: Facts = {}
    for path in root.rglob("*"):
        status = path.lstat()
        content: object = None
        xattrs: list[tuple[str, bytes]] = []
        if stat.S_ISLNK(status.st_mode):
            content = str(path.readlink())
        else:
            xattrs = [(name, os.getxattr(path, name)) for name in sorted(os.listxattr(path))]
        if stat.S_ISREG(status.st_mode):
            content = path.read_bytes()
        found[str(path.relative_to(root))] = (
            oct(status.st_mode),
            status.st_uid,
            status.st_gid,
            status.st_mtime_ns,
            xattrs,
            content,
        )
    return found
