"""The commands. Each is thin: it finds the mount, asks its daemon, and shows the answer.

Whatever a person can cause ends in one line on stderr and an exit code: 1, or 2 where the words of
the command were wrong, 130 after Ctrl-C.
"""

import io
import os
import signal
import sys
import time
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from lmstorfs import __version__, console
from lmstorfs.cli_copies import STATUS_TIMEOUT_S, JsonOption, MountArgument, choose, copies
from lmstorfs.cli_run import runs
from lmstorfs.control_client import ControlClient, DaemonDownError, DaemonGoneError
from lmstorfs.errors import LmstorfsError, SetupError
from lmstorfs.mounts import Mount, is_mounted, locate, lock_held
from lmstorfs.units import format_size

WATCH_INTERVAL_S = 1.0
INTERRUPTED = 130

app = typer.Typer(
    name="lmstorfs",
    help="A filesystem for LLM training: checkpoints at memory speed, brought to S3 or NFS in the "
    "background.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(copies)
app.add_typer(runs)


def _print_version(wanted: bool) -> None:
    if wanted:
        console.say(f"lmstorfs {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


@app.command(
    epilog="Examples:\n\n"
    "  lmstorfs mount /ckpt --store s3://bucket/run-7 --ram 64G\n\n"
    "  lmstorfs mount /ckpt --store /nfs/checkpoints --ssd /nvme:500G\n\n"
    "  lmstorfs mount /ckpt --store s3://b/p -o endpoint=http://10.0.0.5:9000,workers=4\n\n"
    "  lmstorfs mount /ckpt --store s3://b/p --mirror node2:7070 --secret-file /etc/lmstorfs.key"
)
def mount(
    mountpoint: Annotated[str, typer.Argument(metavar="MOUNTPOINT", help="An empty directory.")],
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="s3://bucket/prefix or a directory. Default: a directory in the state directory.",
        ),
    ] = None,
    ram: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Budget of the RAM tier. Default: half of what is free."),
    ] = None,
    ssd: Annotated[
        list[str] | None,
        typer.Option(metavar="DIR:SIZE", help="An SSD tier and its budget; may be repeated."),
    ] = None,
    fsync: Annotated[
        str | None,
        typer.Option(
            metavar="copy|store|ram",
            help="What fsync waits for: a second copy (default), the store, or nothing.",
        ),
    ] = None,
    mirror: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="The peer that keeps replicas of what is written."),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Keep replicas for other nodes, in half of --ram."),
    ] = None,
    secret_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Holds the secret that mirror and peer share (mode 0600)."
        ),
    ] = None,
    recover_from: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Take the place of a node that died, from its mirror."
        ),
    ] = None,
    keep_replicas: Annotated[
        str | None,
        typer.Option(
            metavar="K", help="Newest checkpoints that the mirror keeps once stored. Default: 2."
        ),
    ] = None,
    no_guard: Annotated[
        bool,
        typer.Option(
            "--no-guard", help="Let a checkpoint go when it is deleted, though no other is safe."
        ),
    ] = False,
    read_only: Annotated[bool, typer.Option("--read-only", help="Refuse all writes.")] = False,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay until unmounted; log to stderr.")
    ] = False,
    state: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="State directory. Default: /var/lib/lmstorfs/NAME."),
    ] = None,
    o: Annotated[
        list[str] | None,
        typer.Option(
            "-o",
            metavar="K=V,…",
            help="endpoint, part_size, connections, workers, data_path, attr_timeout, "
            "flush_delay, fsync_timeout, read_timeout, allow_other, no_allow_other, log_level, "
            "keep_replicas, replica_ram, recover_origin, restart_limit.",
        ),
    ] = None,
) -> None:
    """Mount at MOUNTPOINT; returns when the mount answers.

    Options may also stand in /etc/lmstorfs.toml below [mount."/ckpt"] and in LMSTORFS_STORE,
    LMSTORFS_RAM and so on; the command line wins.
    """
    from lmstorfs import launch, settings, validation

    options: dict[str, Any] = {"store": store, "ram": ram, "ssd": ssd, "fsync": fsync}
    options |= {"state": state, "read_only": "true" if read_only else None}
    options |= {"mirror": mirror, "listen": listen, "secret_file": secret_file}
    options |= {"keep_replicas": keep_replicas, "recover_from": recover_from}
    options |= {"guard": "false" if no_guard else None}
    given = settings.from_command_line(options, o or [])
    config = settings.load(validation.resolve_mountpoint(mountpoint), given)
    signal.signal(signal.SIGTERM, _terminated)
    validation.validate(config, console.note)
    ready, keeper = launch.start(config, foreground=foreground)
    path = ready.data_path
    if path != "passthrough" and ready.reason:
        path = f"{path}: {ready.reason}"
    size = format_size(config.ram_bytes)
    console.say(f"mounted {config.mountpoint} (store {config.store.url}, RAM {size}, {path})")
    if foreground:
        raise typer.Exit(keeper.wait_in_foreground())


def _terminated(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


@app.command(
    epilog="Examples:\n\n  lmstorfs status\n\n  lmstorfs status /ckpt --watch\n\n"
    "  lmstorfs status /ckpt --json | jq .store.pending_bytes"
)
def status(
    mountpoint: MountArgument = None,
    json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it live, until Ctrl-C.")] = False,
) -> None:
    """Is my newest checkpoint safe? And: tiers, what is pending, what is wrong."""
    found = choose(mountpoint)
    client = ControlClient(found.state)
    if json:
        try:
            console.show_json(client.call("status", timeout=STATUS_TIMEOUT_S))
        except DaemonDownError as error:
            down = {"mountpoint": found.mountpoint, "state": "down", "reasons": [str(error)]}
            console.show_json(down)
            raise typer.Exit(1) from error
    elif watch:
        _watch(client)
    else:
        out = console.output()
        answer = client.call("status", timeout=STATUS_TIMEOUT_S)
        out.print(console.status_view(answer, unicode=console.speaks_unicode(out)))


def _watch(client: ControlClient) -> None:
    from rich.live import Live

    out = console.output()
    with Live(console=out, screen=out.is_terminal, auto_refresh=False) as live:
        while True:
            answer = client.call("status", timeout=STATUS_TIMEOUT_S)
            view = console.status_view(answer, unicode=console.speaks_unicode(out))
            live.update(view, refresh=True)
            time.sleep(WATCH_INTERVAL_S)


@app.command(epilog="Examples:\n\n  lmstorfs unmount /ckpt\n\n  lmstorfs unmount /ckpt --no-drain")
def unmount(
    mountpoint: Annotated[str, typer.Argument(metavar="MOUNTPOINT", help="The mount point.")],
    no_drain: Annotated[
        bool,
        typer.Option(
            "--no-drain",
            help="Unmount at once; what is pending stays in the tiers for the next mount.",
        ),
    ] = False,
) -> None:
    """Bring what is pending to the store, then unmount."""
    from lmstorfs import launch

    found = _to_unmount(mountpoint)
    if found is None:
        launch.clear_dead_mount(os.path.abspath(mountpoint), None)  # noqa: PTH100 - dead: text only
        console.say(f"unmounted {mountpoint}; its daemon was dead")
        return
    done: dict[str, Any] | None = None
    try:
        with console.transfer_progress("draining") as update:
            client = ControlClient(found.state)
            done = client.call("unmount", on_progress=update, drain=not no_drain)
    except DaemonGoneError as error:
        if lock_held(found.state) and not isinstance(error, DaemonDownError):
            launch.wait_until_gone(found.mountpoint, found.state)
        else:
            _clear_dead(found, error)
            return
    launch.wait_until_gone(found.mountpoint, found.state)
    console.say(f"unmounted {found.mountpoint}")
    if done and done["kept_bytes"] and not no_drain:
        size = format_size(done["kept_bytes"])
        console.note(
            f"{size} of a deleted checkpoint stay in RAM, as no newer one is whole: mount again "
            "and see lmstorfs undelete, or mount with --no-guard to let it go"
        )


def _to_unmount(mountpoint: str) -> Mount | None:
    """Return the mount to end; None for a dead one of which nothing but the mount is left."""
    absolute = os.path.abspath(mountpoint)  # noqa: PTH100 - a dead mount must not be asked
    try:
        found, path = locate(mountpoint)
    except SetupError:
        if is_mounted(absolute):
            return None
        raise SetupError(f"{absolute} is not mounted") from None
    if path != found.mountpoint:
        raise SetupError(f"{path} is no mount point, it lies in {found.mountpoint}; name that one")
    return found


def _clear_dead(found: Mount, error: DaemonGoneError) -> None:
    from lmstorfs import launch

    if not is_mounted(found.mountpoint):
        raise SetupError(f"{found.mountpoint} is not mounted") from error
    warning = launch.clear_dead_mount(found.mountpoint, found.state)
    launch.wait_until_gone(found.mountpoint, found.state)  # a keeper without a daemon ends now
    if warning:
        raise SetupError(warning) from error
    console.say(f"unmounted {found.mountpoint}; its daemon was dead")


@app.command(
    epilog="Examples:\n\n"
    "  lmstorfs mirror --listen 10.0.0.2:7070 --ram 256G --secret-file /etc/lmstorfs.key"
)
def mirror(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where other nodes connect.")],
    ram: Annotated[str, typer.Option(metavar="SIZE", help="What replicas may take.")],
    secret_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Holds the secret that the nodes share (mode 0600)."),
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="State directory. Default: /var/lib/lmstorfs/~mirror."),
    ] = None,
) -> None:
    """Keep replicas for other nodes, without a mount; stays until it is stopped."""
    from lmstorfs import mirror_node

    config = mirror_node.configure(listen, ram, secret_file, state)
    mirror_node.run(config, lambda address: console.say(f"keeping replicas at {address}"))


@app.command(
    epilog="Examples:\n\n  lmstorfs doctor\n\n  lmstorfs doctor --store s3://bucket/prefix\n\n"
    "  lmstorfs doctor --mirror node2:7070 --secret-file /etc/lmstorfs.key"
)
def doctor(
    json: JsonOption = False,
    store: Annotated[
        str | None, typer.Option(metavar="URL", help="Also check that this store can be written.")
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="The S3 endpoint of that store.")
    ] = None,
    mirror: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Also check that this mirror answers.")
    ] = None,
    secret_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="What is shared with that mirror.")
    ] = None,
) -> None:
    """What this host can do, and what to do about what it cannot."""
    from lmstorfs import doctor as checks

    found = checks.examine(store, endpoint, mirror, secret_file)
    if json:
        console.show_json({"ok": checks.can_mount(found), "checks": found})
    else:
        console.output().print(console.findings(found))
    if not checks.can_mount(found):
        raise typer.Exit(1)


def main() -> None:
    """Run the command that `sys.argv` names, and exit with its code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a locale without `…` is no reason to fail
            stream.reconfigure(errors="backslashreplace")
    try:
        code = app(standalone_mode=False, prog_name="lmstorfs")
    except KeyboardInterrupt:
        code = INTERRUPTED
    except LmstorfsError as error:
        console.note(str(error))
        code = error.exit_code if isinstance(error, SetupError) else 1
    except BrokenPipeError:  # `lmstorfs status | head`
        _silence_stdout()
        code = 1
    except OSError as error:
        console.note(str(error))
        code = 1
    except Exception as error:  # noqa: BLE001 - the parser's errors share no public base
        code = _usage_exit(error)
    sys.exit(code if isinstance(code, int) else 0)


def _silence_stdout() -> None:
    """Keep the interpreter from flushing into the closed pipe as it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage_exit(error: Exception) -> int:
    """Tell of the parser's errors in one line as of all others; anything else is a bug."""
    format_message = getattr(error, "format_message", None)
    if format_message is None:
        raise error
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        console.show_help(format_message())
        return 2
    words = " ".join(format_message().split()).rstrip(".")
    where = getattr(context, "command_path", "lmstorfs")
    console.note(f"{words}; see {where} --help")
    return 2


if __name__ == "__main__":
    main()
