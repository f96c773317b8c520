"""Processes that an endpoint forks by ``os.fork()``: the end of the endpoint is the end of the process.

Below the endpoint's frame there is nothing to return to: the thread waits for the next job for ever, and the event loop
reads its parent's descriptors. Processes of :mod:`multiprocessing`, and those that call ``os._exit()``, never return here.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Awaitable, Coroutine, Generator
from typing import Any

from shared_rpc.context import CURRENT_RUN
from shared_rpc.forks import after_fork


def end_if_forked(pid: int, endpoint: str) -> None:
    """Exit if the endpoint, which began in process ``pid``, returns, raises or awaits in a process that it has forked."""
    if os.getpid() != pid:
        text = f"shared_rpc: endpoint {endpoint!r} forked this process (pid {os.getpid()}) from pid {pid}, and left it"
        print(f"{text}: end such a process by os._exit(), or use multiprocessing", file=sys.stderr, flush=True)
        os._exit(1)


@types.coroutine
def one_process(begun: Awaitable[Any], pid: int, endpoint: str) -> Generator[Any, Any, Any]:
    """Await an endpoint's coroutine, and check the process whenever it gives control back."""
    work = begun if isinstance(begun, Coroutine) else _awaited(begun)
    thrown: list[BaseException] = []
    while True:
        try:
            wanted = work.throw(thrown.pop()) if thrown else work.send(None)
        except StopIteration as done:
            return done.value
        finally:
            end_if_forked(pid, endpoint)
        try:
            yield wanted
        except GeneratorExit:
            work.close()
            raise
        except BaseException as error:
            thrown.append(error)
        # send() needs no value: a coroutine gets results from its futures, not from the loop.


async def _awaited(begun: Awaitable[Any]) -> Any:
    return await begun


@after_fork
def _forget_run() -> None:
    run = CURRENT_RUN.get()
    if run is not None:
        run.report = lambda _: None  # the parent's loop has no reports of a child
