"""``python -m shared_rpc.broker``: the process of ``shared-rpc serve``, without the modules of the command line."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import select
import sys
from concurrent.futures import CancelledError
from contextlib import suppress

from shared_rpc.broker.broker import Broker
from shared_rpc.broker.supervisor import WORKERS
from shared_rpc.broker.systemd import inherit
from shared_rpc.broker.worker import WorkerCommand
from shared_rpc.client.starting import LISTENING, daemonize
from shared_rpc.errors import ConfigurationError, ConnectionClosed, SharedRPCError, WorkerCrashed
from shared_rpc.lifecycle.signals import End, wait_for_signal
from shared_rpc.memory.spill import SpillDirectory
from shared_rpc.observability.events import HookFactory, add_hook
from shared_rpc.observability.logs import configure
from shared_rpc.observability.stderr import LogHandler
from shared_rpc.protocol.infos import ReloadInfo
from shared_rpc.protocol.options import ServeOptions
from shared_rpc.server.measures import SERVERS
from shared_rpc.settings import take_service_variables


def main() -> int:
    """Serve an app until SIGINT or SIGTERM; SIGHUP reloads its code."""
    logging.lastResort = LogHandler(logging.WARNING)
    words = _parser().parse_args()
    report = daemonize(words.detach, words.report) if words.detach is not None else None
    asked = End()

    def end(why: str) -> None:
        asked.set()
        _print_line(f"shared-rpc: {why}: ends")

    try:
        options = ServeOptions.of(words.options)
        command = WorkerCommand(words.target, options)
        if options.log_format is not None or options.log_level is not None:
            configure(options.log_format or "text", options.log_level or "info", LogHandler())
        for name in options.hooks:
            _add_hook(name, command.folder)
        exporter = None
        if options.metrics_port is not None:  # before the app is loaded: fail early if the metrics port is taken
            from shared_rpc.observability.exporter import Exporter

            exporter = Exporter((*SERVERS, *WORKERS), options.metrics_port, options.metrics_host, "--metrics-port")
        spill = SpillDirectory(options.spill_dir) if options.spill_dir is not None else None
        inherited = inherit(take_service_variables())
    except SharedRPCError as error:
        print(f"shared-rpc: {error}", file=sys.stderr)
        return 1
    broker = Broker(command, on_end=end, inherited=inherited, exporter=exporter, spill=spill)

    def begin() -> Broker:
        broker.start(asked.wait)
        for path, names in broker.served().items():
            print(f"serving {', '.join(names) or 'no endpoints'} at {path}", flush=True)
        if report is not None:
            report(LISTENING)
        if exporter is not None:
            print(f"metrics at {exporter.url}", flush=True)
        return broker

    try:
        wait_for_signal(begin, lambda: _reload(broker), asked, broker.stop, last=True)
    except WorkerCrashed as crash:
        if crash.exit_code is None or not crash.stderr:  # otherwise its traceback has been printed
            print(f"shared-rpc: {crash}", file=sys.stderr)
        return 1
    except ConnectionClosed:  # a signal stopped the broker while the app was being loaded
        return 0
    except SharedRPCError as error:
        print(f"shared-rpc: {error}", file=sys.stderr)
        return 1
    return int(broker.failed)


def _print_line(text: str) -> None:
    """Write a line to standard output if it fits: its reader may have ended or stopped reading."""
    with suppress(OSError):
        if select.select([], [1], [], 0)[1]:
            os.write(1, f"{text}\n".encode())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m shared_rpc.broker")
    parser.add_argument("target")
    parser.add_argument("--options", default="{}", help="ServeOptions as JSON.")
    parser.add_argument("--detach", type=int, help="Descriptor of a lock to keep.")
    parser.add_argument("--report", type=int, help="With --detach: a pipe, see shared_rpc.client.starting.")
    return parser


def _add_hook(name: str, folder: str) -> None:
    """Import a hook, ``package.module:name``, which may be in the app's folder.

    :raises ConfigurationError: if it does not exist.
    """
    module, _, attribute = name.partition(":")
    try:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            sys.path.append(folder)
        hook = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise ConfigurationError(f"--hook {name}: cannot import it as package.module:name: {problem}") from error
    if not callable(hook) and not isinstance(hook, HookFactory):
        raise ConfigurationError(f"--hook {name}: a {type(hook).__name__} is neither a function nor a HookFactory")
    add_hook(hook)


def _reload(broker: Broker) -> None:
    try:
        info = broker.reload()
    except (SharedRPCError, RuntimeError, CancelledError) as error:  # the latter two if the broker ends during it
        print(f"shared-rpc: not reloaded: {error}", file=sys.stderr, flush=True)
    else:
        for line in lines_of(info):
            print(line, flush=True)


def lines_of(info: ReloadInfo) -> list[str]:
    """Describe the changes of a reload, for display."""
    return [
        f"reloaded {path}: {', '.join(service['changed']) or 'no endpoint'} changed, {service['dropped']} objects dropped"
        for path, service in info["services"].items()
    ]


if __name__ == "__main__":
    sys.exit(main())
