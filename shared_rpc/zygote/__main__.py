"""``python -m shared_rpc.zygote``: started by a broker with one end of a socket pair, or as a listener."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Callable
from typing import NoReturn

from shared_rpc.client.starting import LISTENING, daemonize
from shared_rpc.errors import ConfigurationError
from shared_rpc.zygote.child import set_title
from shared_rpc.zygote.imports import Unfit
from shared_rpc.zygote.process import die_with_parent
from shared_rpc.zygote.serving import Control, Listener, Zygote
from shared_rpc.zygote.wire import framed, receive, send


def main() -> Callable[[], NoReturn] | None:
    """Serve until no more clients can connect. Returns the program in each requested process, and None at the end."""
    parser = argparse.ArgumentParser(prog="python -m shared_rpc.zygote")
    parser.add_argument("--fd", type=int, help="One end of a socket pair.")
    parser.add_argument("--parent", type=int, help="Pid of the process with which the zygote ends.")
    parser.add_argument("--listen", metavar="PATH", help="Serve every process of this user, detached.")
    parser.add_argument("--preload", type=json.loads, help="For --listen: modules that must be imported, and all, as JSON.")
    parser.add_argument("--idle-exit", type=float, default=0.0, help="For --listen: seconds without a request.")
    parser.add_argument("--detach", type=int, help="For --listen: the descriptor of a lock to keep.")
    parser.add_argument("--report", type=int, help="For --listen: a pipe, see shared_rpc.client.starting.")
    parser.add_argument("--stay", action="store_true", help="For --listen: keep the working directory.")
    parser.add_argument("padding", nargs="?", help="Padding, for the command lines of forks.")
    options = parser.parse_args()
    if options.listen is not None:
        return _listen(options)
    die_with_parent(options.parent)
    set_title([sys.executable, "-m", "shared_rpc.zygote"])
    control = socket.socket(fileno=options.fd)
    control.set_inheritable(False)
    zygote, request = Zygote(), receive(control)[0]
    try:
        answer = zygote.prepare(request["modules"], request.get("own", ()))
    except Unfit as unfit:
        send(control, framed({"type": "Unfit", "why": str(unfit), "module": unfit.module}))
        return None
    send(control, framed(answer))
    return zygote.serve(Control(control))


def _listen(options: argparse.Namespace) -> Callable[[], NoReturn] | None:
    report = daemonize(options.detach, options.report)  # before the imports, which could prevent a fork
    if not options.stay:
        os.chdir("/")
    needed, modules = options.preload
    set_title([sys.executable, "-m", "shared_rpc.zygote", options.listen, *needed])
    zygote = Zygote()
    try:
        zygote.prepare(modules, needed=needed)
        listener = Listener(options.listen, options.detach, needed, options.idle_exit)
    except Unfit as unfit:
        report(f"a zygote that has imported {', '.join(needed)} cannot be forked: {unfit}")
        return None
    except ConfigurationError as error:
        report(str(error))
        return None
    report(LISTENING)
    return zygote.serve(listener)


def run() -> None:
    """Run a zygote; in each requested process run its program, to the end of the process."""
    program = main()
    if program is None:
        os._exit(0)  # exit callbacks of the imports are for the forks
    program()


if __name__ == "__main__":
    run()
