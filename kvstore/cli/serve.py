"""`kvstore serve`: the daemon in the foreground, until SIGTERM or SIGINT; SIGHUP reads the quotas again. No torch."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from allocator.errors import ConfigError, KVError
from kvstore import daemon as service  # its names load when they are used
from kvstore.cli import json_target
from kvstore.daemon.notify import NotifySocket, received
from kvstore.daemon.preflight import closed_directory, memory_problems, problems

_LONGEST_HOLD_SECONDS = 0.00002  # of Python's lock: a request must not wait for another one's 5 ms
_PR_SET_TIMERSLACK, _TIMER_SLACK_NANOSECONDS = 29, 1000  # who waits for that lock wakes 50 us late by default

_OPTIONS = {"socket_path": "socket"}  # others are called as their settings

_YOUNG_OBJECTS = 100
_M_ARENA_MAX, _M_MMAP_THRESHOLD = -8, -3


def serve(  # noqa: PLR0913 - the options of a command
    config: Annotated[
        Path | None, typer.Option(help="TOML with the tables [kvstore] and [daemon].", dir_okay=False)
    ] = None,
    socket_path: Annotated[str | None, typer.Option("--socket", metavar="PATH", help="Where clients connect.")] = None,
    host_bytes: Annotated[str | None, typer.Option(metavar="SIZE", help="Shared memory, e.g. '16 GiB'.")] = None,
    disk_path: Annotated[str | None, typer.Option(metavar="DIR", help="Directory of the disk tier.")] = None,
    disk_bytes: Annotated[str | None, typer.Option(metavar="SIZE", help="Budget of that directory.")] = None,
    redis_url: Annotated[str | None, typer.Option(metavar="URL", help="Redis or Valkey, shared by hosts.")] = None,
    allowed_uids: Annotated[
        str | None, typer.Option(metavar="UIDS", help="Users that may connect besides this one: '1000, 1001'.")
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(metavar="PORT|HOST:PORT", help="Serve page, metrics, admin calls; a port: loopback."),
    ] = None,
    keeper: Annotated[
        bool,
        typer.Option(
            "--keeper", help="Run it under a process that starts it again when it ends, with the same shared memory."
        ),
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Try the settings on this machine, start nothing.")] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the settings in force; - is standard output.")
    ] = None,
) -> None:
    """Own one cache for all processes of this host: shared memory, disk and remote tier.

    With --keeper, and under systemd with FileDescriptorStoreMax=, shared memory outlives a daemon that is restarted or
    killed. Settings come from --config, then the environment (KVSTORE_<KEY>, KVSTORE_DAEMON_<KEY>), then these flags.
    Exit codes: 0 stopped and all written down, 1 could not start or not all was written, 2 bad settings.
    """
    if json_file is not None and (problem := json_target.cannot_write(json_file)):
        raise typer.BadParameter(problem, param_hint="--json")
    flags = {
        "socket_path": socket_path,
        "host_bytes": host_bytes,
        "disk_path": disk_path,
        "disk_bytes": disk_bytes,
        "redis_url": redis_url,
        "allowed_uids": allowed_uids,
        "http": http,
    }
    try:
        settings = service.DaemonSettings.load(config, flags=flags)
    except ConfigError as error:
        print(f"kvstore serve: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if json_file is not None:
        json_target.write(json_file, settings.to_mapping())
    for warning in [] if keeper else _warnings(settings, check=check):
        print(f"kvstore serve: {warning}", file=sys.stderr)
    if check:
        found = problems(settings)
        for problem in found:
            print(f"kvstore serve: {problem}", file=sys.stderr)
        if json_file != "-" and not found:
            print(f"kvstore serve: settings are good; socket {settings.socket_path}")
        raise typer.Exit(2 if found else 0)
    if keeper:
        raise typer.Exit(_keep(settings, config, flags))
    raise typer.Exit(_run(settings, config, flags))


def _warnings(settings: service.DaemonSettings, *, check: bool) -> list[str]:
    """What is probably meant otherwise."""
    found = closed_directory(settings)
    asked = os.environ.get("KVSTORE_DAEMON_SOCKET", settings.socket_path)
    if asked != settings.socket_path:
        found.append(
            f"KVSTORE_DAEMON_SOCKET={asked} is where clients connect; this daemon listens on {settings.socket_path} "
            "(KVSTORE_DAEMON_SOCKET_PATH, --socket)"
        )
    return found if check else [*found, *memory_problems(settings)]


def _keep(settings: service.DaemonSettings, config: Path | None, flags: dict[str, Any]) -> int:
    from kvstore.daemon.keeper import Keeper

    command = [sys.executable, "-m", "kvstore.cli", "serve"]
    named = {"--config": config} | {f"--{_OPTIONS.get(name, name.replace('_', '-'))}": flags[name] for name in flags}
    for option, value in named.items():
        command += [] if value is None else [option, str(value)]
    try:
        return Keeper(settings, command).run()
    except KVError as error:
        print(f"kvstore serve: {error}", file=sys.stderr)
        return 1


def _steady_heap() -> None:
    """glibc gives threads heaps of their own and keeps what each once needed; a thread a client makes many. Few heaps,
    and what is large beside them, so that it is given back."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 2)
        mallopt(_M_MMAP_THRESHOLD, 64 << 10)


def _short_pauses() -> None:
    """Python's collector stops every thread: for 0.1 s when it looks at a large arena's copies, and for longer than
    a lookup takes at what a flood has made. The daemon's own objects go by their reference counts, so old ones are
    never looked at, and young ones in small portions: those of the HTTP side."""
    gc.set_threshold(_YOUNG_OBJECTS, 5, 1 << 30)


def _all_descriptors() -> None:
    """As many as this process may have. Two a client and two a segment are soon more than the usual 1,024, which is
    for select(): nothing here uses it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _run(settings: service.DaemonSettings, config: Path | None, flags: dict[str, Any]) -> int:
    found = received(os.environ)
    notify = NotifySocket.from_environ(os.environ)
    sys.setswitchinterval(_LONGEST_HOLD_SECONDS)
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_TIMER_SLACK_NANOSECONDS), 0, 0, 0)
    _steady_heap()
    _short_pauses()
    _all_descriptors()
    logging.basicConfig(format="%(message)s")  # to standard error: what goes wrong,
    logging.getLogger(service.__name__).setLevel(logging.INFO)  # and what operators do
    stop = threading.Event()
    reload = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    signal.signal(signal.SIGHUP, lambda *_: reload.set())
    with ExitStack() as running:
        try:
            daemon = service.Daemon(settings, notify=notify, found=found)
            running.callback(daemon.stop)
            daemon.start()
            url = _serve_http(daemon, lambda: _reload(daemon, config, flags), running) if settings.http else ""
        except KVError as error:
            print(f"kvstore serve: {error}", file=sys.stderr)
            return 1
        _say_what_was_taken_over(daemon)
        print(f"kvstore serve: ready on {settings.socket_path}{url and f', {url}'}", flush=True)
        _tell(notify, "READY=1")
        while not stop.wait(0.2):
            if reload.is_set():
                reload.clear()
                try:
                    _reload(daemon, config, flags)
                    print("kvstore serve: quotas were read again (SIGHUP)", file=sys.stderr, flush=True)
                except ConfigError as error:
                    print(f"kvstore serve: settings not read again: {error}", file=sys.stderr)
        _tell(notify, "STOPPING=1")
        drained = daemon.stop()
    if not drained:
        print("kvstore serve: stopped before all copies were written down", file=sys.stderr)
    return 0 if drained else 1


def _reload(daemon: service.Daemon, config: Path | None, flags: dict[str, Any]) -> None:
    daemon.admin.reload(service.DaemonSettings.load(config, flags=flags).tenant_quotas)


def _serve_http(daemon: service.Daemon, reload: Callable[[], None], running: ExitStack) -> str:
    """Where the page is. It goes on while the daemon drains, so that people see that."""
    from kvstore.daemon.http_server import HttpServer

    server = HttpServer(daemon, reload)
    running.callback(server.close)
    return server.url


def _say_what_was_taken_over(daemon: service.Daemon) -> None:
    report = daemon.stats()["handover"]
    if report is None:
        return
    if report["refused"]:
        print(f"kvstore serve: the shared memory that was kept is not ours ({report['refused']}): dropped", flush=True)
    elif report["segments"] or report["dropped"]:
        lost = ", ".join(f"{count} {cause}" for cause, count in report["dropped"].items())
        print(
            f"kvstore serve: took over {report['copies']} copies ({report['copy_bytes']} bytes) in "
            f"{report['segments']} segments in {report['seconds']:.3f} s{lost and f'; not taken: {lost}'}",
            flush=True,
        )


def _tell(notify: NotifySocket | None, message: str) -> None:
    if notify is not None and not notify.tell(message):
        print(f"kvstore serve: the service manager was not told {message}", file=sys.stderr)
