"""What makes a version and what does not: each content is sent once, and none is lost."""

import os
import subprocess
import threading
from pathlib import Path

from tests.mounted.conftest import Site


def sent_bytes(site: Site) -> int:
    return int(site.mount.status()["store"]["flushing"]["stored_bytes"])


def test_opening_for_writing_changes_nothing(site: Site) -> None:
    path = site.fresh("reopened") / "file"
    path.write_bytes(b"content")
    site.settle()
    before, sent = path.stat(), sent_bytes(site)
    for mode in ("r+b", "ab"):
        with path.open(mode):
            assert path.stat().st_mtime_ns == before.st_mtime_ns
    site.settle()
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert sent_bytes(site) == sent


def test_a_closed_version_is_stored_while_somebody_has_the_file_open_again(site: Site) -> None:
    folder = site.fresh("open-again")
    for number in range(10):
        path: Path = folder / f"file {number}"
        path.write_bytes(b"content %d" % number)
        with path.open("r+b", buffering=0) as file:
            site.sync()
            assert site.stored(path).read_bytes() == b"content %d" % number
            file.write(b"CON")
    site.sync()
    for number in range(10):
        assert site.stored(folder / f"file {number}").read_bytes() == b"CONtent %d" % number


def test_a_sync_does_not_wait_for_a_writer_that_goes_on(site: Site) -> None:
    path = site.fresh("writer") / "log"
    path.write_bytes(b"first")
    with path.open("r+b", buffering=0) as file:
        file.write(b"FIRST, second")
        site.sync()
    site.sync()
    assert site.stored(path).read_bytes() == b"FIRST, second"


def test_a_directory_does_not_wait_for_a_writer_that_goes_on(site: Site) -> None:
    folder = site.fresh("writers-directory")
    path = folder / "log"
    path.write_bytes(b"first")
    site.sync()
    with path.open("r+b", buffering=0) as file:
        path.with_name("other").write_bytes(b"other")
        os.fsync(file.fileno())
        path.write_bytes(b"FIRST")
        file.write(b"FIRST, second")
        folder.chmod(0o750)
        site.sync()
        assert site.stored(folder / "other").read_bytes() == b"other"
    site.settle()
    assert site.stored(path).read_bytes() == b"FIRST, second"


def test_times_set_while_it_is_uploaded_do_not_keep_it_out(site: Site) -> None:
    path = site.fresh("times") / "model.pt"
    content = os.urandom(48 << 20)
    path.write_bytes(content)
    for second in range(1_600_000_000, 1_600_000_200):
        os.utime(path, (second, second))
        if not site.mount.status()["store"]["pending_files"]:
            break
    site.settle()
    assert site.stored(path).read_bytes() == content
    assert path.stat().st_mtime_ns == second * 10**9
    if site.server is None:
        assert site.stored(path).stat().st_mtime_ns == second * 10**9


def test_a_close_is_a_version_though_another_program_has_the_file_open(site: Site) -> None:
    path = site.fresh("two-writers") / "file"
    with path.open("wb") as writer, path.open("r+b"):
        writer.write(b"content")
        writer.close()
        site.sync()
        assert site.stored(path).exists()
        assert site.stored(path).read_bytes() == b"content"


def test_a_close_is_a_version_though_a_forked_process_keeps_the_file_open(site: Site) -> None:
    """A worker that reads data is forked while a checkpoint is saved, and has its descriptors."""
    path = site.fresh("forked") / "model.pt"
    content = os.urandom(3 << 20)
    with path.open("wb", buffering=0) as file:
        worker = subprocess.Popen(["sleep", "infinity"], pass_fds=[file.fileno()])
        file.write(content)
    try:
        site.sync()
        assert site.stored(path).read_bytes() == content
        path.with_name("renamed").write_bytes(b"")
        path.rename(path.with_name("renamed"))
        assert path.with_name("renamed").read_bytes() == content
    finally:
        worker.kill()
        worker.wait()
    before = sent_bytes(site)
    site.settle()
    assert sent_bytes(site) == before  # the worker's end changed nothing
    assert site.stored(path.with_name("renamed")).read_bytes() == content


def test_a_program_started_in_the_middle_of_a_save_makes_no_version(site: Site) -> None:
    folder = site.fresh("starts-a-program")
    path = folder / "model"
    with path.open("wb", buffering=0) as file:
        file.write(b"half")
        # It inherits the descriptor and closes it, with its exec and at its end.
        subprocess.run(["true"], check=True)
        subprocess.run(["true"], check=True, pass_fds=[file.fileno()])
        site.sync()
        assert not site.stored(path).exists()
        assert not site.mount.status()["checkpoints"][0]["complete"]
        file.write(b" and half")
    site.sync()
    assert site.stored(path).read_bytes() == b"half and half"


def test_what_a_started_program_wrote_is_there_once_its_starter_closes(site: Site) -> None:
    path = site.fresh("redirected") / "out"
    with path.open("wb") as file:
        subprocess.run(["echo", "written by another"], stdout=file, check=True)
    site.sync()
    assert site.stored(path).read_bytes() == b"written by another\n"
    subprocess.run(f"(echo one; echo two) > {path}", shell=True, check=True)
    site.sync()
    assert site.stored(path).read_bytes() == b"one\ntwo\n"


def test_every_one_of_many_fsyncs_is_in_the_store(site: Site) -> None:
    path = site.fresh("fsyncs") / "file"
    with path.open("wb", buffering=0) as file:
        for number in range(30):
            content = bytes([number]) * (1 << 20)
            os.pwrite(file.fileno(), content, number << 20)
            os.fsync(file.fileno())
            with site.stored(path).open("rb") as stored:
                assert os.fstat(stored.fileno()).st_size == (number + 1) << 20
                assert os.pread(stored.fileno(), 1 << 20, number << 20) == content


def test_an_fsync_ends_though_another_thread_writes_on(site: Site) -> None:
    path = site.fresh("contended") / "file"
    done = threading.Event()

    def write_on() -> None:
        with path.open("ab", buffering=0) as file:
            while not done.wait(0.001):
                file.write(b"x" * 1000)

    with path.open("ab", buffering=0) as file:
        thread = threading.Thread(target=write_on)
        thread.start()
        try:
            file.write(b"mine")
            watchdog = threading.Timer(20, done.set)
            watchdog.start()
            os.fsync(file.fileno())
            assert not done.is_set(), "the fsync ended only with the other writer"
        finally:
            done.set()
            thread.join()
            watchdog.cancel()
