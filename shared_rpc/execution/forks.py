"""Processes that an endpoint forks.

The rule: *in such a process the end of the endpoint is the end of the process*. Below the endpoint's frame there is nothing to
go back to: a thread that would wait for the next job for ever, or an event loop whose descriptors are its parent's, and whose
wake-ups it would take. Processes of :mod:`multiprocessing`, and those that call ``os._exit()``, do not come so far.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import types
from collections.abc import Awaitable, Coroutine, Generator
from contextlib import suppress
from typing import Any, NoReturn

from shared_rpc.context import CURRENT_RUN
from shared_rpc.forks import after_fork


def end_if_forked(pid: int, error: BaseException | None = None) -> None:
    """End this process if it is another one than the endpoint began in, as the interpreter would at the end of a program.

    :param pid: the process that the endpoint began in.
    :param error: the endpoint's exception.
    """
    if os.getpid() != pid:
        _end(error)


@types.coroutine
def one_process(begun: Awaitable[Any], name: str, pid: int) -> Generator[Any, Any, Any]:
    """Await an endpoint's coroutine. In a process that it forks it cannot be resumed: that has no event loop.

    :param name: the endpoint's.
    :param pid: the process that it began in.
    """
    work = begun if isinstance(begun, Coroutine) else _awaited(begun)
    thrown: list[BaseException] = []
    while True:
        try:
            wanted = work.throw(thrown.pop()) if thrown else work.send(None)
        except StopIteration as done:
            end_if_forked(pid)
            return done.value
        except BaseException as error:
            end_if_forked(pid, error)
            raise
        if os.getpid() != pid:
            _end(
                f"shared_rpc: a process (pid {os.getpid()}) that the endpoint {name!r} forked waits for the event loop of its "
                f"parent (pid {pid}), and ends: use asyncio.run() in the process, or fork in a def endpoint"
            )
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


def _end(error: BaseException | str | None) -> NoReturn:
    code = 1
    try:
        code = _tell(error)
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        # Private; child processes of multiprocessing call it too. In Python 3.8 to 3.14.
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the stream is None or closed, or a pipe without a reader
                stream.flush()
        os._exit(code)


def _tell(error: BaseException | str | None) -> int:
    """Print a process's last error, as the interpreter does; return its exit code."""
    code: object = error.code if isinstance(error, SystemExit) else error
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    if isinstance(code, BaseException):
        # Without the frame that called the endpoint.
        trace = code.__traceback__.tb_next if code.__traceback__ is not None else None
        sys.excepthook(type(code), code.with_traceback(trace), trace)
    else:
        print(code, file=sys.stderr)
    return 1


@after_fork
def _end_run() -> None:
    run = CURRENT_RUN.get()
    if run is not None:
        # Exit callbacks belong to the process that registered them: those of multiprocessing, for example, would end its pools.
        atexit._clear()
        run.report = _nobody_asks


def _nobody_asks(_: object) -> None:
    """Take progress of a process that is not the server."""
