"""Snapshots of a server, and the rates between two of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from shared_rpc import Client
from shared_rpc.cli.rendering import command_of, several
from shared_rpc.errors import SharedRPCError
from shared_rpc.protocol.infos import DeviceInfo, EndpointStatistics, ListedObjectInfo, RunInfo, ServerInfo, SessionInfo

#: A request of the user: it returns the number of dropped objects.
Action = Callable[[Client], int]


class Rates(NamedTuple):
    """Events per second of an endpoint, between two snapshots."""

    calls: float
    hits: float


@dataclass(frozen=True)
class Snapshot:
    """All facts of a server that are shown.

    :param at: seconds of a monotonic clock, for rates.
    :param wall: Unix seconds, for ages.
    :param server: the reply of ``get_server_info``; the other fields are likewise named after their requests.
    :param sessions: those of other processes.
    :param endpoints: counters since the server's start, by endpoint.
    :param rates: rates by endpoint since the previous snapshot; empty for the first one.
    :param commands: command lines by process id, of the known processes.
    """

    at: float
    wall: float
    server: ServerInfo
    objects: Sequence[ListedObjectInfo] = ()
    devices: Sequence[DeviceInfo] = ()
    runs: Sequence[RunInfo] = ()
    sessions: Sequence[SessionInfo] = ()
    endpoints: Mapping[str, EndpointStatistics] = field(default_factory=dict)
    rates: Mapping[str, Rates] = field(default_factory=dict)
    commands: Mapping[int, str] = field(default_factory=dict)


def rates(earlier: Snapshot, at: float, endpoints: Mapping[str, EndpointStatistics]) -> dict[str, Rates]:
    """Compute rates by endpoint. New endpoints, and all endpoints of a restarted server, count from zero."""
    found = {}
    for name, now in endpoints.items():
        before = earlier.endpoints.get(name, {"calls": 0, "hits": 0})
        calls, hits = now["calls"] - before["calls"], now["hits"] - before["hits"]
        found[name] = Rates(max(calls, 0) / (at - earlier.at), max(hits, 0) / (at - earlier.at))
    return found


class ServerWatcher:
    """A client of the watched server or its successor. One thread at a time may poll.

    :param find: returns a client of the server to watch, given the socket of the previous one. It raises a
        :class:`SharedRPCError` with the reason if there is none.
    """

    def __init__(self, find: Callable[[str], Client]) -> None:
        self._find = find
        self._client: Client | None = None
        self._path = ""
        self._latest: Snapshot | None = None

    def poll(self) -> Snapshot:
        """Query the server; return a snapshot.

        :raises SharedRPCError: if no server answers; says that the server was lost, or how to start one.
        """
        try:
            if self._client is None:
                self._client = self._find(self._path)
            self._latest = self._ask(self._client)
            self._path = self._client.socket_path
        except (SharedRPCError, OSError) as error:
            self.close()
            raise SharedRPCError(f"server lost; reconnecting: {error}" if self._path else str(error)) from error
        return self._latest

    def execute(self, action: Action, server_id: str) -> str:
        """Execute an action, in no server but the one that the user saw; return the result as a text for the user."""
        client = self._client
        try:
            if client is None or client.get_server_info()["server_id"] != server_id:
                return "not done: the server has ended"
            return f"{several(action(client), 'object')} dropped"
        except (SharedRPCError, OSError) as error:
            return str(error)

    def close(self) -> None:
        """Close the connection. The next poll searches for a server."""
        client, self._client, self._latest = self._client, None, None
        if client is not None:
            with suppress(SharedRPCError, OSError):
                client.close()

    def _ask(self, client: Client) -> Snapshot:
        devices, known = (self._latest.devices, self._latest.commands) if self._latest is not None else ((), {})
        with suppress(SharedRPCError, OSError):  # the worker of a GPU may be too busy to answer
            devices = client.list_devices()
        server, objects = client.get_server_info(), client.list_objects()
        runs, endpoints = client.list_runs(), client.get_statistics()
        sessions = [one for one in client.list_sessions() if one["pid"] != os.getpid()]
        pids = {holder["pid"] for item in objects for holder in item["holders"]} | {one["pid"] for one in sessions}
        # A command line is read once for each process.
        commands = {pid: known.get(pid) or command_of(pid) for pid in pids}
        at = time.monotonic()
        speed = rates(self._latest, at, endpoints) if self._latest is not None else {}
        return Snapshot(at, time.time(), server, objects, devices, runs, sessions, endpoints, speed, commands)
