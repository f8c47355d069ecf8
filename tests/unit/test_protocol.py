"""The FUSE wire format: what is answered to what a kernel offers."""

import struct

import pytest

from lmstorfs.fuse import protocol as fuse


def offer(minor: int, flags: int, flags2: int) -> bytes:
    return struct.pack("<IIIII", 7, minor, 1 << 20, flags, flags2).ljust(64, b"\0")


ALL = 0xFFFFFFFF


def test_the_answer_takes_only_what_was_offered_and_is_known() -> None:
    init = fuse.Init(offer(45, ALL, ALL))
    answer = init.answer(passthrough=True, max_write=1 << 20)
    assert len(answer) == 64
    fields = struct.unpack("<IIIIHHIIHHII6I", answer)
    major, minor, readahead, flags, _, _, max_write, grain, pages, _, flags2, depth = fields[:12]
    assert (major, minor, readahead, max_write, grain, pages) == (7, 45, 1 << 20, 1 << 20, 1, 256)
    assert flags == fuse.WANTED_FLAGS
    assert flags2 == fuse.FUSE_PASSTHROUGH | fuse.FUSE_HAS_RESEND
    assert depth == 2
    assert not flags & 1 << 16  # WRITEBACK_CACHE excludes passthrough


def test_a_newer_kernel_is_told_the_protocol_that_is_known() -> None:
    answer = fuse.Init(offer(99, ALL, ALL)).answer(passthrough=True, max_write=1 << 20)
    assert struct.unpack_from("<II", answer) == (7, fuse.FUSE_KERNEL_MINOR_VERSION)


@pytest.mark.parametrize(("flags", "flags2"), [(ALL & ~fuse.FUSE_INIT_EXT, ALL), (ALL, 0), (0, 0)])
def test_a_kernel_without_passthrough_is_not_asked_for_it(flags: int, flags2: int) -> None:
    init = fuse.Init(offer(38, flags, flags2))
    assert not init.offers_passthrough
    answer = struct.unpack("<IIIIHHIIHHII6I", init.answer(passthrough=False, max_write=1 << 20))
    assert answer[3] == flags & fuse.WANTED_FLAGS
    assert (answer[10], answer[11]) == (0, 0)


def test_an_old_and_short_request_is_read() -> None:
    init = fuse.Init(struct.pack("<IIII", 7, 31, 4096, fuse.FUSE_ASYNC_READ))
    assert (init.minor, init.max_readahead, init.flags2) == (31, 4096, 0)


def test_libfuse_is_shown_a_protocol_without_splice() -> None:
    header = fuse.IN_HEADER.pack(40 + 64, fuse.FUSE_INIT, 77, 1, 2, 3, 4, 0, 0)
    shown = fuse.init_for_libfuse(header + offer(45, ALL, ALL))
    length, opcode, unique = struct.unpack_from("<IIQ", shown)
    assert (length, opcode, unique) == (len(shown), fuse.FUSE_INIT, 77)
    assert struct.unpack_from("<II", shown, 40) == (7, 13)


def test_a_later_daemon_makes_the_request_up() -> None:
    shown = fuse.made_up_init(1 << 62)
    length, opcode, unique = struct.unpack_from("<IIQ", shown)
    assert (length, opcode, unique) == (len(shown), fuse.FUSE_INIT, 1 << 62)


def test_a_reply_carries_its_length_and_a_negative_errno() -> None:
    assert fuse.reply(5, b"abc") == struct.pack("<IiQ", 19, 0, 5) + b"abc"
    assert fuse.reply(5, error=2) == struct.pack("<IiQ", 16, -2, 5)


def test_sizes_are_the_kernels() -> None:
    sizes = (fuse.IN_HEADER_BYTES, fuse.OUT_HEADER_BYTES, fuse.INIT_OUT.size, fuse.OPEN_OUT.size)
    assert sizes == (40, 16, 64, 16)
    assert (fuse.READ_IN.size, fuse.WRITE_IN.size, fuse.BACKING_MAP.size) == (40, 40, 16)
    assert (fuse.FALLOCATE_IN.size, fuse.LSEEK_IN.size, fuse.COPY_FILE_RANGE_IN.size) == (
        32, 24, 56,
    )  # fmt: skip
