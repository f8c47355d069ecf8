"""The FUSE wire format, as far as the channel touches it.

Source of every name, number and layout: `include/uapi/linux/fuse.h` of the kernel, whose
spelling is kept. All records are in the machine's byte order, which is little-endian on every
machine that this runs on.
"""

import struct

IN_HEADER = struct.Struct("<IIQQIIIHH")  # fuse_in_header
OUT_HEADER = struct.Struct("<IiQ")  # fuse_out_header
IN_HEADER_BYTES = IN_HEADER.size
OUT_HEADER_BYTES = OUT_HEADER.size
OPCODE_UNIQUE_NODE = struct.Struct("<4xIQQ")  # what is needed of every request
PID = struct.Struct("<I")  # fuse_in_header.pid
PID_OFFSET = 32

FUSE_LOOKUP = 1
FUSE_FORGET = 2
FUSE_OPEN = 14
FUSE_READ = 15
FUSE_WRITE = 16
FUSE_RELEASE = 18
FUSE_FLUSH = 25
FUSE_INIT = 26
FUSE_CREATE = 35
FUSE_INTERRUPT = 36
FUSE_IOCTL = 39
FUSE_BATCH_FORGET = 42
FUSE_FALLOCATE = 43
FUSE_LSEEK = 46
FUSE_COPY_FILE_RANGE = 47
FUSE_TMPFILE = 51

FUSE_KERNEL_VERSION = 7
FUSE_KERNEL_MINOR_VERSION = 45  # the newest that this channel was written for
# libfuse splices from a device whose protocol minor is 14 or more; a socket has no splice.
LIBFUSE_MINOR = 13

# INIT flags, `flags` word
FUSE_ASYNC_READ = 1 << 0
FUSE_ATOMIC_O_TRUNC = 1 << 3
FUSE_BIG_WRITES = 1 << 5
FUSE_DO_READDIRPLUS = 1 << 13
FUSE_ASYNC_DIO = 1 << 15
FUSE_PARALLEL_DIROPS = 1 << 18
FUSE_MAX_PAGES = 1 << 22
FUSE_HANDLE_KILLPRIV_V2 = 1 << 28
FUSE_INIT_EXT = 1 << 30
# `flags2` word: bits 32 and up of the 64
FUSE_PASSTHROUGH = 1 << (37 - 32)
FUSE_HAS_RESEND = 1 << (39 - 32)

WANTED_FLAGS = (
    FUSE_ASYNC_READ
    | FUSE_ATOMIC_O_TRUNC
    | FUSE_BIG_WRITES
    | FUSE_DO_READDIRPLUS
    | FUSE_ASYNC_DIO
    | FUSE_PARALLEL_DIROPS
    | FUSE_MAX_PAGES
    | FUSE_HANDLE_KILLPRIV_V2
    | FUSE_INIT_EXT
)

INIT_IN = struct.Struct("<IIIII")  # major, minor, max_readahead, flags, flags2
INIT_OUT = struct.Struct("<IIIIHHIIHHII6I")

# open_flags of fuse_open_out
FOPEN_DIRECT_IO = 1 << 0
FOPEN_KEEP_CACHE = 1 << 1
FOPEN_PASSTHROUGH = 1 << 7

HANDLE = struct.Struct("<Q")  # how fuse_release_in and fuse_flush_in begin
OPEN_OUT = struct.Struct("<QIi")  # fh, open_flags, backing_id
ENTRY_OUT_BYTES = 128
READ_IN = struct.Struct("<QQIIQII")  # fh, offset, size, read_flags, lock_owner, flags, padding
WRITE_IN = struct.Struct("<QQIIQII")  # fh, offset, size, write_flags, lock_owner, flags, padding
WRITE_OUT = struct.Struct("<II")  # size, padding
FALLOCATE_IN = struct.Struct("<QQQII")  # fh, offset, length, mode, padding
LSEEK_IN = struct.Struct("<QQII")  # fh, offset, whence, padding
LSEEK_OUT = struct.Struct("<Q")
COPY_FILE_RANGE_IN = struct.Struct(
    "<QQQQQQQ"
)  # fh_in, off_in, nodeid_out, fh_out, off_out, len, flags

FUSE_NOTIFY_RESEND = 7
FUSE_UNIQUE_RESEND = 1 << 63

# ioctl(2) numbers of /dev/fuse
FUSE_DEV_IOC_BACKING_OPEN = 0x4010E501
FUSE_DEV_IOC_BACKING_CLOSE = 0x4004E502
BACKING_MAP = struct.Struct("<iIQ")  # struct fuse_backing_map: fd, flags, padding

_MAX_BACKGROUND = 64
_CONGESTION_THRESHOLD = 48
_MAX_READAHEAD_BYTES = 1 << 20
PAGE_BYTES = 4096


class Init:
    """What the kernel offers in its INIT request, and our answer to it."""

    def __init__(self, body: bytes) -> None:
        """Take the INIT request's body (after the header)."""
        self.major, self.minor, self.max_readahead, self.flags, self.flags2 = INIT_IN.unpack_from(
            body.ljust(INIT_IN.size, b"\0")
        )
        if not self.flags & FUSE_INIT_EXT:
            self.flags2 = 0

    @property
    def offers_passthrough(self) -> bool:
        """Whether this kernel can do FUSE passthrough."""
        return bool(self.flags2 & FUSE_PASSTHROUGH)

    def answer(self, *, passthrough: bool, max_write: int) -> bytes:
        """Return the body of our INIT reply."""
        flags2 = self.flags2 & FUSE_HAS_RESEND
        if passthrough:
            flags2 |= FUSE_PASSTHROUGH
        return INIT_OUT.pack(
            FUSE_KERNEL_VERSION,
            min(self.minor, FUSE_KERNEL_MINOR_VERSION),
            min(self.max_readahead, _MAX_READAHEAD_BYTES),
            self.flags & WANTED_FLAGS,
            _MAX_BACKGROUND,
            _CONGESTION_THRESHOLD,
            max_write,
            1,  # time_gran, nanoseconds
            max_write // PAGE_BYTES,
            0,
            flags2,
            2 if passthrough else 0,  # max_stack_depth: the tier's filesystem below this one
            *(0,) * 6,
        )


def request_number(unique: int) -> int:
    """Return the number by which a request is known, the same when it is asked again.

    31 bits, since it travels in the place of a process id; the kernel counts uniques up by two.
    """
    return unique >> 1 & 0x7FFFFFFF


def init_for_libfuse(request: bytes) -> bytes:
    """Return the INIT request as libfuse is to see it: a minor without splice."""
    header = IN_HEADER.unpack_from(request)
    body = INIT_IN.pack(
        FUSE_KERNEL_VERSION, LIBFUSE_MINOR, _MAX_READAHEAD_BYTES, FUSE_DO_READDIRPLUS, 0
    )
    size = IN_HEADER_BYTES + 16  # fuse_init_in without the words of INIT_EXT
    return IN_HEADER.pack(size, *header[1:]) + body[:16]


def made_up_init(unique: int) -> bytes:
    """Return an INIT request for a libfuse whose kernel was initialised by an earlier daemon."""
    header = IN_HEADER.pack(IN_HEADER_BYTES + 16, FUSE_INIT, unique, 0, 0, 0, 0, 0, 0)
    return init_for_libfuse(header)


def reply(unique: int, body: bytes = b"", error: int = 0) -> bytes:
    """Return a whole reply; `error` is a positive errno, or 0."""
    return OUT_HEADER.pack(OUT_HEADER_BYTES + len(body), -error, unique) + body
