"""``python -m shared_rpc.zygote``: started by a program with one end of a socket pair, or to listen; and forked for others."""

from __future__ import annotations

import argparse
import os
import resource
import socket
import sys
from contextlib import suppress

from shared_rpc.client.starting import LISTENING
from shared_rpc.errors import ConfigurationError
from shared_rpc.zygote.child import set_title
from shared_rpc.zygote.installed import is_installed
from shared_rpc.zygote.messages import Preload, Unfit, request_of
from shared_rpc.zygote.process import die_with_parent
from shared_rpc.zygote.serving import Born, Zygote


def main() -> Born | None:
    """Serve until the other side hangs up, or nobody has asked for long enough. Returns in every fork; and None at the end."""
    parser = argparse.ArgumentParser(prog="python -m shared_rpc.zygote")
    parser.add_argument("--fd", type=int, help="One end of a socket pair.")
    parser.add_argument("--parent", type=int, help="Pid of the process with which the zygote ends.")
    parser.add_argument("--listen", metavar="PATH", help="Serve every process of this user, detached.")
    parser.add_argument("--preload", help="For --listen: the message of that name, as JSON.")
    parser.add_argument("--idle-exit", type=float, default=0.0, help="For --listen: seconds without a request.")
    parser.add_argument("--lock", type=int, help="For --listen: the descriptor of a lock to keep.")
    parser.add_argument("--report", type=int, help="For --listen: a pipe, for 'listening' or the reason why not.")
    parser.add_argument("--stay", action="store_true", help="For --listen: keep the working directory.")
    parser.add_argument("room", nargs="?", help="Padding, for the command lines of forks.")
    options = parser.parse_args()
    if options.parent is not None:
        die_with_parent(options.parent)
    if options.listen is None:
        set_title([sys.executable, "-m", "shared_rpc.zygote"])
        connection = socket.socket(fileno=options.fd)
        connection.set_inheritable(False)
        return Zygote(sys.path[:], connection).serve()
    return _listen(options)


def _listen(options: argparse.Namespace) -> Born | None:
    if os.fork():  # before the imports, which could prevent a fork
        os._exit(0)
    os.setsid()
    if not options.stay:
        os.chdir("/")
    preload = request_of(options.preload)
    assert isinstance(preload, Preload), "--preload is a Preload"
    set_title([sys.executable, "-m", "shared_rpc.zygote", options.listen, *preload.needed])
    for fd in (options.lock, options.report):
        os.set_inheritable(fd, False)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    preload.folders = [entry for entry in sys.path if not is_installed(entry)]
    zygote = Zygote(sys.path[:])
    answer = zygote.prepare(preload)
    outcome = LISTENING
    if isinstance(answer, Unfit):
        outcome = f"a zygote that has imported {', '.join(preload.needed)} cannot be forked: {answer.why}"
    else:
        try:
            zygote.listen(options.listen, options.lock, preload.needed, options.idle_exit)
        except ConfigurationError as error:
            outcome = str(error)
    with suppress(BrokenPipeError):  # the process that started the zygote has not waited
        os.write(options.report, f"{os.getpid()}\n{outcome}".encode(errors="replace"))
    os.close(options.report)
    return zygote.serve()


def run() -> None:
    """Be a zygote; in each fork run its program, to the end of the process."""
    born = main()
    if born is None:
        os._exit(0)  # exit callbacks of the imports are for the forks
    born.run()


if __name__ == "__main__":
    run()
