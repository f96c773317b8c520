"""Calls, answered from the cache or by runs, and requests about cached results and about chunks of pools."""

from __future__ import annotations

import functools
from collections.abc import Callable

import msgspec

from shared_rpc.errors import ConfigurationError
from shared_rpc.execution.endpoints import check_chain, identity_of, key_of, takes
from shared_rpc.execution.outcomes import Failure
from shared_rpc.execution.run import CallArguments
from shared_rpc.memory.records import Arguments
from shared_rpc.observability.events import HOOKS
from shared_rpc.protocol import exported as x
from shared_rpc.protocol import generations as g
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.specs import EndpointSpec
from shared_rpc.protocol.values import count_args, decode_call
from shared_rpc.server.generations import Generations, check_refreshable
from shared_rpc.server.observing import Observed
from shared_rpc.server.requests import Caller, Lowered, handles
from shared_rpc.server.runs import Runs, close_arguments
from shared_rpc.server.shared import State
from shared_rpc.server.tasks import Tasks
from shared_rpc.server.waiting import Delivery, Waiter, gone, resolve

#: Maximum bytes of the message of a call whose key is remembered.
_FEW = 512


class Calls:
    """Handlers of calls, and of requests about their cached results. On the server's loop only."""

    def __init__(self, state: State, runs: Runs, generations: Generations, tasks: Tasks) -> None:
        self._state = state
        self._runs = runs
        self._generations = generations
        self._tasks = tasks
        self._transfers = state.executor.transfers

    @handles(m.Call)
    def call(self, caller: Caller, message: m.Call) -> None:
        """Answer from the cache, join a run, or start one, perhaps before this returns."""
        waiter, lowered, arguments = _entered(caller, message)
        if message.pooled:
            self._transfers.of(caller.session)  # creates the transfer
            waiter.pooled = True
        self._begin(waiter, message, lowered, arguments)

    @handles(g.Refresh)
    def refresh(self, caller: Caller, message: g.Refresh) -> None:
        """Build the next generation of a call's object, or join the run that does; the current one is served until then.

        It is answered in the turn of the loop in which the new generation became current.
        """
        made = self._generations.made
        self._enter_anew(caller, message, lambda outcome: g.Refreshed(made(message.endpoint, outcome)))

    @handles(x.PrepareCandidate)
    def prepare(self, caller: Caller, message: x.PrepareCandidate) -> None:
        """Build the next generation of a call's object as a candidate, on which the caller's session has a lease then."""
        prepared = self._generations.prepared
        self._enter_anew(caller, message, lambda outcome: x.Candidate(prepared(message.endpoint, outcome)))

    def _enter_anew(
        self, caller: Caller, message: g.Refresh | x.PrepareCandidate, answer: Callable[[Delivery], m.Message]
    ) -> None:
        """Start or join a run for a request that takes no cached result."""
        waiter, lowered, arguments = _entered(caller, message)
        waiter.prepares = isinstance(message, x.PrepareCandidate)
        waiter.refreshes = not waiter.prepares

        def deliver(outcome: Delivery | Failure) -> None:
            sent = False
            try:
                if isinstance(outcome, Delivery):
                    sent = caller.reply(answer(outcome))
                else:
                    caller.fail(outcome.seal() if isinstance(message, x.PrepareCandidate) and message.sealed else outcome)
            except Exception as error:
                caller.fail(Failure.unexpected(error, f"a new generation of {message.endpoint[:100]!r} cannot be delivered"))
            finally:
                if waiter.prepares and not sent and isinstance(outcome, Delivery) and outcome.stored is not None:
                    self._state.release(caller.session, [outcome.stored.object_id])

        waiter.deliver = deliver
        self._begin(waiter, message, lowered, arguments)

    def _begin(self, waiter: Waiter, message: m.Call, lowered: Lowered | None, arguments: CallArguments) -> None:
        """Answer a call from the cache, join a run, or start one; errors go to the waiter."""
        chain = frozenset(message.chain)
        try:
            spec, key = self._bound(waiter, message.endpoint, lowered, arguments, chain)
            if waiter.refreshes or waiter.prepares:
                check_refreshable(spec, key)
                waiter.arguments = identity_of(spec, *_read(lowered, arguments))
        except BaseException as error:
            close_arguments(arguments)
            resolve(waiter, Failure.unexpected(error, f"a call of {message.endpoint[:100]!r} cannot begin"))
            return
        self._runs.enter(waiter, spec, key, arguments, chain)

    @handles(m.Submit)
    def submit(self, caller: Caller, message: m.Submit) -> m.TaskIs:
        """Make a task of a call.

        :raises ServerBusy: if there are too many.
        """
        lowered, arguments = caller.arguments(message)
        asker = Waiter(caller.session, lambda outcome: None, request_id=caller.name)
        try:
            spec, key = self._bound(asker, message.endpoint, lowered, arguments, frozenset())
            return m.TaskIs(self._tasks.info(self._tasks.submit(spec, key, arguments, asker)))
        except BaseException as error:
            close_arguments(arguments)
            resolve(asker, Failure.of(error))
            raise

    @handles(m.Cancel)
    def cancel(self, caller: Caller, message: m.Cancel) -> None:
        """Give up an earlier request of the caller."""
        caller.cancel()

    @handles(m.Free)
    def free(self, caller: Caller, message: m.Free) -> m.Answer:
        """Take back chunks of the endpoints' pool."""
        self._transfers.release_results(caller.session, message.chunks)
        return m.Answer.of(len(message.chunks))

    @handles(m.InvalidateCall)
    def invalidate_call(self, caller: Caller, message: m.InvalidateCall) -> m.Answer:
        """Drop the cached result of one call, and keep the result of a run that is under way out of the cache."""
        spec = self._state.registry.get(message.endpoint)
        key = key_of(spec, *decode_call(message.args, message.kwargs))
        return m.Answer.of(self._drop_key(key) if key is not None else 0)

    @handles(m.InvalidateEndpoint)
    def invalidate_endpoint(self, caller: Caller, message: m.InvalidateEndpoint) -> m.Answer:
        """Drop all cached results of an endpoint, see :meth:`drop`."""
        return m.Answer.of(self.drop(message.endpoint))

    @handles(m.InvalidateObject)
    def invalidate_object(self, caller: Caller, message: m.InvalidateObject) -> m.Answer:
        """Drop one cached result, and keep the result of a run that is under way out of the cache; 0 if the cache did not list
        it.

        :raises StaleHandleError: if there is no such object.
        :raises ConfigurationError: if it is a buffer.
        """
        stored = self._state.stored(message.object_id)
        if stored.kind == "buffer":
            raise ConfigurationError(f"object {stored.object_id} is a buffer, not a cached result: use free_buffer()")
        if not stored.listed or stored.cache_key is None:
            return m.Answer.of(0)
        return m.Answer.of(self._drop_key(stored.cache_key))

    def _drop_key(self, key: str) -> int:
        self._state.runs.detach(key=key)
        return self._state.objects.invalidate(key=key)

    def drop(self, endpoint: str) -> int:
        """Drop all cached results of an endpoint, and keep results of its pending runs out of the cache."""
        self._state.registry.get(endpoint)
        self._state.runs.detach(endpoint=endpoint)
        return self._state.objects.invalidate(endpoint=endpoint)

    def _bound(
        self, waiter: Waiter, endpoint: str, lowered: Lowered | None, arguments: CallArguments, chain: frozenset[str]
    ) -> tuple[EndpointSpec, str | None]:
        """Return the spec and the key of a call, which counts and is observed from here on."""
        try:
            if self._state.waits.stopped:
                raise gone("arrived")
            spec = self._state.registry.find(endpoint) or self._state.registry.get(endpoint)
            key = count = None
            if lowered is None and isinstance(arguments, Arguments):
                count = count_args(arguments.args, arguments.kwargs)
            # Arguments that need no key and fit the signature are not decoded.
            if spec.cache or count is None or not takes(spec, count):
                key = _key(spec, lowered, arguments)
            if chain:
                check_chain(spec, key, chain)
                waiter.inner = True
        except BaseException:
            self._runs.statistics.refused += 1
            raise
        self._runs.statistics.of(spec.name)["calls"] += 1
        if HOOKS.registered:
            pid = self._state.sessions.pid_of(waiter.session)
            waiter.observed = Observed(self._state.server_id, spec.name, waiter.request_id, waiter.session, pid)
        return spec, key


def _entered(caller: Caller, message: m.Call) -> tuple[Waiter, Lowered | None, CallArguments]:
    """Register a request and take ownership of its arguments; close them on failure.

    Returns the request, its arguments as plain data for binding and key (None while they are encoded), and in the form that the
    executor takes.
    """
    lowered, arguments = caller.arguments(message)
    try:
        return caller.wait(), lowered, arguments
    except BaseException:
        close_arguments(arguments)
        raise


def _key(spec: EndpointSpec, lowered: Lowered | None, arguments: CallArguments) -> str | None:
    """Return the key of a call. Keys of recent small calls are remembered by the bytes of their arguments."""
    if lowered is None and isinstance(arguments, Arguments) and arguments.nbytes <= _FEW:
        return _key_of_bytes(spec, bytes(arguments.args), bytes(arguments.kwargs))
    return key_of(spec, *_read(lowered, arguments))


@functools.lru_cache(maxsize=4096)
def _key_of_bytes(spec: EndpointSpec, args: bytes, kwargs: bytes) -> str | None:
    return key_of(spec, *decode_call(msgspec.Raw(args), msgspec.Raw(kwargs)))


def _read(lowered: Lowered | None, arguments: CallArguments) -> Lowered:
    if lowered is None:
        assert isinstance(arguments, Arguments), "live arguments have a lowered form"
        lowered = decode_call(arguments.args, arguments.kwargs)
    return lowered
