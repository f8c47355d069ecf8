"""A trainer that keeps one checkpoint and deletes it before the next one is safe: one is left.

Whatever dies at whichever step of that, and though the store is away: `latest` names a whole
checkpoint, or `undelete` brings one back, and its bytes are those that were written.
"""

import contextlib
import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.mounting import Mount, mounted, wait_for
from tests.proxy import proxied
from tests.s3servers import S3Server

pytestmark = [
    pytest.mark.mounted,
    pytest.mark.skipif(
        os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs root and /dev/fuse"
    ),
]

MIB = 1 << 20
DEAD = {errno.ENOTCONN, errno.ECONNABORTED, errno.EIO, errno.EBADF}
SIZES = {
    ".metadata": 100,
    "config.json": 300,
    "model-00001-of-00002.safetensors": 3 * MIB + 17,
    "model-00002-of-00002.safetensors": 3 * MIB,
    "optimizer.pt": 2 * MIB,
}
Content = dict[str, bytes]
"""Contents of a checkpoint's files by their paths in it; of a single file by `""`."""
Steps = Iterator[str]


def content_of_directory() -> Content:
    return {name: os.urandom(size) for name, size in SIZES.items()}


def content_of_file() -> Content:
    return {"": os.urandom(5 * MIB + 3)}


def save(path: Path, content: Content) -> None:
    for step in saving(path, content):
        assert step


def saving(path: Path, content: Content) -> Steps:
    """Write a checkpoint, and yield in the middle and after the close of each file."""
    if "" not in content:
        path.mkdir()
    for name, data in content.items():
        fd = os.open(path / name if name else path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.write(fd, data[: len(data) // 2])
            yield f"in the middle of {name}"
            os.write(fd, data[len(data) // 2 :])
        finally:
            with contextlib.suppress(OSError):  # the mount may be dead
                os.close(fd)
        yield f"after {name}"


# --- ways to rotate ------------------------------------------------------------------------------


def directories(mount: Mount, number: int, new: Content) -> Steps:
    """Delete `step_N` and write the next one, as a trainer does that has no room for two."""
    old = mount.path / f"step_{number}"
    for path in sorted(old.iterdir()):
        path.unlink()
        yield f"after the unlink of {path.name}"
    old.rmdir()
    yield "after the rmdir"
    yield from saving(mount.path / f"step_{number + 1}", new)


def overwritten(mount: Mount, number: int, new: Content) -> Steps:
    """Do `torch.save` to the same name again."""
    fd = os.open(mount.path / "last.pt", os.O_WRONLY | os.O_TRUNC)
    os.close(fd)
    yield "after an empty file was closed"
    yield from saving(mount.path / "last.pt", new)


def replaced(mount: Mount, number: int, new: Content) -> Steps:
    """Write beside it, and rename over it."""
    yield from saving(mount.path / "last.pt.tmp", new)
    (mount.path / "last.pt.tmp").rename(mount.path / "last.pt")
    yield "after the rename"


def written_over(mount: Mount, number: int, new: Content) -> Steps:
    """Write every file of a directory again, in place."""
    folder = mount.path / "last"
    for name, data in new.items():
        for step in saving(folder / name, {"": data}):
            yield f"{name}: {step}"


Way = tuple[Callable[[Mount, int, Content], Steps], Callable[[], Content], str]
WAYS: dict[str, Way] = {
    "directories": (directories, content_of_directory, "step_{}"),
    "overwritten": (overwritten, content_of_file, "last.pt"),
    "replaced": (replaced, content_of_file, "last.pt"),
    "written over": (written_over, content_of_directory, "last"),
}


# --- what can be restored ------------------------------------------------------------------------


def read(path: Path) -> Content:
    if path.is_file():
        return {"": path.read_bytes()}
    return {
        str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()
    }


def kept(mount: Mount) -> list[dict[str, Any]]:
    done = mount.run("undelete", mount.path, "--json")
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout)["kept"])


def restored(mount: Mount, aside: str) -> tuple[str, Content]:
    """Return how one checkpoint was got, and its content."""

    def found() -> "subprocess.CompletedProcess[str] | None":
        done = mount.run("latest", mount.path)  # a digest may be on its way
        return done if done.returncode == 0 or "lmstorfs undelete" in done.stderr else None

    try:
        latest = wait_for(found, "there is one to restore", timeout_s=20)
    except TimeoutError as error:
        told = mount.run("checkpoints", mount.path, "--json").stdout
        raise AssertionError(f"nothing to restore:\n{told}\n{mount.log()}") from error
    assert latest is not None
    if latest.returncode == 0:
        return "latest", read(Path(latest.stdout.rstrip("\n")))
    path = next(each["path"] for each in kept(mount) if each["complete"])
    done = mount.run("undelete", mount.path / path)
    if done.returncode:  # the trainer began to write it again
        assert "is there again" in done.stderr
        done = mount.run("undelete", mount.path / path, "--to", mount.path / aside)
        path = aside
    assert done.returncode == 0, f"{done.stderr}\n{mount.log()}"
    if path != aside:  # what the trainer left is not taken for the newest
        again = mount.run("latest", mount.path)
        assert again.stdout.rstrip("\n") == str(mount.path / path), again.stderr
    return "undelete", read(mount.path / path)


def clear(mount: Mount) -> None:
    for path in mount.path.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert mount.run("undelete", mount.path, "--discard").returncode == 0


def run_to(steps: Steps, count: int) -> str | None:
    """Do the first `count` steps and leave it there; None where there are not so many."""
    for _ in range(count):
        said = next(steps, None)
    return said


@contextmanager
def away(store: Path) -> Iterator[None]:
    aside = store.with_name("aside")
    store.rename(aside)
    try:
        yield
    finally:
        if store.exists():
            shutil.rmtree(store)
        aside.rename(store)


@pytest.mark.parametrize("data_path", ["auto", "userspace"])
@pytest.mark.parametrize("way", WAYS)
def test_one_is_left_whenever_keeper_and_daemon_die(
    tmp_path: Path, way: str, data_path: str
) -> None:
    rotate, make, name = WAYS[way]
    options = ("--ram", "256M", "-o", f"data_path={data_path},flush_delay=0.05")
    with mounted(tmp_path, *options) as mount:
        for count in range(1, 100):
            old, new = make(), make()
            save(mount.path / name.format(count), old)
            if count % 2:  # else only the tier has it
                mount.sync()
            with away(mount.store):
                steps = rotate(mount, count, new)
                where = run_to(steps, count)
                if where is None:
                    break
                mount.kill()
                steps.close()
            mount.start()
            aside = "back.pt" if "" in old else "back"
            how, content = restored(mount, aside)
            if way == "written over":  # what is no weights may be of either save
                content["config.json"] = old["config.json"] = new["config.json"]
            assert content in (old, new), f"{where}: {how}"
            clear(mount)
        else:
            pytest.fail("it never ends")


def test_one_is_left_though_the_store_never_answers(tmp_path: Path, server: S3Server) -> None:
    with proxied(server.endpoint) as proxy:
        url = f"s3://{server.bucket}/guard"
        options = ("--store", url, "-o", f"endpoint={proxy.endpoint},flush_delay=0.05")
        with mounted(tmp_path, "--ram", "256M", *options, environment=server.environment) as mount:
            for count in (1, 4, 6, 11, 14):
                old, new = content_of_directory(), content_of_directory()
                save(mount.path / f"step_{count}", old)
                if count % 2:
                    mount.sync()
                proxy.cut()
                steps = directories(mount, count, new)
                where = run_to(steps, count)
                mount.kill()
                steps.close()
                mount.start()  # over the dead one, with the store away
                how, content = restored(mount, "brought-back")
                assert content in (old, new), f"{where}: {how}"
                proxy.restore()
                mount.sync()
                clear(mount)
                mount.sync()
