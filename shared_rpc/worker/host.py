"""The worker's side of the link: receives runs, sends records."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import msgspec

from shared_rpc.errors import CapabilityError, ConfigurationError, EndpointNotFound, SharedRPCError, to_wire
from shared_rpc.execution.arguments import read_arguments
from shared_rpc.execution.coroutines import run_loop
from shared_rpc.execution.in_process import InProcessExecutor
from shared_rpc.execution.outcomes import Completed, Failure
from shared_rpc.execution.run import Run
from shared_rpc.execution.stream import FramedStream
from shared_rpc.forks import after_fork
from shared_rpc.lifecycle.ending import end_now, end_within
from shared_rpc.memory.devices import devices_of, facts_of, resolve_quotas
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.catalogue import decode_message, encode_message
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.messages import Error, Message
from shared_rpc.protocol.options import ServeOptions
from shared_rpc.protocol.records import sent_infos
from shared_rpc.protocol.socket import FdOwner
from shared_rpc.protocol.tasks import Progress
from shared_rpc.provider.app import override, socket_of
from shared_rpc.provider.provider import Provider
from shared_rpc.provider.runtime import Runtime
from shared_rpc.worker.memory import OrderedMemory
from shared_rpc.worker.runtime import WorkerRuntime

_log = logging.getLogger("shared_rpc.worker")

#: Seconds for threads to end after the broker has closed the connection, or the app failed to load.
GRACE = 0.5


class WorkerHost:
    """The server of this process's providers through a broker. Its loop runs in its own thread.

    :param fd: this end of the socket pair.
    :param number: the worker's number, from 0.
    """

    def __init__(self, fd: int, options: ServeOptions, number: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.set_inheritable(False)
        self._options = options
        self._number = number
        #: The executors of providers, by the providers' keys.
        self._executors: dict[str, InProcessExecutor] = {}
        self._adopting = threading.RLock()
        self._runs: dict[int, tuple[InProcessExecutor, Run[None]]] = {}
        self._memory = OrderedMemory(self._send, self._on_loop)
        self._handlers: dict[type[Message], Callable[[Frame, Any], None]] = {
            w.StartRun: self._run,
            w.Withdraw: self._withdraw,
            w.Stop: self._stop,
            w.ReleaseChunks: self._give,
            w.SessionEnded: self._end_session,
            w.Reclaim: self._reclaim,
            **self._memory.handlers,
        }
        self._stream: FramedStream
        self._hang_up: asyncio.Event
        self._loop: asyncio.AbstractEventLoop
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="shared-rpc-worker", daemon=True)

    def start(self) -> None:
        """Accept runs for providers as they are adopted."""
        # The broker must not take a forked child for this process.
        after_fork(self._socket.close)
        MAPPINGS.keeps = True
        self._thread.start()
        self._ready.wait()

    def adopt(self, provider: Provider) -> Runtime:
        """Serve a provider through the broker, and return its runtime."""
        with self._adopting:
            if any(executor.endpoints is provider.endpoints for executor in self._executors.values()):
                return provider._runtime()
            if self._options.socket is not None and self._executors:
                raise ConfigurationError("the app has several providers for one --socket: name one with app.py:name")
            key = f"{provider.base_path or ''}@{provider.device}"
            if key in self._executors:
                raise ConfigurationError(
                    f"two providers of the app have the base path {provider.base_path!r} and the device {provider.device!r}: "
                    f"give each its own base_path"
                )
            override(provider, self._options, self._number)
            executor = InProcessExecutor(provider.endpoints, provider.device_id, provider.pool, self._options.threads)
            self._executors[key] = executor
            path = socket_of(provider, self._options)
            runtime = WorkerRuntime(provider.client_options, path, executor.lend_thread, self._here)
            MAPPINGS.homes.add(runtime.socket_path)
            message = w.Serve(
                key,
                runtime.socket_path,
                provider.device_id,
                [],
                provider.mechanism_info,
                [facts_of(device) for device in devices_of(provider.device_id)],
                resolve_quotas(self._options.quotas, provider.device_id),
                provider.cluster,
            )

            def post() -> None:
                with self._adopting:  # the last message has all endpoints
                    self._post(msgspec.structs.replace(message, endpoints=provider.registry.all()))

            provider.registry.on_add = post
            provider.run_with(runtime)
            post()
            return runtime

    @property
    def hosts(self) -> bool:
        """True if a provider was reported to the broker."""
        return bool(self._executors)

    def loaded(self, installed: list[str], own: list[str], variables: dict[str, str | None]) -> None:
        """Report that the app has been imported, see :class:`~shared_rpc.protocol.worker.Loaded`."""
        self._post(w.Loaded(installed, own, variables))

    def wait(self) -> None:
        """Wait until the broker hangs up."""
        self._thread.join()

    def leave(self, code: int) -> NoReturn:
        """End the process without joining the threads that run endpoints."""
        if any(executor.busy for executor in self._executors.values()):
            end_now(code)
        sys.stdout.flush()
        sys.stderr.flush()
        end_within(GRACE, code)
        raise SystemExit(code)

    def refuse(self, error: SharedRPCError) -> NoReturn:
        """Report the reason for refusing the app to the broker, and end."""
        self._post(Error(*to_wire(error)))
        sent = threading.Event()
        self._on_loop(sent.set)
        sent.wait(GRACE)
        self.leave(1)

    def _here(self) -> bool:
        return threading.current_thread() is self._thread

    def _post(self, message: Message, number: int = 0) -> None:
        """Send a message from the loop.

        :raises ProtocolError: if it cannot be encoded, an error that would be lost on the loop.
        """
        encode_message(message)
        with suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(self._stream.send, message, number)

    def _serve(self) -> None:
        try:
            run_loop(self._main)
        except BaseException:
            _log.exception("the worker's loop failed")
        finally:
            self._ready.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._hang_up = asyncio.Event()
        self._stream = FramedStream(self._socket, self._handle, self._hung_up)
        self._stream.start()
        self._ready.set()
        await self._hang_up.wait()

    # Messages of the broker. On the loop.

    def _handle(self, frame: Frame) -> None:
        message = decode_message(frame)
        self._handlers[type(message)](frame, message)

    def _hung_up(self, error: Exception | None) -> None:
        if error is not None:
            _log.error("cannot read a message of the broker: %s", error, exc_info=error)
        self._stream.close()
        self._hang_up.set()

    def _run(self, frame: Frame, message: w.StartRun) -> None:
        number = frame.request_id
        executor = self._executors[message.key]
        endpoint = executor.endpoints.get(message.endpoint)
        try:
            # Even if the run fails: a client's arena is sent only once.
            arguments = read_arguments(frame, message, message.session, executor.transfers, None)
            if endpoint is None:
                arguments.close()
                raise EndpointNotFound(
                    f"the worker (pid {os.getpid()}) has no endpoint {message.endpoint!r}: an earlier worker shared it after "
                    f"loading the app"
                )
        except (SharedRPCError, OSError) as error:
            known = (
                error if isinstance(error, SharedRPCError) else CapabilityError(f"the worker cannot accept the call: {error}")
            )
            self._fail(number, executor, message.session, Failure.of(known), unused=message.chunks)
            return
        if message.pooled:
            executor.transfers.of(message.session)  # creates the transfer
        run: Run[None] = Run(
            endpoint.spec,
            None,
            arguments,
            chain=frozenset(message.chain),
            background=message.background,
            session=message.session,
            pooled=message.pooled,
            shares_slab=message.shares_slab,
            request_id=message.request_id,
            cached=message.cached,
            number=number,
        )
        self._runs[number] = executor, run
        try:
            executor.start(run, self)
        except Exception as error:  # for example, there is no thread
            arguments.close()
            self.ended(run, Failure.unexpected(error, f"a run of {endpoint.spec.name}() cannot be started"))

    def began(self, run: Run[None]) -> None:
        # Before the endpoint runs, which may end this process: a started run is not restarted elsewhere.
        self._stream.send(w.RunStarted(), run.number, at_once=True)
        run.running, run.begun_at = True, time.monotonic()
        run.report_start()

    def progressed(self, run: Run[None], progress: Progress) -> None:
        self._stream.send(w.RunProgress(progress), run.number)

    def ended(self, run: Run[None], outcome: Completed | Failure) -> None:
        executor, _ = self._runs.pop(run.number)
        failure = outcome if isinstance(outcome, Failure) else self._hand_over(executor, run, outcome)
        if failure is not None:
            self._fail(run.number, executor, run.session, failure)
        if run.running:
            run.report_end(time.monotonic() - run.begun_at, failure.code if failure is not None else "")

    def _hand_over(self, executor: InProcessExecutor, run: Run[None], produced: Completed) -> Failure | None:
        """Send a result to the broker; return the failure if that is not possible."""
        record = produced.record
        assert record is not None, "a result for a broker is published"
        transfer = executor.transfers.find(run.session)
        sent = transfer.sent if transfer is not None else set()
        body, owners = record.body(sent)
        message = w.RunFinished(
            **body,
            freed=executor.transfers.returned(run.session),
            nbytes=record.nbytes,
            device=record.device,
            private_nbytes=record.private_nbytes,
        )
        try:
            self._stream.send(message, run.number, record.skeleton, owners)
            sent.update([info.id for info in sent_infos(message.segments) if info.arena])
        except Exception as error:
            if transfer is not None:
                transfer.release_results(record.chunks)
                transfer.release(message.freed)
            return Failure.of(CapabilityError(f"cannot send the result of {run.spec.name}(): {error}"))
        finally:
            record.close()
        return None

    def _fail(
        self, number: int, executor: InProcessExecutor, session: str, failure: Failure, unused: Sequence[int] = ()
    ) -> None:
        freed = [*executor.transfers.returned(session), *unused]
        self._stream.send(w.RunFailed(failure.code, failure.text, failure.detail, freed), number, failure.pickled)

    def _stop(self, frame: Frame, message: w.Stop) -> None:
        if (found := self._runs.get(frame.request_id)) is not None:
            executor, run = found
            executor.cancel(run)
        else:
            self._memory.stop(frame.request_id)

    def _withdraw(self, frame: Frame, message: w.Withdraw) -> None:
        executor, run = self._runs.get(frame.request_id, (None, None))
        if executor is not None and run is not None and executor.withdraw(run):
            del self._runs[run.number]
            self._stream.send(w.RunWithdrawn(executor.transfers.returned(run.session)), run.number)

    def _give(self, frame: Frame, message: w.ReleaseChunks) -> None:
        self._executors[message.key].transfers.release_results(message.session, message.chunks)

    def _end_session(self, frame: Frame, message: w.SessionEnded) -> None:
        self._executors[message.key].transfers.end(message.session)

    def _reclaim(self, frame: Frame, message: w.Reclaim) -> None:
        for executor in self._executors.values():
            executor.reclaim()

    def _send(self, message: Message, number: int = 0, payload: bytes = b"", owners: tuple[FdOwner, ...] = ()) -> None:
        self._stream.send(message, number, payload, owners)

    def _on_loop(self, job: Callable[[], None]) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(job)
