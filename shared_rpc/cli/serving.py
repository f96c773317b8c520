"""The commands that start, reload and stop processes: ``serve``, ``run``, ``reload`` and ``stop``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, Literal

import typer

from shared_rpc import Client
from shared_rpc.cli.discovery import live_servers, the_server
from shared_rpc.cli.options import BasePath, Json, Misuse, Socket, amount_of, as_misuse, in_bytes, quotas_of
from shared_rpc.cli.rendering import as_json, complain, several, size
from shared_rpc.errors import SharedRPCError
from shared_rpc.memory.devices import check_name
from shared_rpc.observability.logs import LogFormat, LogLevel
from shared_rpc.protocol.infos import StopInfo
from shared_rpc.protocol.options import ClientCode, ServeOptions, check_when_full
from shared_rpc.scripts.listing import stop_zygotes
from shared_rpc.settings import checked_path, program

_DEFAULTS = ServeOptions()


def _panel(name: str) -> Callable[..., Any]:
    """Return a function that makes the options of a group in the help of ``serve``."""

    def option(text: str, metavar: str | None = None, **limits: Any) -> Any:
        return typer.Option(metavar=metavar, help=text, rich_help_panel=name, **limits)

    return option


_worker, _memory, _clients = _panel("Workers"), _panel("Memory"), _panel("Tasks and clients")
_cluster, _observability = _panel("Cluster"), _panel("Observability")


def serve(
    target: Annotated[str, typer.Argument(help="app.py, package.module, or either with :provider")],
    base_path: Annotated[
        str | None, typer.Option(metavar="PATH", help="Prefix of the socket's path; SHARED_TENSOR_BASE_PATH by default.")
    ] = None,
    socket: Annotated[str | None, typer.Option(metavar="PATH", help="Listen at this path.")] = None,
    device: Annotated[
        list[str] | None,
        _worker("auto, cpu, cuda or cuda:<index>; the provider's own by default. Repeat it to give each worker a GPU in turn."),
    ] = None,
    workers: Annotated[int, _worker("Processes that run endpoints.", min=1)] = _DEFAULTS.workers,
    threads: Annotated[int | None, _worker("Threads of a worker that run endpoints.", min=1)] = None,
    build_timeout: Annotated[
        float | None,
        _worker("Time limit of a run, after which its worker is killed; no limit by default.", "SECONDS", min=0.001),
    ] = None,
    preload: Annotated[bool, _worker("Fork workers from a process that has imported the app's packages.")] = _DEFAULTS.preload,
    max_bytes: Annotated[
        str | None,
        _memory("Memory of objects without leases; the least recently used are dropped first. No limit by default.", "SIZE"),
    ] = None,
    quota: Annotated[
        list[str] | None,
        _memory("Memory of all objects and buffers on a device: cuda:0=0.8, or cpu=8GiB. May be repeated.", "DEVICE=AMOUNT"),
    ] = None,
    when_full: Annotated[
        Literal["evict", "refuse"],
        _memory("What to do with a request that exceeds a quota: refuse it, or evict unused objects while it waits."),
    ] = _DEFAULTS.when_full,
    host_quota: Annotated[
        str | None, _memory("Memory of host copies of evicted objects. No limit by default.", "AMOUNT")
    ] = None,
    spill_dir: Annotated[
        str | None, _memory("Directory for unnamed files with evicted objects; none by default.", "DIRECTORY")
    ] = None,
    max_tasks: Annotated[int, _clients("Tasks that may be pending or running.", min=1)] = _DEFAULTS.max_tasks,
    result_ttl: Annotated[
        float, _clients("How long a finished task and its result are kept.", "SECONDS", min=0)
    ] = _DEFAULTS.result_ttl,
    client_code: Annotated[
        ClientCode,
        _clients(
            "Which clients may send modules and records, whose code runs in workers and in other clients: all, those in "
            "the server's own pid namespace, or none."
        ),
    ] = _DEFAULTS.client_code,
    idle_exit: Annotated[
        float | None,
        _clients("Exit after this time without a client, lease, task or call; never by default.", "SECONDS", min=0.001),
    ] = None,
    cluster: Annotated[
        str | None,
        _cluster(
            "Share objects with the servers of this name on the hosts of a cluster, which needs the extra 'ray'; or the command"
            " line, with a slash or a space, of a program that answers the server's misses.",
            "NAME|COMMAND",
        ),
    ] = None,
    source_grace: Annotated[
        float,
        _cluster("How long calls wait for a cluster that does not answer, before they are built here.", "SECONDS", min=0),
    ] = _DEFAULTS.source_grace,
    metrics_port: Annotated[
        int | None,
        _observability("Serve metrics for Prometheus there, 0 for any free port; needs the extra 'metrics'.", min=0, max=65535),
    ] = None,
    metrics_host: Annotated[
        str, _observability("Address of the metrics port; 0.0.0.0 for other hosts.", "ADDRESS")
    ] = _DEFAULTS.metrics_host,
    log_format: Annotated[LogFormat | None, _observability("Log to standard error, one line for each event.")] = None,
    log_level: Annotated[
        LogLevel | None, _observability("Minimum level of the log: info with --log-format, else warning, by default.")
    ] = None,
    hook: Annotated[
        list[str] | None,
        _observability("A function that the server imports and calls with every event. May be repeated.", "MODULE:NAME"),
    ] = None,
) -> None:
    """Serve the providers of an app until SIGINT or SIGTERM; SIGHUP reloads its code.

    Endpoints run in worker processes, and their results outlive the workers.

    A SIZE is a number of bytes, or a number with K, M, G or T (powers of 1024): 512M, 1.5GiB. An AMOUNT is a size, or a
    fraction of the device's memory, written with a point, up to 1.0.
    """
    # The app has its role while it is loaded, as with 'SHARED_TENSOR_ROLE=server python app.py'.
    os.environ["SHARED_TENSOR_ROLE"] = "server"
    os.environ.pop("SHARED_TENSOR_ENABLED", None)
    # An invalid value is an error before anything starts.
    with as_misuse():
        for path in filter(None, (base_path, socket)):
            checked_path(path)
        for name in device or ():
            check_name(name)
        quotas = quotas_of(quota or ())
        check_when_full(when_full, quotas)
        options = ServeOptions(
            base_path=base_path,
            socket=socket,
            devices=tuple(device or ()),
            workers=max(workers, len(device or ())),
            threads=threads,
            build_timeout=build_timeout,
            preload=preload,
            max_bytes=in_bytes(f"--max-bytes {max_bytes}", max_bytes) if max_bytes is not None else None,
            quotas=quotas,
            spill_dir=os.path.abspath(spill_dir) if spill_dir else spill_dir,
            when_full=when_full,
            host_quota=amount_of(f"--host-quota {host_quota}", host_quota) if host_quota is not None else None,
            max_tasks=max_tasks,
            result_ttl=result_ttl,
            cluster=cluster,
            source_grace=source_grace,
            client_code=client_code,
            idle_exit=idle_exit,
            metrics_port=metrics_port,
            metrics_host=metrics_host,
            log_format=log_format,
            log_level=log_level,
            hooks=tuple(hook or ()),
        )
    # The broker replaces this process: it runs for long, and needs none of the modules for parsing and printing here.
    sys.stdout.flush()
    os.execv(sys.executable, program("shared_rpc.broker", target, *options.words))


def reload(
    socket: Socket = None,
    base_path: BasePath = None,
    drop: Annotated[
        Literal["changed", "all", "none"], typer.Option(help="The cached objects to drop: those of changed endpoints, or all.")
    ] = "changed",
    json: Json = False,
) -> None:
    """Restart a server's workers with the app's new code; the old workers serve until the new ones are ready.

    Clients keep the objects that they hold.
    """
    with the_server(socket, base_path) as client:
        facts = client.reload(drop)
    if json:
        as_json(facts)
        return
    from shared_rpc.broker.__main__ import lines_of

    print("\n".join(lines_of(facts)))


def stop(
    socket: Socket = None,
    base_path: BasePath = None,
    every: Annotated[bool, typer.Option("--all", help="All live servers of this user, and all zygotes.")] = False,
    if_idle: Annotated[
        bool, typer.Option("--if-idle", help="Only if no other client has a connection, a lease or a task.")
    ] = False,
    json: Json = False,
) -> None:
    """Stop a server, wait until it has exited, and print what it held. Clients keep their memory."""
    if every and socket is not None:
        raise Misuse("--all and --socket contradict each other: use one of them")
    ended: list[StopInfo | dict[str, Any]] = []
    failed = False

    def passed_over(why: str) -> None:
        nonlocal failed
        failed = True
        complain(why)

    if every:
        with live_servers(base_path, passed_over) as clients:
            # A server with several sockets ends as a whole.
            for client in {client.get_server_info()["pid"]: client for client in clients}.values():
                try:
                    ended.append(_stop(client, if_idle, json))
                except SharedRPCError as error:
                    passed_over(f"{client.socket_path}: {error}")
        for zygote in stop_zygotes(base_path, passed_over):
            ended.append(zygote)
            if not json:
                print(f"stopped the zygote at {zygote['socket_path']} (pid {zygote['pid']})")
    else:
        with the_server(socket, base_path) as client:
            ended.append(_stop(client, if_idle, json))
    if json:
        as_json(ended)
    elif not ended and not failed:
        print("no server is alive")
    if failed:
        raise typer.Exit(1)


def _stop(client: Client, if_idle: bool, quiet: bool) -> StopInfo:
    held = client.stop_server(if_idle)
    if not quiet:
        counts = {"client": held["clients"], "lease": held["leases"], "task": held["tasks"]}
        used = [several(count, name) for name, count in counts.items() if count]
        print(
            f"stopped pid {held['pid']} at {', '.join(held['socket_paths'])}: it held {several(held['objects'], 'object')}, "
            f"{size(held['nbytes'])}; used by others: {', '.join(used) or 'nothing'}"
        )
    return held


def run(
    words: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [ARGUMENTS]", help="A script, a directory or an archive; with -m a module.")
    ],
    module: Annotated[bool, typer.Option("-m", help="Run a module, as 'python -m' does.")] = False,
    preload: Annotated[
        list[str] | None,
        typer.Option("--preload", metavar="NAME", help="Import this installed package in the zygote; may be repeated."),
    ] = None,
    idle_exit: Annotated[
        float | None,
        typer.Option("--idle-exit", metavar="SECONDS", min=0, help="Lifetime of a zygote without scripts; 1800 by default."),
    ] = None,
) -> None:
    """Run a script as python does, without the time to import torch.

    Options precede the script; what follows it are its arguments. The exit code, or the signal that ended it, is the script's.

    The script is a fork of a process, the zygote, that has imported torch, numpy and this library. The first script starts the
    zygote, 'shared-rpc ls' lists it, and 'shared-rpc stop --all' ends it. If a fork would not behave like 'python script.py',
    python itself runs the script, and a line on standard error gives the reason.
    """
    from shared_rpc.scripts.command import Script, launch

    launch(Script(words[0], tuple(words[1:]), module, tuple(preload or ()), idle_exit))
