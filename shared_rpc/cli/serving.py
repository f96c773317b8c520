"""The commands that start, reload and stop processes: ``serve``, ``run``, ``reload`` and ``stop``."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shared_rpc import Client
from shared_rpc.cli.configuration import read_options
from shared_rpc.cli.discovery import live_servers, the_server
from shared_rpc.cli.options import BasePath, Json, Misuse, Socket, amount_of, as_misuse, in_bytes, quotas_of
from shared_rpc.cli.rendering import as_json, complain, several, size
from shared_rpc.errors import ConfigurationError, SharedRPCError
from shared_rpc.memory.devices import check_name
from shared_rpc.memory.spill import SpillDirectory
from shared_rpc.observability.logs import LogFormat, LogLevel, configure
from shared_rpc.protocol.infos import StopInfo
from shared_rpc.scripts.listing import stop_zygotes
from shared_rpc.settings import CLUSTER_NAME, ClientCode, ServeOptions, checked_path, program

if TYPE_CHECKING:
    from shared_rpc.provider.provider import Provider
    from shared_rpc.provider.runtime import Runtime
    from shared_rpc.server.server import Server

_DEFAULTS = ServeOptions()


def _panel(name: str) -> Callable[..., Any]:
    """Return a function that makes the options of a group in the help of ``serve``."""

    def option(text: str, metavar: str | None = None, *, flag: str | None = None, **limits: Any) -> Any:
        return typer.Option(*filter(None, [flag]), metavar=metavar, help=text, rich_help_panel=name, **limits)

    return option


_worker, _memory, _clients = _panel("Workers"), _panel("Memory"), _panel("Tasks and clients")
_cluster, _observability = _panel("Cluster"), _panel("Observability")


def serve(
    target: Annotated[str, typer.Argument(help="app.py, package.module, or either with :provider")],
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            callback=read_options,
            help="Options in TOML: of the table tool.shared-rpc if it is a pyproject.toml, of the top level if not. "
            "By default the pyproject.toml nearest to app.py, if it is this user's or root's.",
        ),
    ] = None,
    base_path: Annotated[
        str | None, typer.Option(metavar="PATH", help="Prefix of the socket's path; SHARED_TENSOR_BASE_PATH by default.")
    ] = None,
    socket: Annotated[str | None, typer.Option(metavar="PATH", help="Listen at this path.")] = None,
    device: Annotated[str | None, _worker("auto, cpu, cuda or cuda:<index>; the provider's own by default.")] = None,
    workers: Annotated[int, _worker("Processes that run endpoints.", min=1)] = _DEFAULTS.workers,
    worker_device: Annotated[list[str] | None, _worker("The device of each worker in turn; repeat it for each GPU.")] = None,
    threads: Annotated[int | None, _worker("Threads of a worker that run endpoints.", min=1)] = None,
    build_timeout: Annotated[
        float | None,
        _worker("Time limit of a run, after which its worker is killed; no limit by default.", "SECONDS", min=0.001),
    ] = None,
    no_preload: Annotated[
        bool,
        _worker(
            "Start each worker as a new process, not by forking one that has imported the app's packages.", flag="--no-preload"
        ),
    ] = False,
    in_process: Annotated[bool, _worker("Run the endpoints in this process, without workers.", flag="--in-process")] = False,
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
    pool_initial: Annotated[str | None, _memory("Initial size of a session's pool for results: 4M by default.", "SIZE")] = None,
    pool_limit: Annotated[str | None, _memory("Maximum size of the pool: 256M by default; 0 disables pools.", "SIZE")] = None,
    max_tasks: Annotated[int, _clients("Tasks that may be pending or running.", min=1)] = _DEFAULTS.max_tasks,
    result_ttl: Annotated[
        float, _clients("How long a finished task and its result are kept.", "SECONDS", min=0)
    ] = _DEFAULTS.result_ttl,
    max_connections: Annotated[
        int, _clients("Further connections are refused with ServerBusy.", min=1)
    ] = _DEFAULTS.max_connections,
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
        _cluster("Share objects with the servers of this name on the hosts of a cluster; needs the extra 'ray'.", "NAME"),
    ] = None,
    cluster_program: Annotated[
        str | None, _cluster("Start this program instead, which answers the server's misses.", "COMMAND")
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

    Every option can stand in the table tool.shared-rpc of a pyproject.toml, or in the file of --config, by its long name: quota
    = ["cuda:0=0.8"], in-process = true. The command line takes precedence over the file.
    """
    # The app has its role while it is loaded, as with 'SHARED_TENSOR_ROLE=server python app.py'.
    os.environ["SHARED_TENSOR_ROLE"] = "server"
    os.environ.pop("SHARED_TENSOR_ENABLED", None)
    # A malformed amount is an error before anything starts, and so is an unusable directory.
    with as_misuse():
        for path in (base_path, socket):
            if path is not None:
                checked_path(path)
        quotas = quotas_of(quota or ())
    if not quotas and when_full == "evict":
        raise Misuse(
            "--when-full evict needs a --quota DEVICE=AMOUNT: without one no device is full before its driver refuses memory"
        )
    if spill_dir is not None:
        SpillDirectory(spill_dir)
    if in_process:
        if hook:
            raise Misuse("--in-process loads the app into the server: have the app call add_hook, and leave out --hook")
        if workers != 1 or worker_device or build_timeout is not None:
            raise Misuse("--in-process has no workers: leave out --workers, --worker-device and --build-timeout")
        if no_preload:
            raise Misuse("--in-process and --no-preload contradict each other: there are no workers to be forked")
        if idle_exit is not None:
            raise Misuse("--in-process and --idle-exit contradict each other: only a broker ends by itself")
        if log_format is not None or log_level is not None:
            configure(log_format or LogFormat.TEXT, log_level or LogLevel.INFO)
    if device is not None and worker_device:
        raise Misuse("--device and --worker-device both name devices: use one of them")
    if cluster and cluster_program is not None:
        raise Misuse("--cluster and --cluster-program contradict each other: use one of them")
    if cluster and not CLUSTER_NAME.fullmatch(cluster):
        raise Misuse(f"--cluster {cluster}: a cluster's name has letters, digits, '.', '_' and '-' only")
    # A path: a bare word would be the name of a cluster.
    joined = cluster or (shutil.which(cluster_program) or cluster_program if cluster_program is not None else None)
    if joined:
        from shared_rpc.server.joiner import check_cluster  # it imports asyncio

        check_cluster(joined)
    devices = tuple(worker_device or ([device] if device is not None else []))
    with as_misuse():
        for name in devices:
            check_name(name)
        options = ServeOptions(
            base_path=base_path,
            socket=socket,
            devices=devices,
            workers=max(workers, len(devices)),
            threads=threads,
            build_timeout=build_timeout,
            preload=not no_preload,
            max_bytes=in_bytes(f"--max-bytes {max_bytes}", max_bytes) if max_bytes is not None else None,
            quotas=quotas,
            spill_dir=os.path.abspath(spill_dir) if spill_dir is not None else None,
            when_full=when_full,
            host_quota=amount_of(f"--host-quota {host_quota}", host_quota) if host_quota is not None else None,
            max_tasks=max_tasks,
            result_ttl=result_ttl,
            max_connections=max_connections,
            pool_initial=in_bytes(f"--pool-initial {pool_initial}", pool_initial) if pool_initial is not None else None,
            pool_limit=in_bytes(f"--pool-limit {pool_limit}", pool_limit) if pool_limit is not None else None,
            cluster=joined,
            source_grace=source_grace,
            client_code=client_code,
            idle_exit=idle_exit,
            metrics_port=metrics_port,
            metrics_host=metrics_host,
            log_format=log_format,
            log_level=log_level,
            hooks=tuple(hook or ()),
        )
    if in_process:
        _serve_in_process(target, options)
        return
    # The broker replaces this process: it runs for long, and needs none of the modules for parsing and printing here.
    sys.stdout.flush()
    os.execv(sys.executable, program("shared_rpc.broker", target, *options.words))


def _serve_in_process(target: str, options: ServeOptions) -> None:
    from shared_rpc.lifecycle.signals import wait_for_signal
    from shared_rpc.provider.app import load_providers
    from shared_rpc.provider.main_end import close_all, end_now_if_busy
    from shared_rpc.provider.runtime import set_host

    host = _InProcessHost(options)
    set_host(host)

    def begin() -> list[Server]:
        for provider in providers:
            provider.run_in(host)
        for server in host.servers.values():
            print(f"serving {', '.join(server.info()['endpoints']) or 'no endpoints'} at {server.socket_path}", flush=True)
            if server.metrics_url is not None:
                print(f"metrics at {server.metrics_url}", flush=True)
        return list(host.servers.values())

    try:
        providers = load_providers(target)
        if options.socket is not None and len(providers) > 1:
            raise ConfigurationError(f"{target} has {len(providers)} providers for one --socket: name one with {target}:name")
        if options.metrics_port is not None and len(providers) > 1:
            raise ConfigurationError(
                f"{target} has {len(providers)} providers for one --metrics-port: name one with {target}:name, or leave out "
                f"--in-process"
            )
        wait_for_signal(begin, last=True)
    finally:
        # An unnamed provider must not begin to serve when this command ends, as it would at a script's end.
        close_all()
    end_now_if_busy(host.servers.values())


class _InProcessHost:
    """The servers of providers, each started on its first call, which may occur while the app is loaded."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self.servers: dict[Provider, Server] = {}

    def adopt(self, provider: Provider) -> Runtime:
        """Start a provider's server, unless it runs, and return the provider's runtime."""
        from shared_rpc.provider.app import override
        from shared_rpc.provider.runtime import ServerRuntime
        from shared_rpc.server.server import Server

        if provider not in self.servers:
            override(provider, self._options, 0)
            self.servers[provider] = Server.of(provider, self._options).start()
        return ServerRuntime(self.servers[provider])


def reload(
    socket: Socket = None,
    base_path: BasePath = None,
    keep_objects: Annotated[bool, typer.Option("--keep-objects", help="Keep cached objects of the old code.")] = False,
    drop_objects: Annotated[bool, typer.Option("--drop-objects", help="Drop all cached objects without leases.")] = False,
    json: Json = False,
) -> None:
    """Restart a server's workers with the app's new code; the old workers serve until the new ones are ready.

    By default the cached objects of changed endpoints are dropped; clients keep those they hold.
    """
    if keep_objects and drop_objects:
        raise Misuse("--keep-objects and --drop-objects contradict each other: use one of them")
    objects: Literal["changed", "all", "none"] = "none" if keep_objects else "all" if drop_objects else "changed"
    with the_server(socket, base_path) as client:
        facts = client.reload(objects)
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
        with live_servers(base_path) as clients:
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
        typer.Option(
            "--idle-exit",
            metavar="SECONDS",
            min=0,
            help="Lifetime of the zygote without another script; 1800 by default.",
        ),
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
