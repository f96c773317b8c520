"""The server without its sockets: endpoints, calls, tasks, objects and leases, driven on one event loop.

Every caller, in this process or another, uses the same handlers, see :mod:`shared_rpc.server.requests`. The core handles
records and an executor; it imports no torch and never decodes a skeleton.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import anyio

from shared_rpc.errors import ConfigurationError
from shared_rpc.execution.device_memory import DeviceMemory
from shared_rpc.execution.endpoints import Registry
from shared_rpc.execution.run import Executor
from shared_rpc.memory.backends.choice import makers
from shared_rpc.memory.copies import LowerCopy
from shared_rpc.memory.devices import resolve_host_quota
from shared_rpc.memory.spill import SpillDirectory
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.infos import MechanismInfo, ReloadedServiceInfo, ReloadInfo, ServerInfo, StopInfo
from shared_rpc.protocol.options import ServeOptions
from shared_rpc.protocol.records import SegmentInfo
from shared_rpc.protocol.specs import EndpointSpec
from shared_rpc.server.buffers import Buffers
from shared_rpc.server.calls import Calls
from shared_rpc.server.capacity import Capacity
from shared_rpc.server.generations import Generations
from shared_rpc.server.holdings import Holdings
from shared_rpc.server.observing import Listeners
from shared_rpc.server.records import Records
from shared_rpc.server.requests import Caller, Requests, handles
from shared_rpc.server.runs import Runs
from shared_rpc.server.sessions import Sessions
from shared_rpc.server.shared import State
from shared_rpc.server.sources import Sources
from shared_rpc.server.state.buffers import BufferTable, Terms
from shared_rpc.server.state.descriptors import Descriptors
from shared_rpc.server.state.leases import LeaseTable
from shared_rpc.server.state.objects import ObjectStore, StoredObject
from shared_rpc.server.sweeper import BootClock, Sweeper
from shared_rpc.server.tasks import Tasks
from shared_rpc.server.tiers import Tiers
from shared_rpc.server.waiting import Waiter

if TYPE_CHECKING:
    from shared_rpc.server.joiner import Joiner

_log = logging.getLogger("shared_rpc.server")

_DEFAULTS = ServeOptions()
#: Maximum number of runs in one reply.
_MOST_RUNS = 1000


class Core:
    """A server without its connections.

    :param registry: the endpoints; it may grow while the server runs.
    :param device: the id of the device of results.
    :param options: of the whole server; those of its devices and socket are passed resolved, as the parameters below.
    :param quotas: maximum bytes of objects, by device.
    :param memory: allocates buffers and restored objects; by default in this process.
    :param spill: the directory for objects evicted to files, None for no files.
    :param socket_path: the socket for other processes, if any.
    :param server_id: the id of an earlier server whose objects this one is about to recover.
    :param descriptors: those of the process.
    :param cluster: the cluster to join, by a process of its own, see :mod:`shared_rpc.server.joiner`; ``""`` for none. With
        one, misses wait for a source of records from the start on.
    :param mechanism: how the executor's process makes segments, for information: see
        :mod:`shared_rpc.memory.backends.choice`.
    :raises ConfigurationError: if a package that the cluster needs is not installed.
    """

    def __init__(
        self,
        registry: Registry,
        executor: Executor,
        device: str,
        *,
        options: ServeOptions = _DEFAULTS,
        quotas: Mapping[str, int] | None = None,
        memory: DeviceMemory | None = None,
        spill: SpillDirectory | None = None,
        mechanism: MechanismInfo | None = None,
        socket_path: str | None = None,
        server_id: str | None = None,
        descriptors: Descriptors | None = None,
        cluster: str = "",
    ) -> None:
        self.server_id = server_id or secrets.token_hex(8)
        self.device = device
        self.mechanism = mechanism
        self.socket_path = socket_path
        self.registry = registry
        self.transfers = executor.transfers
        self._joiner: Joiner | None = None
        if cluster:
            from shared_rpc.server.joiner import Joiner

            assert socket_path is not None, "a server that others join has a socket"
            self._joiner = Joiner(cluster, socket_path)
        self._listeners = Listeners(self.server_id)
        self._clock = clock = BootClock()
        self._sweeper = Sweeper(clock)
        self.now, self.wake_within = clock.now, self._sweeper.wake_within
        self.leases = LeaseTable(self._listeners.given, self._listeners.ended)
        self.objects = ObjectStore(self.leases, clock, self._dropped, options.max_bytes, self._added, descriptors)
        self.sessions = Sessions(self.server_id, self.objects, self.leases, self.end_session, options.client_code)
        self.capacity = Capacity(
            self.objects,
            self.leases,
            clock,
            self._sweeper.wake_within,
            self.sessions.pid_of,
            quotas or {},
            when_full=options.when_full,
            host_quota=resolve_host_quota(options.host_quota),
        )
        self.state = state = State(
            self.server_id,
            device,
            clock,
            registry,
            executor,
            memory or DeviceMemory(device),
            self.objects,
            self.leases,
            BufferTable(self.objects, self.leases, clock),
            self.sessions,
            self.capacity,
            self._listeners,
            self._sweeper.wake_within,
        )
        self.release = state.release
        self.tiers = Tiers(state, spill)
        self.buffers = Buffers(state, self.tiers)
        self.generations = Generations(state, self.tiers)
        self.runs = Runs(state, self.tiers, self.generations)
        self.records = Records(state, self.tiers, self.generations, self.runs)
        self.sources = Sources(state, self.runs, self.records, self._joiner, options.source_grace)
        # At less than one task per microsecond, task ids of an earlier server are never reused.
        first = int(clock.now() * 1e6) if server_id is not None else 1
        self.tasks = Tasks(state, self.runs, self.tiers, options, first)
        self.calls = Calls(state, self.runs, self.generations, self.tasks)
        self.holdings = Holdings(state, self.tiers)
        self.requests = Requests(
            state.waits,
            self,
            self.calls,
            self.holdings,
            self.tasks,
            self.tiers,
            self.buffers,
            self.generations,
            self.records,
            self.sources,
        )
        self._began = clock.now()
        self.started_at = clock.unix(self._began)
        self._executor = executor
        #: Reloads the code for a client, if endpoints run in replaceable processes: see :class:`Reload`.
        self.on_reload: Callable[[str], Awaitable[ReloadInfo]] | None = None
        #: Stops the server for a client, if the process only serves: called with the id of the client's session and
        #: :attr:`StopServer.if_idle`, it returns what the server held.
        self.on_stop: Callable[[str, bool], StopInfo] | None = None
        #: Called before replies are sent to clients in other processes.
        self.before_replies: Callable[[], None] = lambda: None
        #: Return the pids of the server's other processes.
        self.own_processes: Callable[[], Collection[int]] = tuple

    async def run(self, *, started: anyio.Event) -> None:
        """Execute calls until cancelled. Then notify every waiter, and drop every object."""
        try:
            if self._joiner is not None:
                self._joiner.start(self.sources.token)
            started.set()
            await self._sweeper.run(
                self.objects.expire,
                self.tasks.table.expire,
                self.buffers.table.expire,
                self.sources.expire,
                self.capacity.expire,
                lambda: self.objects.descriptors.intake.expire(self.now()),
            )
        finally:
            self.stop()

    def stop(self) -> None:
        """Release every waiter and drop every object. Later calls are refused."""
        self.state.waits.stop()
        self.runs.stop()
        if self._joiner is not None:
            self._joiner.ask_to_stop()
        self.objects.clear()
        self.transfers.close()

    def close(self) -> None:
        """End the threads, after the loop has ended."""
        self.state.memory.close()
        if self._joiner is not None:
            self._joiner.close()

    # Requests about the server.

    @handles(m.Ping)
    def ping(self, caller: Caller, message: m.Ping) -> m.Answer:
        """Answer."""
        return m.Answer.of(None)

    @handles(m.Goodbye)
    def goodbye(self, caller: Caller, message: m.Goodbye) -> None:
        """Record that the client ends its session on purpose."""
        self.sessions.closing(caller.session)

    @handles(m.GetServerInfo)
    def get_info(self, caller: Caller, message: m.GetServerInfo) -> m.Answer:
        """Describe the server."""
        return m.Answer.of(self.info(caller.session))

    @handles(m.ListEndpoints)
    def list_endpoints(self, caller: Caller, message: m.ListEndpoints) -> m.Answer:
        """Return the endpoints."""
        return m.Answer.of(self.registry.all())

    @handles(m.ListSessions)
    def list_sessions(self, caller: Caller, message: m.ListSessions) -> m.Answer:
        """Describe the sessions."""
        return m.Answer.of(self.sessions.infos())

    @handles(m.ListRuns)
    def list_runs(self, caller: Caller, message: m.ListRuns) -> m.Answer:
        """Describe the runs that have not ended."""
        return m.Answer.of(self.runs.infos(min(max(message.limit, 1), _MOST_RUNS)))

    @handles(m.GetStatistics)
    def get_statistics(self, caller: Caller, message: m.GetStatistics) -> m.Answer:
        """Return the counts of calls by endpoint."""
        return m.Answer.of(self.runs.statistics.infos())

    @handles(m.Reload)
    async def reload(self, caller: Caller, message: m.Reload) -> m.Answer:
        """Reload the app's code; continues if the caller leaves."""
        if self.on_reload is None:
            raise ConfigurationError(
                f"this server (pid {os.getpid()}) runs its endpoints in its own process, whose code cannot be reloaded: "
                f"start it with 'shared-rpc serve'"
            )
        return m.Answer.of(await self.on_reload(message.objects))

    @handles(m.StopServer)
    def stop_for(self, caller: Caller, message: m.StopServer) -> m.Answer:
        """Stop the server, if its process only serves."""
        if self.on_stop is None:
            raise ConfigurationError(
                f"this server is part of process {os.getpid()}, which may run other code too: end the process with "
                f"'kill {os.getpid()}' or Ctrl-C"
            )
        return m.Answer.of(self.on_stop(caller.session, message.if_idle))

    # Ends of sessions and requests.

    def leave(self, waiter: Waiter) -> None:
        """Forget a waiter that has left, without notifying it."""
        if waiter.observed is not None:
            waiter.observed.left()
        self.runs.leave(waiter)

    def end_session(self, session: str, clean: bool) -> None:
        """Release everything that the session held.

        :param clean: False for a session that ends without a goodbye.
        """
        self.transfers.end(session)
        self.sources.end_session(session)
        self.state.settle(*self.leases.end_session(session, reclaimed=not clean))

    def replace_endpoints(self, specs: Sequence[EndpointSpec], objects: str) -> ReloadedServiceInfo:
        """Replace the endpoints, and report the effect on earlier results.

        :param objects: the endpoints whose cached results are dropped: ``"changed"``, ``"all"`` or ``"none"``. Clients keep the
            results that they hold, which are ``stale`` if their endpoint has changed.
        """
        new = {spec.name: spec for spec in specs}
        earlier = self.registry.all()
        changed = {spec.name for spec in earlier if new.get(spec.name) != spec}
        for stored in self.objects:
            stored.stale = stored.stale or stored.endpoint in changed
        dropped = 0
        for spec in earlier:
            if objects == "all" or (objects == "changed" and spec.name in changed):
                dropped += self.calls.drop(spec.name)
            elif spec.name in changed:
                self.state.runs.detach(endpoint=spec.name)
        self.registry.replace(specs)
        return {"endpoints": list(new), "changed": sorted(changed), "dropped": dropped}

    def recover(self, stored: StoredObject, terms: Terms | None, copies: Iterable[tuple[SegmentInfo, LowerCopy]] = ()) -> None:
        """Keep an object of an earlier server with this id; its leases ended with that server's sessions.

        :param terms: those of a buffer.
        :param copies: for a cold object, its copies with the segments that they are copies of. This object takes ownership.
        """
        for info, copy in copies:
            if self.objects.copies.get(info.id, copy.tier) is None:
                self.objects.copies.add(info, copy)
            else:  # another object's, in the same segment
                copy.close()
        if terms is None:
            self.objects.recover(stored)
        else:
            self.buffers.table.recover(stored, terms)

    def drop_bound(self, pid: int) -> None:
        """Drop the objects whose memory belonged to an ended process: it can no longer be mapped."""
        for stored in self.objects:
            if pid in makers(stored.record.segments):
                _log.warning("object %s of %s ended with the process that made its memory", stored.object_id, stored.endpoint)
                self.state.drop(stored)

    def apart(self, asker: str = "") -> set[str]:
        """Return the sessions that do not count as users: of the server's own processes, of its source, and the asker's."""
        return {*self.sessions.of_processes({*self.own_processes(), *self.sources.pids}), *filter(None, [asker])}

    def info(self, asker: str = "") -> ServerInfo:
        """Describe the server.

        :param asker: the session of the asking client, excluded from the count of clients.
        """
        return {
            "server_id": self.server_id,
            "pid": os.getpid(),
            "device": self.device,
            "mechanism": self.mechanism,
            "started_at": self.started_at,
            "endpoints": [spec.name for spec in self.registry.all()],
            "objects": len(self.objects),
            "buffers": len(self.buffers.table),
            "nbytes": self.objects.nbytes,
            "copies": self.objects.copies.usage(),
            "waiting": len(self.capacity),
            "descriptors": self.objects.descriptors.info(),
            "leases": len(self.leases),
            "pools": self.transfers.info(),
            "running": len(self.state.runs),
            "tasks": self.tasks.table.counts(),
            "socket_path": self.socket_path,
            "uptime": self._clock.now() - self._began,
            "clients": len(self.sessions.ids - self.apart(asker)),
            "sessions": len(self.sessions),
            "ready": True,
            "source": self.sources.info(),
            **self.runs.statistics.totals(),
            **self._executor.info(),
        }

    def _added(self, stored: StoredObject) -> None:
        self._listeners.added(stored)
        if stored.host_copy == "at_build":
            self.tiers.copy_ahead(stored)

    def _dropped(self, stored: StoredObject) -> None:
        stored.live = None
        stored.close()
        if any(self.objects.segment(segment.info.id) is None for segment in stored.record.segments):
            self._executor.reclaim()  # otherwise other objects lie in all of its segments
        self._listeners.freed(stored)
        self.capacity.changed()
