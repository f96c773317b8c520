"""What carries out a provider's calls: one class for each role, chosen once.

Local and server role answer with live values of this process, through the same tables a server uses for its
clients; the client role asks a server. The provider does not know which one it has.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import anyio
import anyio.from_thread
import anyio.to_thread

from shared_rpc.client import Client
from shared_rpc.endpoints import bind, cache_key, check_chain
from shared_rpc.errors import ConfigurationError, ConnectionClosed, StaleHandleError
from shared_rpc.handle import Handle
from shared_rpc.memory.devices import device_kind
from shared_rpc.records import EMPTY_TABLE, Record
from shared_rpc.server.core import Delivery
from shared_rpc.server.executor import CHAIN, Failure
from shared_rpc.settings import Role
from shared_rpc.store.calls import CallTable, Flight
from shared_rpc.store.leases import LeaseTable
from shared_rpc.store.objects import ObjectStore, StoredObject
from shared_rpc.wire.specs import EndpointSpec

if TYPE_CHECKING:
    from shared_rpc.provider import Provider
    from shared_rpc.server import Server

__all__ = ["ClientRuntime", "LocalRuntime", "Runtime", "ServerRuntime"]

_LOCAL = "local"

T = TypeVar("T")


class Runtime(Protocol):
    """A role at work."""

    role: Role

    def call(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The endpoint's result, or a handle where it is managed."""

    async def acall(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same for a caller on an event loop, which goes on meanwhile."""

    def invalidate_call(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """See :meth:`Client.invalidate_call_cache`."""

    def invalidate_endpoint(self, endpoint: str) -> int:
        """See :meth:`Client.invalidate_endpoint_cache`."""

    def info(self) -> dict[str, Any]:
        """What ``get_runtime_info`` adds for this role."""

    def close(self) -> None:
        """End the role: hang up, or stop serving."""


class ClientRuntime:
    """Every call goes to a server of another process."""

    role: Role = "client"

    def __init__(self, provider: Provider) -> None:
        self.client = Client(
            provider.base_path,
            device=provider.device,
            timeout=provider.timeout,
            connect_timeout=provider.server_startup_timeout,
        )

    def call(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See :meth:`Client.call`."""
        return self.client.call(endpoint, *args, **kwargs)

    async def acall(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """:meth:`call`, in a thread."""
        return await anyio.to_thread.run_sync(lambda: self.client.call(endpoint, *args, **kwargs))

    def invalidate_call(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """See :meth:`Client.invalidate_call_cache`."""
        return self.client.invalidate_call_cache(endpoint, *args, **kwargs)

    def invalidate_endpoint(self, endpoint: str) -> int:
        """See :meth:`Client.invalidate_endpoint_cache`."""
        return self.client.invalidate_endpoint_cache(endpoint)

    def info(self) -> dict[str, Any]:
        """The server, as far as it can be reached."""
        server = self.client.get_server_info()
        return {"socket_path": self.client.socket_path, "server": server}

    def close(self) -> None:
        """Hang up."""
        self.client.close()


class LocalRuntime:
    """Every call runs here, in the caller's thread; with the cache, singleflight and handles of a server.

    Nothing is moved into shared memory, because there is nobody to share it with.
    """

    role: Role = "local"

    def __init__(self, provider: Provider) -> None:
        self.server_id = f"local-{os.getpid()}"
        self._provider = provider
        self._lock = threading.Lock()
        self._leases = LeaseTable()
        self._objects = ObjectStore(self._leases, time.time, _forget_live)
        self._calls: CallTable[_Ticket] = CallTable()
        self._serialized: dict[str, _Turns] = {}

    def call(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See :class:`Runtime`. A follower of a run waits for it; the leader's exception reaches both."""
        ticket = self._enter(endpoint, args, kwargs)
        if not ticket.leads:
            return ticket.future.result()
        with self._leading(ticket) as turn:
            turn.result()
            function = self._provider.endpoints[endpoint].function
            if ticket.spec.is_async:
                # A loop in a thread of its own: the caller's thread may run one already, as a notebook's does.
                with anyio.from_thread.start_blocking_portal() as portal:
                    ticket.value = portal.call(lambda: function(*args, **kwargs))
            else:
                ticket.value = function(*args, **kwargs)
        return ticket.future.result()

    async def acall(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See :class:`Runtime`. The endpoint runs on the caller's loop."""
        ticket = self._enter(endpoint, args, kwargs)
        if not ticket.leads:
            return await _waited_for(ticket.future)
        with self._leading(ticket) as turn:
            await _waited_for(turn)
            ticket.value = await self._provider.endpoints[endpoint].function(*args, **kwargs)
        return ticket.future.result()

    def _enter(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Ticket:
        """Find the cached result, join a run, or lead one."""
        spec = self._provider.registry.get(endpoint)
        bound = bind(spec, *_lowered(args, kwargs, self._provider.device_id))
        key = cache_key(spec, bound)
        check_chain(spec, key, CHAIN.get())
        ticket = _Ticket(spec, key)
        with self._lock:
            self._objects.expire()
            stored = self._objects.lookup(key) if key is not None else None
            if stored is not None:
                ticket.future.set_result(self._hand(spec, stored.live, stored))
            elif not spec.singleflight or self._calls.join(key, ticket) is None:
                ticket.flight = self._calls.open(endpoint, key, ticket)
                self._calls.begin(ticket.flight)
        return ticket

    @contextmanager
    def _turn(self, spec: EndpointSpec) -> Iterator[concurrent.futures.Future[None]]:
        if spec.concurrency == "parallel":
            yield _NOW
            return
        with self._lock:
            turns = self._serialized.setdefault(spec.name, _Turns())
        turn = turns.join()
        try:
            yield turn
        finally:
            turns.leave(turn)

    @contextmanager
    def _leading(self, ticket: _Ticket) -> Iterator[concurrent.futures.Future[None]]:
        """Run the body as the leader: whatever ends it, every follower is released. It is to wait for its turn first."""
        from shared_rpc.codec import check_result

        assert ticket.flight is not None, "only a leader runs the endpoint"
        chain = CHAIN.set(CHAIN.get() | {ticket.spec.name, ticket.key or ticket.spec.name})
        try:
            with self._turn(ticket.spec) as turn:
                yield turn
            nbytes = check_result(ticket.value, ticket.spec.name, device_kind(self._provider.device_id))
        except BaseException as error:
            with self._lock:
                waiters = self._calls.close(ticket.flight)
            for waiter in waiters:
                if waiter is not ticket:
                    waiter.future.set_exception(Failure.raised(error).error)
            raise
        finally:
            CHAIN.reset(chain)
        self._finish(ticket, ticket.flight, nbytes)

    def _finish(self, ticket: _Ticket, flight: Flight[_Ticket], nbytes: int) -> None:
        spec, value = ticket.spec, ticket.value
        with self._lock:
            key = flight.key
            waiters = self._calls.close(flight)
            stored = None
            if key is not None or spec.managed:
                record = Record(b"", EMPTY_TABLE, (), nbytes, device=self._provider.device_id)
                stored = self._objects.add(spec.name, key, record, spec.idle_ttl, value)
            results = [(waiter, self._hand(spec, value, stored)) for waiter in waiters]
            if stored is not None:
                self._objects.settle(stored.object_id)
        for waiter, result in results:
            waiter.value = None
            waiter.future.set_result(result)

    def _hand(self, spec: EndpointSpec, value: Any, stored: StoredObject | None) -> Any:
        if not spec.managed or stored is None:
            return value
        self._leases.grant(_LOCAL, stored.object_id)
        return _handle(self, value, stored)

    def invalidate_call(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """See :meth:`Client.invalidate_call_cache`."""
        spec = self._provider.registry.get(endpoint)
        key = cache_key(spec, bind(spec, *_lowered(args, kwargs, self._provider.device_id)))
        if key is None:
            return 0
        with self._lock:
            self._calls.detach(key=key)
            return self._objects.invalidate(key=key)

    def invalidate_endpoint(self, endpoint: str) -> int:
        """See :meth:`Client.invalidate_endpoint_cache`."""
        self._provider.registry.get(endpoint)
        with self._lock:
            self._calls.detach(endpoint=endpoint)
            return self._objects.invalidate(endpoint=endpoint)

    def info(self) -> dict[str, Any]:
        """How many objects the cache holds."""
        return {"objects": len(self._objects)}

    def close(self) -> None:
        """Let go of all results; handles that are out keep theirs."""
        with self._lock:
            self._objects.clear()

    def give_back(self, object_id: str, session: object) -> None:
        """See :class:`shared_rpc.handle.Issuer`."""
        with self._lock:
            if self._leases.release(_LOCAL, object_id):
                self._objects.settle(object_id)

    def object_info(self, object_id: str) -> dict[str, Any]:
        """See :class:`shared_rpc.handle.Issuer`."""
        with self._lock:
            stored = self._objects.get(object_id)
            if stored is None:
                raise StaleHandleError(f"this process owns no object {object_id} any more", reason="object_gone")
            return stored.facts(self.server_id, len(self._leases.holders(object_id)))

    def ensure_handle_live(self, handle: Handle[Any]) -> None:
        """See :class:`shared_rpc.handle.Issuer`."""
        _check_not_released(handle)
        self.object_info(handle.object_id)


@dataclass(eq=False)
class _Ticket:
    """One caller of the local runtime."""

    spec: EndpointSpec
    key: str | None
    flight: Flight[_Ticket] | None = None
    value: Any = None
    future: concurrent.futures.Future[Any] = field(default_factory=concurrent.futures.Future)

    @property
    def leads(self) -> bool:
        return self.flight is not None


class _Turns:
    """Who runs a serialized endpoint: one at a time, in the order they came. Whoever waits can give up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line: deque[concurrent.futures.Future[None]] = deque()

    def join(self) -> concurrent.futures.Future[None]:
        """A place in the line, done when it is the first. It must :meth:`leave`, whether its turn came or not."""
        turn: concurrent.futures.Future[None] = concurrent.futures.Future()
        with self._lock:
            self._line.append(turn)
            if self._line[0] is turn:
                turn.set_result(None)
        return turn

    def leave(self, turn: concurrent.futures.Future[None]) -> None:
        """End a turn, or the wait for it."""
        with self._lock:
            self._line.remove(turn)
            turn.cancel()  # of one that gave up: no thread must go on waiting for it
            if self._line and not self._line[0].done():
                self._line[0].set_result(None)


_NOW: concurrent.futures.Future[None] = concurrent.futures.Future()
_NOW.set_result(None)


class ServerRuntime:
    """Every call goes through the server of this process, and gets the live value that its clients map."""

    role: Role = "server"

    def __init__(self, server: Server) -> None:
        self.server = server
        facts = server.info()
        self.server_id: str = facts["server_id"]
        self._device: str = facts["device"]

    def call(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See :class:`Runtime`.

        :raises ConfigurationError: on the server's own event loop, which would wait for itself.
        """
        if self.server.on_loop():
            raise ConfigurationError(
                f"{endpoint}() was called on the server's event loop, by an async endpoint perhaps: make {endpoint!r} an "
                f"async def and await it, or call it with anyio.to_thread.run_sync"
            )
        future = self._submit(endpoint, args, kwargs)
        with self._wanted(future), self.server.lend_thread() if CHAIN.get() else nullcontext():
            return self._hand(future.result())

    async def acall(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See :class:`Runtime`."""
        future = self._submit(endpoint, args, kwargs)
        with self._wanted(future):
            if self.server.on_loop():
                return self._hand(await asyncio.wrap_future(future))
            return self._hand(await _waited_for(future))

    def _submit(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> concurrent.futures.Future[Delivery]:
        return self.server.call(endpoint, _lowered(args, kwargs, self._device), args, kwargs)

    @contextmanager
    def _wanted(self, future: concurrent.futures.Future[Delivery]) -> Iterator[None]:
        """A caller that is cancelled or interrupted leaves no lease behind: its handle is made, and dropped."""
        try:
            yield
        except BaseException:
            future.add_done_callback(lambda done: done.exception() or self._hand(done.result()))
            raise

    def _hand(self, delivery: Delivery) -> Any:
        if not delivery.managed or delivery.stored is None:
            return delivery.live
        return _handle(self, delivery.live, delivery.stored)

    def invalidate_call(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """See :meth:`Client.invalidate_call_cache`."""
        lowered = _lowered(args, kwargs, self._device)
        return self.server.ask(lambda core: core.invalidate_call(endpoint, *lowered))

    def invalidate_endpoint(self, endpoint: str) -> int:
        """See :meth:`Client.invalidate_endpoint_cache`."""
        return self.server.ask(lambda core: core.invalidate_endpoint(endpoint))

    def info(self) -> dict[str, Any]:
        """The server's own facts."""
        return {"socket_path": self.server.socket_path, "server": self.server.info() if self.server.running else None}

    def close(self) -> None:
        """Stop serving."""
        self.server.stop()

    def give_back(self, object_id: str, session: object) -> None:
        """See :class:`shared_rpc.handle.Issuer`."""
        self.server.release(object_id)

    def object_info(self, object_id: str) -> dict[str, Any]:
        """See :class:`shared_rpc.handle.Issuer`."""
        return self.server.ask(lambda core: core.object_info(object_id))

    def ensure_handle_live(self, handle: Handle[Any]) -> None:
        """See :class:`shared_rpc.handle.Issuer`."""
        _check_not_released(handle)
        try:
            self.object_info(handle.object_id)
        except ConnectionClosed as error:
            raise StaleHandleError(str(error), reason="server_unreachable") from error


async def _waited_for(future: concurrent.futures.Future[T]) -> T:
    if future.done():
        return future.result()
    # A limiter of its own: those who wait must not use up the threads that whoever they wait for needs.
    return await anyio.to_thread.run_sync(future.result, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))


def _lowered(args: tuple[Any, ...], kwargs: dict[str, Any], device: str) -> tuple[list[Any], dict[str, Any]]:
    from shared_rpc.codec import lower_arguments

    return lower_arguments(args, kwargs, device_kind(device))


def _handle(issuer: LocalRuntime | ServerRuntime, value: Any, stored: StoredObject) -> Handle[Any]:
    return Handle(
        value,
        object_id=stored.object_id,
        server_id=issuer.server_id,
        generation=stored.generation,
        issuer=issuer,
        session=issuer,
    )


def _check_not_released(handle: Handle[Any]) -> None:
    if handle.released:
        raise StaleHandleError(f"the handle of object {handle.object_id} was released", reason="released")


def _forget_live(stored: StoredObject) -> None:
    stored.live = None
