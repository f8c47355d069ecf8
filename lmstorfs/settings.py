"""Where a mount's settings come from: command line, environment, `/etc/lmstorfs.toml`, defaults.

One vocabulary everywhere: the setting `flush_delay` is `-o flush_delay=1` on the command line,
`LMSTORFS_FLUSH_DELAY=1` in the environment and `flush_delay = 1` in the file. What stands further
left in the list above wins. An unknown name is an error on the command line and in the file; in
the environment it is not, since Kubernetes puts variables there that are named after services.
"""

import difflib
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from lmstorfs import host
from lmstorfs.config import MIN_RAM_BYTES, PARTS, MountConfig, SsdConfig, default_state_dir
from lmstorfs.errors import SetupError, UsageError
from lmstorfs.store.store import StoreConfig
from lmstorfs.units import MIB, format_size, parse_size

CONFIG_FILE = Path("/etc/lmstorfs.toml")
CONFIG_FILE_VARIABLE = "LMSTORFS_CONFIG"
VARIABLE_PREFIX = "LMSTORFS_"
MIN_PART_BYTES = 5 * MIB  # S3 takes no smaller part but the last

Raw = str | list[str]


class Given(msgspec.Struct, frozen=True):
    """A setting as somebody wrote it, and where."""

    origin: str
    value: Raw


# --- parsers of single values ----------------------------------------------------------------


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise UsageError(f"'{text}' is none of {', '.join(allowed)}{_nearest(text, allowed)}")
        return text

    return parse


def _seconds(text: str) -> float:
    try:
        value = float(text.removesuffix("s"))
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise UsageError(f"'{text}' is no number of seconds; write for example 0.5 or 600")
    return value


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise UsageError(f"'{text}' is no count; write a whole number from 1")
    return int(text)


def _truth(text: str) -> bool:
    words = {"true": True, "yes": True, "on": True, "1": True}
    words |= {"false": False, "no": False, "off": False, "0": False}
    try:
        return words[text.lower()]
    except KeyError:
        raise UsageError(f"'{text}' is neither true nor false") from None


def _size(least: int, why: str) -> Callable[[str], int]:
    """Return a parser of sizes from `least` bytes; `why` says who needs `{}` of them."""

    def parse(text: str) -> int:
        size = parse_size(text)
        if size < least:
            raise UsageError(f"'{text}' is too little: {why.format(format_size(least))}")
        return size

    return parse


def parse_ssd(text: str) -> SsdConfig:
    """Return the SSD tier that `DIR:SIZE` names."""
    path, _, size = text.rpartition(":")
    if not path or not size:
        raise UsageError(f"'{text}' is not DIR:SIZE; write for example /nvme:500G")
    budget = parse_size(size)
    if budget < MIN_RAM_BYTES:
        raise UsageError(f"'{text}' is too little: a tier needs {format_size(MIN_RAM_BYTES)}")
    return SsdConfig(path=os.path.realpath(path), budget_bytes=budget)


def _ssd(value: Raw) -> tuple[SsdConfig, ...]:
    entries = value if isinstance(value, list) else value.split(",")
    return tuple(parse_ssd(entry) for entry in entries if entry)


def _store(text: str) -> str:
    if not text:
        raise UsageError("a store is s3://bucket/prefix or a directory")
    if "://" in text:
        return text
    if ":" in text.split("/")[0]:
        raise UsageError(f"'{text}' is neither s3://bucket/prefix nor a path")
    return os.path.realpath(text)


def _endpoint(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise UsageError(f"'{text}' is no endpoint; write for example http://127.0.0.1:9000")
    return text


def _address(text: str) -> str:
    from lmstorfs.checkpoint.mirror.transport import parse_address  # brings what a daemon needs

    parse_address(text)
    return text


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"'{text}' is no number; write a whole number from 0")
    return int(text)


def _origin(text: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{32}", text):
        raise UsageError(f"'{text}' is no origin; the mirror names it by 32 hex digits")
    return text


def _path(text: str) -> str:
    if not text:
        raise UsageError("the path is empty")
    return os.path.realpath(text)


PARSERS: dict[str, Callable[[Any], Any]] = {
    "store": _store,
    "ram": _size(MIN_RAM_BYTES, "a RAM tier needs {} at least"),
    "ssd": _ssd,
    "fsync": _choice("copy", "store", "ram"),
    "read_only": _truth,
    "state": _path,
    "endpoint": _endpoint,
    "data_path": _choice("auto", "userspace"),
    "attr_timeout": _seconds,
    "flush_delay": _seconds,
    "fsync_timeout": _seconds,
    "read_timeout": _seconds,
    "workers": _count,
    "restart_limit": _count,
    "mirror": _address,
    "listen": _address,
    "secret_file": _path,
    "keep_replicas": _number,
    "replica_ram": _size(MIN_RAM_BYTES, "replicas need {} at least"),
    "recover_from": _address,
    "recover_origin": _origin,
    "guard": _truth,
    "allow_other": _truth,
    "log_level": _choice("debug", "info", "warning", "error"),
    "connections": _count,
    "part_size": _size(MIN_PART_BYTES, "S3 takes parts from {}"),
}
FLAGS = {
    "allow_other": ("allow_other", "true"),
    "no_allow_other": ("allow_other", "false"),
    "no_guard": ("guard", "false"),
    "ro": ("read_only", "true"),
    "rw": ("read_only", "false"),
}


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


# --- the layers ------------------------------------------------------------------------------


def from_command_line(options: Mapping[str, Raw | None], o: Iterable[str]) -> dict[str, Given]:
    """Return what the command line says: `options` by setting, and the `-o k=v,…` strings."""
    given: dict[str, Given] = {}
    for text in o:
        for word in filter(None, text.split(",")):
            _add_o(given, word)
    for name, value in options.items():
        if value is not None and value != []:
            given[name] = Given(f"--{name.replace('_', '-')}", value)
    return given


def _add_o(given: dict[str, Given], word: str) -> None:
    key, equals, value = word.partition("=")
    name = key.replace("-", "_")
    if not equals and name in FLAGS:
        name, value = FLAGS[name]
    elif name not in PARSERS:
        raise UsageError(f"-o {key}: there is no such option{_nearest(name, [*PARSERS, *FLAGS])}")
    elif not equals:
        raise UsageError(f"-o {key}: a value is missing; write {key}=…")
    earlier = given.get(name)
    if name == "ssd" and earlier is not None:
        value = f"{earlier.value},{value}"
    given[name] = Given(f"-o {key}", value)


def from_environment(environment: Mapping[str, str]) -> dict[str, Given]:
    """Return what `LMSTORFS_*` variables say; an empty one says nothing."""
    return {
        name: Given(variable, environment[variable])
        for name in PARSERS
        if environment.get(variable := VARIABLE_PREFIX + name.upper())
    }


def from_file(path: Path, mountpoint: str) -> dict[str, Given]:
    """Return what the table `[mount."…"]` of `path` says of `mountpoint`.

    The whole file is checked, other mounts' tables too: a wrong word is best found early.
    """
    try:
        tables = tomllib.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no TOML: {error}") from error
    for name in tables:
        if name != "mount":
            raise UsageError(f'{path}: there is no table {name}; write [mount."/ckpt"]')
    mounts = tables.get("mount", {})
    if not isinstance(mounts, dict):
        raise UsageError(f'{path}: mount is no table; write [mount."/ckpt"]')
    found: dict[str, Given] = {}
    for target, table in mounts.items():
        given = _from_table(f'{path} [mount."{target}"]', table)
        if os.path.realpath(target) == mountpoint:
            found = given
    return found


def _from_table(origin: str, table: Any) -> dict[str, Given]:
    if not isinstance(table, dict):
        raise UsageError(f"{origin} is no table")
    given = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in PARSERS:
            raise UsageError(f"{origin}: there is no setting {key}{_nearest(name, PARSERS)}")
        given[name] = Given(f"{origin} {key}", _as_text(value))
    return given


def _as_text(value: Any) -> Raw:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return [str(entry) for entry in value]
    return str(value)


# --- all together ----------------------------------------------------------------------------


def load(
    mountpoint: str,
    command_line: Mapping[str, Given],
    environment: Mapping[str, str] = os.environ,
    file: Path | None = None,
) -> MountConfig:
    """Return the configuration of `mountpoint` (absolute, resolved), every value checked."""
    path = file or Path(environment.get(CONFIG_FILE_VARIABLE) or CONFIG_FILE)
    given = {**from_file(path, mountpoint), **from_environment(environment), **command_line}
    return _compose(mountpoint, {name: _parse(name, value) for name, value in given.items()})


def _parse(name: str, given: Given) -> Any:
    if isinstance(given.value, list) and name != "ssd":
        raise UsageError(f"{given.origin}: one value is wanted, not a list")
    try:
        return PARSERS[name](given.value)
    except UsageError as error:
        raise UsageError(f"{given.origin}: {error}") from None


def _compose(mountpoint: str, values: dict[str, Any]) -> MountConfig:
    state = values.get("state") or default_state_dir(mountpoint)
    store = {
        "url": values.get("store") or str(Path(state) / PARTS["store"]),
        "endpoint": values.get("endpoint"),
        "part_bytes": values.get("part_size"),
        "connections": values.get("connections"),
    }
    rest = {
        "fsync": values.get("fsync"),
        "read_only": values.get("read_only"),
        "data_path": values.get("data_path"),
        "workers": values.get("workers"),
        "restart_limit": values.get("restart_limit"),
        "log_level": values.get("log_level"),
        "ssd": values.get("ssd"),
        "mirror": values.get("mirror") or values.get("recover_from"),
        "listen": values.get("listen"),
        "secret_file": values.get("secret_file"),
        "keep_replicas": values.get("keep_replicas"),
        "recover_from": values.get("recover_from"),
        "recover_origin": values.get("recover_origin"),
        "guard": values.get("guard"),
        "attr_timeout_s": values.get("attr_timeout"),
        "flush_delay_s": values.get("flush_delay"),
        "fsync_timeout_s": values.get("fsync_timeout"),
        "read_timeout_s": values.get("read_timeout"),
    }
    ram_bytes = values["ram"] if "ram" in values else default_ram_bytes()
    if values.get("listen"):
        rest["replica_bytes"] = _replica_bytes(values.get("replica_ram"), ram_bytes)
    return MountConfig(
        mountpoint=mountpoint,
        state_dir=state,
        store=StoreConfig(**_said(store)),
        ram_bytes=ram_bytes,
        allow_other=values.get("allow_other", os.geteuid() == 0),
        **_said(rest),
    )


def _replica_bytes(asked: int | None, ram_bytes: int) -> int:
    """Return the share of the RAM tier for other nodes' replicas: half, where nobody says."""
    share = ram_bytes // 2 if asked is None else asked
    if ram_bytes - share < MIN_RAM_BYTES:
        raise UsageError(
            f"-o replica_ram: {format_size(share)} of {format_size(ram_bytes)} (--ram) leave too "
            "little for this mount's own files"
        )
    return share


def _said(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def default_ram_bytes() -> int:
    """Return the RAM tier's size when nobody says it: half of what is free now."""
    half = host.memory().available // 2
    if half < MIN_RAM_BYTES:
        raise SetupError(
            f"only {format_size(2 * half)} of memory is free; free some, or give --ram"
        )
    return half
