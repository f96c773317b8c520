"""``python -m shared_rpc.worker``: started by a broker, with one end of a socket pair."""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

from shared_rpc.errors import ConfigurationError, SharedRPCError, sendable
from shared_rpc.lifecycle.ending import end_within
from shared_rpc.observability.logs import configure
from shared_rpc.protocol.options import ServeOptions
from shared_rpc.provider.app import load_providers
from shared_rpc.provider.main_end import close_all
from shared_rpc.provider.runtime import set_host
from shared_rpc.settings import environment, program
from shared_rpc.worker.host import GRACE, WorkerHost
from shared_rpc.zygote.child import inherited
from shared_rpc.zygote.imports import changes_since, imported
from shared_rpc.zygote.process import die_with_parent


def _load(host: WorkerHost, words: argparse.Namespace, options: ServeOptions) -> None:
    before, folder = environment(), os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    providers = load_providers(words.target)
    variables = changes_since(before)
    # Inherited imports may depend on the variables. Not once the broker has a provider, which cannot be withdrawn.
    if words.forked and variables and not host.hosts:
        os.fchdir(folder)
        _begin_again(words.fd, inherited)
    os.close(folder)
    if options.socket is not None and len(providers) > 1:
        raise ConfigurationError(
            f"{words.target} has {len(providers)} providers for one --socket: name one with {words.target}:name"
        )
    for provider in providers:
        provider.run_in(host)
    sent = {sendable(name): value and sendable(value) for name, value in variables.items()}
    host.loaded(*imported(), sent)


def _begin_again(fd: int, variables: dict[str, str]) -> NoReturn:
    """Replace this fork by a new process with the same id, descriptors and parent."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.set_inheritable(fd, True)
    os.execve(sys.executable, program("shared_rpc.worker", *(word for word in sys.argv[1:] if word != "--forked")), variables)


def main() -> None:
    """Import the app, and serve until the broker hangs up; with ``--bare`` serve only copies and allocations."""
    parser = argparse.ArgumentParser(prog="python -m shared_rpc.worker")
    app = parser.add_mutually_exclusive_group(required=True)
    app.add_argument("target", nargs="?")
    app.add_argument("--bare", action="store_true", help="Load no app.")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, help="In a new process: the pid of the broker.")
    parser.add_argument("--number", type=int, default=0)
    parser.add_argument("--options", default="{}", help="ServeOptions as JSON.")
    parser.add_argument("--forked", action="store_true", help="In a fork, which has the app's imports.")
    words = parser.parse_args()
    if words.parent is not None:  # a fork ends with its watcher
        die_with_parent(words.parent)
    options = ServeOptions.of(words.options)
    if options.log_format is not None or options.log_level is not None:
        # The broker logs the events; this is for the app's own logging, with the ids of requests.
        configure(options.log_format or "text", options.log_level or "info", events=False)
    host = WorkerHost(words.fd, options, words.number)
    set_host(host)
    host.start()
    try:
        if not words.bare:
            _load(host, words, options)
        host.wait()
    except SharedRPCError as error:
        host.refuse(error)
    except BaseException:
        end_within(GRACE, 1)  # the app failed to load
        raise
    finally:
        close_all()
    host.leave(0)


if __name__ == "__main__":
    main()
