"""Sizes and durations as people write them: the one place that parses and formats them."""

import re

from lmstorfs.errors import UsageError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_FACTORS = {"": 1, "K": KIB, "M": MIB, "G": GIB, "T": 1 << 40, "P": 1 << 50}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGTP]?)(?:i?B)?\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the bytes that `text` names: `512M`, `16G`, `1.5TiB`, `1000000`.

    Units are powers of 1024, with or without `iB`. Raises `UsageError` for anything else.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError(f"'{text}' is no size; write for example 512M, 16G or 1.5T")
    return int(float(match[1]) * _FACTORS[match[2].upper()])


def format_size(count: float) -> str:
    """Return `count` bytes for people, three digits and a unit: `1.50 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} PiB"


def format_duration(seconds: float) -> str:
    """Return a duration for people: `0.4 s`, `12 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"
