"""Snapshots of a server, the rates between two of them, and actions on the server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Literal, NamedTuple

from shared_rpc import Client
from shared_rpc.cli.rendering import command_of, several
from shared_rpc.errors import SharedRPCError
from shared_rpc.protocol.infos import DeviceInfo, EndpointStatistics, ListedObjectInfo, RunInfo, ServerInfo, SessionInfo

#: At most this fraction of the time is spent on answers: watching a server with many objects must not slow it down.
_SHARE = 10
#: Seconds to wait for a device driver's facts before the latest known ones are shown; and if none are known yet.
_DEVICE_PATIENCE, _FIRST_DEVICE_PATIENCE = 0.2, 1.0


@dataclass(frozen=True)
class Snapshot:
    """All shown facts of a server.

    :param at: seconds of a monotonic clock, for rates.
    :param wall: Unix seconds, for ages.
    :param server: the reply of ``get_server_info``; the other fields are likewise named after their requests.
    :param endpoints: counters since the server's start, by endpoint.
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
    commands: Mapping[int, str] = field(default_factory=dict)

    def is_of(self, other: Snapshot) -> bool:
        """Return True if both are of one server process."""
        # A server under a service manager keeps its id when it is restarted, and counts from zero.
        which = itemgetter("server_id", "pid", "started_at")
        return bool(which(self.server) == which(other.server))


class Rates(NamedTuple):
    """Events per second of an endpoint, between two snapshots."""

    calls: float
    hits: float
    joined: float
    builds: float
    errors: float


def rates(earlier: Snapshot | None, later: Snapshot) -> dict[str, Rates]:
    """Compute rates by endpoint; none without an earlier snapshot of the same server."""
    if earlier is None or later.at <= earlier.at or not later.is_of(earlier):
        return {}
    seconds = later.at - earlier.at
    before = earlier.endpoints
    return {
        name: Rates(
            *(max(now - then, 0) / seconds for now, then in zip(_counts(counts), _counts(before.get(name)), strict=True))
        )
        for name, counts in later.endpoints.items()
    }


def _counts(counts: EndpointStatistics | None) -> Sequence[int]:
    return itemgetter(*Rates._fields)(counts) if counts is not None else (0,) * len(Rates._fields)


def pause(interval: float, answered_in: float) -> float:
    """Compute the seconds until the next poll, given the duration of the last one."""
    return max(interval, _SHARE * answered_in)


class Action(NamedTuple):
    """A request to drop something. ``target`` is the id of an object or a buffer, or the name of an endpoint.

    ``seen`` is the snapshot on the screen when the action was chosen.
    """

    kind: Literal["object", "endpoint", "buffer"]
    target: str
    label: str
    seen: Snapshot


class ServerWatcher:
    """Client of the watched server, or of its successor. Used in one thread at a time.

    :param find: returns a client of the server to watch, given the socket of the previous one. It raises a
        :class:`SharedRPCError` with the reason if there is none.
    """

    def __init__(self, find: Callable[[str], Client]) -> None:
        self._find = find
        self._client: Client | None = None
        self._path = ""
        self._latest: Snapshot | None = None
        self._devices: list[DeviceInfo] = []
        self._asking: threading.Thread | None = None
        self._commands: dict[int, str] = {}

    def poll(self) -> Snapshot:
        """Query all facts of the server.

        :raises SharedRPCError: if no server answers, with the loss or the way to start one.
        """
        try:
            if self._client is None:
                self._client = self._find(self._path)
                self._path, self._devices = self._client.socket_path, []
            self._latest = self._ask(self._client)
        except (SharedRPCError, OSError) as error:
            self.close()
            raise SharedRPCError(f"lost the server, and looking for it: {error}" if self._path else str(error)) from error
        return self._latest

    def execute(self, action: Action) -> str:
        """Execute an action and return its result as a text; but never on another server than the one on the screen."""
        client = self._client
        if client is None or self._latest is None or not self._latest.is_of(action.seen):
            return f"{action.label}: not done, because the server had gone"
        try:
            if action.kind == "endpoint":
                count = client.invalidate_endpoint_cache(action.target)
                return f"{several(count, 'cached result')} of {action.label} dropped"
            if action.kind == "buffer":
                done, verb = client.free_buffer(action.target), "freed"
            else:
                done, verb = client.invalidate_object(action.target) > 0, "dropped from the cache"
        except (SharedRPCError, OSError) as error:
            return f"{action.label}: {error}"
        return f"{action.label} {verb}" if done else f"{action.label} had gone already"

    def close(self) -> None:
        """Close the connection. The next poll searches for a server."""
        client, self._client, self._latest = self._client, None, None
        if client is not None:
            with suppress(SharedRPCError, OSError):
                client.close()

    def _ask(self, client: Client) -> Snapshot:
        devices = self._ask_devices(client)
        server, objects = client.get_server_info(), client.list_objects()
        runs, sessions, endpoints = client.list_runs(), client.list_sessions(), client.get_statistics()
        pids = {holder["pid"] for item in objects for holder in item["holders"]} | {one["pid"] for one in sessions}
        # A command line is read once for each process.
        self._commands = {pid: self._commands.get(pid) or command_of(pid, folder=False) for pid in pids}
        now = time.monotonic(), time.time()
        return Snapshot(*now, server, objects, devices, runs, sessions, endpoints, self._commands)

    def _ask_devices(self, client: Client) -> list[DeviceInfo]:
        """Return the known facts of the devices. A GPU's are queried from a worker, which may be busy for long."""
        if self._asking is None or not self._asking.is_alive():

            def ask() -> None:
                with suppress(SharedRPCError, OSError):
                    devices = client.list_devices()
                    if client is self._client:
                        self._devices = devices

            self._asking = threading.Thread(target=ask, name="shared-rpc-top-devices", daemon=True)
            self._asking.start()
        self._asking.join(_DEVICE_PATIENCE if self._devices else _FIRST_DEVICE_PATIENCE)
        return self._devices
