"""Running endpoints. The server core asks an :class:`Executor` and gets a record back; it does not know where it ran."""

from __future__ import annotations

import asyncio
import os
import traceback
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from shared_rpc.endpoints import Endpoint
from shared_rpc.errors import RemoteError, SharedRPCError, text_of, to_wire
from shared_rpc.memory.devices import device_kind
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.reaper import REAPER
from shared_rpc.records import EMPTY_TABLE, Arguments, Record
from shared_rpc.server.threads import WorkerThreads

__all__ = ["CHAIN", "Executor", "Failure", "InProcessExecutor", "Invocation", "Produced"]

#: Bytes. An exception that pickles larger than this carries data, and arrives as a RemoteError.
_EXCEPTION_LIMIT = 1 << 20


@dataclass(frozen=True)
class Invocation:
    """One run to do. ``arguments`` are lowered, or the live ``(args, kwargs)`` of a caller in this process.

    ``publish``: whether a record is needed; a caller in this process can do with the value alone. ``chain``: see
    :data:`CHAIN`.
    """

    endpoint: str
    arguments: Arguments | tuple[tuple[Any, ...], dict[str, Any]]
    publish: bool
    chain: frozenset[str] = frozenset()


#: In an endpoint: the names and keys of the calls it serves. It tells a call that would wait for itself.
CHAIN: ContextVar[frozenset[str]] = ContextVar("chain", default=frozenset())


@dataclass(frozen=True)
class Produced:
    """A run that went well. ``record`` belongs to the receiver, ``live`` is the value where it is in this process."""

    record: Record | None
    live: Any


@dataclass(frozen=True)
class Failure:
    """A run, or a call, that did not. ``pickled`` holds an endpoint's own exception, to be loaded by the caller only."""

    code: str
    text: str
    detail: dict[str, str]
    pickled: bytes = b""
    error: BaseException | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Of an error that the library raised."""
        return cls(*to_wire(error), error=error)

    @classmethod
    def raised(cls, error: BaseException) -> Failure:
        """Of what an endpoint raised."""
        text = _traceback(error)
        name = (
            type(error).__qualname__
            if type(error).__module__ == "builtins"
            else f"{type(error).__module__}.{type(error).__qualname__}"
        )
        remote = RemoteError(text_of(error), type_name=name, traceback=text)
        pickled = b""
        # SystemExit and the like end the process that raised them, and must not end the caller's.
        if isinstance(error, Exception):
            try:
                from shared_rpc.codec import dump_exception

                pickled = dump_exception(error)
            except BaseException:  # of its own methods too nothing may get past the waiters
                pickled = b""
        local = error if isinstance(error, Exception) else remote
        return cls(*to_wire(remote), pickled=pickled if len(pickled) <= _EXCEPTION_LIMIT else b"", error=local)


class Executor(Protocol):
    """Where endpoints run."""

    @property
    def busy(self) -> int:
        """Threads of this process that run an endpoint now."""

    def lend_thread(self) -> AbstractContextManager[None]:
        """Entered by an endpoint that waits for another one, so that waiting does not use up ``max_workers``."""

    def close(self) -> None:
        """Let idle threads end; a thread that runs an endpoint ends with it, or with the process."""

    def reclaim(self) -> None:
        """An object was dropped: give back the memory that only its live value held. Does not wait."""

    async def run(self, invocation: Invocation, begun: Callable[[], None]) -> Produced | Failure:
        """Run one endpoint; ``begun`` is called when its work starts. Never raises what the endpoint raised.

        The arguments' descriptors belong to the executor from here on, also if it is cancelled.
        """


class InProcessExecutor:
    """Endpoints in this process: ``def`` in daemon threads, ``async def`` on the server's loop.

    :param endpoints: by name.
    :param device: the id of the device results must be on.
    :param max_workers: how many threads run endpoints at once; by default four more than there are cores, and at most 32.
    :param shares: whether results are moved into shared memory; False where nobody but this process asks for them.
    """

    def __init__(
        self, endpoints: dict[str, Endpoint], device: str, max_workers: int | None = None, *, shares: bool = True
    ) -> None:
        self._endpoints = endpoints
        self._device = device
        self._kind = device_kind(device)
        self._shares = shares
        limit = max_workers if max_workers is not None else min(32, (os.cpu_count() or 1) + 4)
        self._threads = WorkerThreads(limit, self._prepare)

    def _prepare(self) -> None:
        """Make the provider's GPU the current one of this thread: an endpoint's ``"cuda"`` means it, and cuBLAS warns where no
        context is current.
        """
        if self._kind == "cuda":
            import torch

            from shared_rpc.memory.devices import torch_device

            torch.cuda.set_device(torch_device(self._device))

    @property
    def busy(self) -> int:
        """See :class:`Executor`."""
        return self._threads.busy

    def lend_thread(self) -> AbstractContextManager[None]:
        """See :class:`Executor`."""
        return self._threads.lend()

    def reclaim(self) -> None:
        """See :class:`Executor`."""
        REAPER.start()
        REAPER.submit(MAPPINGS.drain)

    def close(self) -> None:
        """See :class:`Executor`."""
        self._threads.close()

    async def run(self, invocation: Invocation, begun: Callable[[], None]) -> Produced | Failure:
        """See :class:`Executor`."""
        endpoint = self._endpoints[invocation.endpoint]
        started = False

        def start() -> None:
            nonlocal started
            started = True
            begun()

        try:
            if not endpoint.spec.is_async:
                return await self._threads.run(lambda: _guarded(lambda: self._call(endpoint, invocation)), start)
            return await self._run_async(endpoint, invocation, start)
        finally:
            if not started and isinstance(invocation.arguments, Arguments):
                invocation.arguments.close()

    async def _run_async(self, endpoint: Endpoint, invocation: Invocation, begun: Callable[[], None]) -> Produced | Failure:
        loaded = await self._threads.run(lambda: _guarded(lambda: Produced(None, _load(invocation))), begun)
        if isinstance(loaded, Failure):
            return loaded
        args, kwargs = loaded.live
        CHAIN.set(invocation.chain)
        self._prepare()
        # A task of its own: an endpoint that cancels the task it runs in must not cancel the server's.
        outcome = await asyncio.create_task(_awaited(endpoint.function(*args, **kwargs)))
        if isinstance(outcome, Failure):
            return outcome
        value = outcome.live
        return await self._threads.run(lambda: _guarded(lambda: self._publish(endpoint, invocation, value)), _nothing)

    def _call(self, endpoint: Endpoint, invocation: Invocation) -> Produced:
        args, kwargs = _load(invocation)
        token = CHAIN.set(invocation.chain)
        try:
            value = endpoint.function(*args, **kwargs)
        finally:
            CHAIN.reset(token)
        # The arguments' memory may be what the result replaces.
        del args, kwargs
        return self._publish(endpoint, invocation, value)

    def _publish(self, endpoint: Endpoint, invocation: Invocation, value: Any) -> Produced:
        from shared_rpc.codec import check_result, publish

        if not invocation.publish or not self._shares:
            nbytes = check_result(value, endpoint.spec.name, self._kind)
            return Produced(Record(b"", EMPTY_TABLE, (), nbytes, self._device) if invocation.publish else None, value)
        return Produced(publish(value, self._device, endpoint.spec.access, endpoint.spec.name), value)


def _traceback(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except BaseException as problem:
        return f"<the traceback cannot be shown: {type(problem).__name__}>"


def _nothing() -> None:
    pass


def _load(invocation: Invocation) -> tuple[Any, Any]:
    if isinstance(invocation.arguments, tuple):
        return invocation.arguments
    from shared_rpc.codec import decode_arguments

    try:
        return decode_arguments(invocation.arguments)
    finally:
        invocation.arguments.close()


async def _awaited(work: Awaitable[Any]) -> Produced | Failure:
    """:func:`_guarded` for what is awaited. SystemExit would end the loop, and every waiter would hang."""
    try:
        return Produced(None, await work)
    except SharedRPCError as error:
        return Failure.of(error)
    except BaseException as error:
        return Failure.raised(error)


def _guarded(work: Callable[[], Produced]) -> Produced | Failure:
    """Whatever ``work`` raises, SystemExit included, as a value: nothing may get past the waiters."""
    try:
        return work()
    except SharedRPCError as error:
        return Failure.of(error)
    except BaseException as error:
        return Failure.raised(error)
