"""``python -m shared_rpc.verification.nursery``: forks client processes, so that a hundred of them need not import torch
one by one.

It listens at a socket. Every connection is a new process, which answers commands until the connection ends: see
:mod:`shared_rpc.verification.client_process`. Nothing of the library is used here, only imported, and no GPU is touched, so a
child begins as if it had imported torch itself: with a session, mappings and a CUDA context of its own.

On its standard output it tells how each of them ended. It ends with its standard input, and its children end with it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import threading

__all__: list[str] = []


def main(path: str, server: str, subject: str) -> None:
    """Fork until standard input ends."""
    module, _, name = subject.partition(":")
    kind = getattr(importlib.import_module(module), name)
    import torch

    from shared_rpc import Client
    from shared_rpc.verification.client_process import ClientProcess

    torch.set_num_threads(1)  # sums are to be taken in one order in all processes
    Client(socket_path=server).close()  # which imports what a client of a process with torch needs, and does not connect
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # some of them are to crash
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        # It gets its name when it can be connected to.
        listener.bind(f"{path}.new")
        listener.listen(256)
        os.rename(f"{path}.new", path)
        connection = _fork_on(listener)
    if connection is not None:
        ClientProcess(connection, server, kind()).serve()


def _fork_on(listener: socket.socket) -> socket.socket | None:
    """A new process for each connection, which is returned in it; None in the nursery, at its end."""
    if threading.active_count() > 1:
        raise RuntimeError("the nursery forks, and must not have threads")
    wake, waker = socket.socketpair()
    waker.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno())
    children: set[int] = set()
    while True:
        ready, _, _ = select.select([listener.fileno(), wake.fileno(), 0], [], [])
        if wake.fileno() in ready:
            wake.recv(4096)
            _bury(children)
        if 0 in ready:
            break
        if listener.fileno() in ready:
            connection, _ = listener.accept()
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                wake.close()
                waker.close()
                return connection
            connection.close()
            children.add(pid)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    return None


def _bury(children: set[int]) -> None:
    for pid in list(children):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            children.discard(pid)
            print(json.dumps({"pid": pid, "code": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
