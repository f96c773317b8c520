"""``python -m shared_rpc.zygote``: started by a program with one end of a socket pair, and forked for it."""

from __future__ import annotations

import argparse
import os
import socket
import sys

from shared_rpc.zygote.process import die_with_parent
from shared_rpc.zygote.serving import Born, Zygote
from shared_rpc.zygote.title import set_title


def main() -> Born | None:
    """Serve until the other side hangs up. Returns in every fork, with the fork's task; and None in the zygote, at its end."""
    parser = argparse.ArgumentParser(prog="python -m shared_rpc.zygote")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, help="Pid of the process with which the zygote ends.")
    parser.add_argument("room", nargs="?", help="Padding, for the command lines of forks.")
    options = parser.parse_args()
    if options.parent is not None:
        die_with_parent(options.parent)
    set_title([sys.executable, "-m", "shared_rpc.zygote"])
    connection = socket.socket(fileno=options.fd)
    connection.set_inheritable(False)
    return Zygote(sys.path[:]).serve(connection)


if __name__ == "__main__":
    born = main()
    if born is None:
        os._exit(0)  # exit callbacks of the imports are for the forks
    born.run()
