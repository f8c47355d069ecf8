"""Keys: which ones are allowed, and how a name that is not UTF-8 becomes text that S3 takes.

A key never leaves the store's root, whatever a catalog or a peer says: this is the one place
that checks it. Names that are not UTF-8 are written the way rclone does, so that rclone reads
them back: each stray byte as U+201B and two hex digits, and U+201B itself doubled.
"""

import re

from lmstorfs.errors import StoreDeniedError

_QUOTE = "\u201b"
_STRAY = re.compile("[\udc80-\udcff\u201b]")
_QUOTED = re.compile(f"{_QUOTE}({_QUOTE}|[89A-F][0-9A-F])")
OWN_PREFIX = ".lmstorfs-"  # names that only we make, and no listing shows
TEMPORARY_PREFIX = OWN_PREFIX + "tmp-"  # those that an upload leaves when it is killed


def split_key(key: str, *, root: bool = False) -> list[str]:
    """Return the parts of `key`; raises `StoreDeniedError` where it could leave the store.

    `root` allows `""`, the store's own root.
    """
    if not key and root:
        return []
    parts = key.split("/")
    for part in parts:
        if part in ("", ".", "..") or "\0" in part:
            raise StoreDeniedError(f"'{printable(key)}' is no key: a part of it is {part!r}")
    return parts


def printable(text: str) -> str:
    """Return `text` so that it can be printed and logged, whatever bytes it stands for."""
    return text.encode("utf-8", "backslashreplace").decode()


def quote_name(name: str) -> str:
    """Return `name` (or a whole key) as valid Unicode; `unquote_name` undoes it."""

    def quoted(match: re.Match[str]) -> str:
        char = match[0]
        return _QUOTE + _QUOTE if char == _QUOTE else f"{_QUOTE}{ord(char) - 0xDC00:02X}"

    return _STRAY.sub(quoted, name)


def unquote_name(text: str) -> str:
    """Return the name that `quote_name` made `text` of."""

    def plain(match: re.Match[str]) -> str:
        code = match[1]
        return _QUOTE if code == _QUOTE else chr(0xDC00 + int(code, 16))

    return _QUOTED.sub(plain, text)


def own_name(text: str) -> str | None:
    """Return the name for a `text` that another tool may have made, None where there is none.

    Some texts can be no name here: `quote_name` would make another text of it (a lone quote, or
    bytes that together are UTF-8), so the object could be listed but never be opened.
    """
    raw = unquote_name(text).encode("utf-8", "surrogateescape")
    name = raw.decode("utf-8", "surrogateescape")
    return name if quote_name(name) == text else None
