"""Settings come from the command line, the environment, the file and defaults, in this order."""

from pathlib import Path

import pytest

from lmstorfs import host, settings
from lmstorfs.config import (
    MountConfig,
    SsdConfig,
    default_state_dir,
    mount_name,
    read_config,
    write_config,
)
from lmstorfs.errors import SetupError, UsageError
from lmstorfs.units import GIB, MIB


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "lmstorfs.toml"


def load(
    file: Path,
    mountpoint: str = "/ckpt",
    options: dict[str, settings.Raw | None] | None = None,
    o: tuple[str, ...] = (),
    **environment: str,
) -> MountConfig:
    given = settings.from_command_line(options or {}, o)
    return settings.load(mountpoint, given, environment, file)


def test_each_layer_wins_over_the_next(file: Path) -> None:
    file.write_text(
        '[mount."/ckpt"]\nram = "1G"\nfsync = "ram"\nworkers = 3\nflush_delay = 2.5\n'
        '[mount."/other"]\nram = "9G"\n'
    )
    config = load(file, options={"ram": "3G"}, LMSTORFS_RAM="2G", LMSTORFS_FSYNC="store")
    assert config.ram_bytes == 3 * GIB
    assert config.fsync == "store"
    assert config.workers == 3
    assert config.flush_delay_s == 2.5
    assert config.attr_timeout_s == 5.0


def test_a_mount_without_any_settings_has_a_store_and_half_of_the_free_memory(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/s")
    config = load(file)
    assert config.state_dir == "/s/lmstorfs/ckpt"
    assert config.store.url == "/s/lmstorfs/ckpt/store"
    free = host.memory().available
    assert abs(config.ram_bytes - free // 2) < free // 8
    assert config.read_only is False


def test_o_takes_options_flags_and_repeats(file: Path) -> None:
    config = load(
        file,
        o=("endpoint=http://h:9000,part_size=64M,no_allow_other", "connections=9", "read-only=yes"),
    )
    assert config.store.endpoint == "http://h:9000"
    assert config.store.part_bytes == 64 * MIB
    assert config.store.connections == 9
    assert config.allow_other is False
    assert config.read_only is True


def test_an_option_wins_over_the_same_setting_in_o(file: Path) -> None:
    assert load(file, options={"ram": "1G"}, o=("ram=2G",)).ram_bytes == GIB


def test_ssd_tiers_from_every_place(file: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    wanted = (
        SsdConfig(path=str(one), budget_bytes=GIB),
        SsdConfig(path=str(two), budget_bytes=2 * GIB),
    )
    assert load(file, options={"ssd": [f"{one}:1G", f"{two}:2G"]}).ssd == wanted
    assert load(file, LMSTORFS_SSD=f"{one}:1G,{two}:2G").ssd == wanted
    assert load(file, o=(f"ssd={one}:1G,ssd={two}:2G",)).ssd == wanted
    file.write_text(f'[mount."/ckpt"]\nssd = ["{one}:1G", "{two}:2G"]\n')
    assert load(file).ssd == wanted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[mount."/ckpt"]\nfsnc = "ram"',
            '[mount."/ckpt"]: there is no setting fsnc; did you mean fsync?',
        ),
        (
            '[mount."/other"]\nrams = 1',
            '[mount."/other"]: there is no setting rams; did you mean ram?',
        ),
        ('[mounts."/ckpt"]\nram = 1', 'there is no table mounts; write [mount."/ckpt"]'),
        (
            '[mount."/ckpt"]\nram = "big"',
            "ram: 'big' is no size; write for example 512M, 16G or 1.5T",
        ),
        ('[mount."/ckpt"]\nfsync = ["ram"]', "fsync: one value is wanted, not a list"),
        ('[mount]\n"/ckpt" = 1', '[mount."/ckpt"] is no table'),
        ("mount = 1", "mount is no table"),
        ("[mount", "is no TOML"),
    ],
)
def test_a_wrong_word_in_the_file_is_named_with_its_place(
    file: Path, text: str, message: str
) -> None:
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        load(file)
    assert str(caught.value).startswith(str(file))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("o", "message"),
    [
        ("conections=4", "-o conections: there is no such option; did you mean connections?"),
        ("allow-oter", "-o allow-oter: there is no such option; did you mean allow_other?"),
        ("workers", "-o workers: a value is missing; write workers=…"),
        ("workers=0", "-o workers: '0' is no count; write a whole number from 1"),
        (
            "flush_delay=-1",
            "-o flush_delay: '-1' is no number of seconds; write for example 0.5 or 600",
        ),
        (
            "read_timeout=nan",
            "-o read_timeout: 'nan' is no number of seconds; write for example 0.5 or 600",
        ),
        ("data_path=xyz", "-o data_path: 'xyz' is none of auto, userspace"),
        (
            "data_path=user",
            "-o data_path: 'user' is none of auto, userspace; did you mean userspace?",
        ),
        (
            "log_level=warn",
            "-o log_level: 'warn' is none of debug, info, warning, error; did you mean warning?",
        ),
        ("part_size=1M", "-o part_size: '1M' is too little: S3 takes parts from 5 MiB"),
        (
            "endpoint=h:9000",
            "-o endpoint: 'h:9000' is no endpoint; write for example http://127.0.0.1:9000",
        ),
        ("allow_other=maybe", "-o allow_other: 'maybe' is neither true nor false"),
        ("store=s3:bucket", "-o store: 's3:bucket' is neither s3://bucket/prefix nor a path"),
        ("ssd=/x", "-o ssd: '/x' is not DIR:SIZE; write for example /nvme:500G"),
    ],
)
def test_a_wrong_option_says_what_to_write(file: Path, o: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(file, o=(o,))
    assert str(caught.value) == message


def test_a_wrong_value_in_the_environment_names_the_variable(file: Path) -> None:
    with pytest.raises(UsageError, match=r"^LMSTORFS_RAM: 'x' is no size"):
        load(file, LMSTORFS_RAM="x")


def test_variables_that_kubernetes_sets_are_no_settings(file: Path) -> None:
    assert load(file, LMSTORFS_SERVICE_HOST="10.0.0.1", LMSTORFS_PORT="tcp://1", LMSTORFS_RAM="")


def test_a_relative_store_is_made_absolute(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(file, options={"store": "here"}).store.url == str(tmp_path / "here")


def test_names_of_mount_points_are_readable_and_never_shared() -> None:
    assert mount_name("/ckpt") == "ckpt"
    assert mount_name("/mnt/ckpt.1") == "mnt-ckpt.1"
    paths = [
        "/a/b",
        "/a-b",
        "/a_b",
        "/a b",
        "/a+b",
        "/",
        "/-",
        "/é",
        "/.a",
        "/a/.b",
        "/" + "x" * 300,
    ]
    names = [mount_name(path) for path in paths]
    assert len(set(names)) == len(paths)
    assert all("/" not in name and not name.startswith(".") for name in names)
    assert all(len(name) < 200 for name in names)


def test_the_state_directory_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/x")
    assert default_state_dir("/a/b") == "/x/lmstorfs/a-b"


def test_a_configuration_survives_its_file(file: Path, tmp_path: Path) -> None:
    config = load(file, options={"state": str(tmp_path), "ram": "1G"})
    write_config(config)
    assert read_config(tmp_path) == config
    assert (tmp_path / "mount.json").stat().st_mode & 0o777 == 0o600


# --- memory ----------------------------------------------------------------------------------


def fake_host(root: Path, cgroup: str) -> tuple[Path, Path]:
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    cgroups.mkdir()
    (proc / "meminfo").write_text("MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 6291456 kB\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    return proc, cgroups


def limit(group: Path, names: tuple[str, str, str], limit: str, used: int, cache: int) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / names[0]).write_text(f"{limit}\n")
    (group / names[1]).write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"{names[2]} {cache}\n")


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def test_memory_is_the_machines_without_a_limit(tmp_path: Path) -> None:
    proc, cgroups = fake_host(tmp_path, "0::/job\n")
    limit(cgroups / "job", V2, "max", GIB, 0)
    found = host.memory(proc, cgroups)
    assert (found.total, found.available, found.limited_by) == (8 * GIB, 6 * GIB, "machine")


def test_memory_is_bounded_by_a_cgroup_above(tmp_path: Path) -> None:
    proc, cgroups = fake_host(tmp_path, "0::/pod/job\n")
    limit(cgroups / "pod", V2, str(4 * GIB), 3 * GIB, 2 * GIB)
    limit(cgroups / "pod" / "job", V2, "max", GIB, 0)
    found = host.memory(proc, cgroups)
    assert (found.total, found.available, found.limited_by) == (4 * GIB, 3 * GIB, "cgroup")


def test_memory_is_bounded_by_a_container_of_the_first_kind(tmp_path: Path) -> None:
    proc, cgroups = fake_host(tmp_path, "4:memory:/docker/not-seen-from-inside\n1:cpu:/\n0::/\n")
    limit(cgroups / "memory", V1, str(2 * GIB), GIB, 0)
    found = host.memory(proc, cgroups)
    assert (found.total, found.available, found.limited_by) == (2 * GIB, GIB, "cgroup")


def test_too_little_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = host.Memory(total=GIB, available=8 * MIB, limited_by="machine")
    monkeypatch.setattr(host, "memory", lambda: nothing)
    with pytest.raises(SetupError, match="only 8 MiB of memory is free"):
        settings.default_ram_bytes()
