"""Asks the server, again and again, in a thread of its own: whoever waits for a server does not keep keys waiting."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from shared_rpc import Client
from shared_rpc.cli.processes import command_of
from shared_rpc.cli.top.controls import Action
from shared_rpc.cli.top.snapshot import Snapshot
from shared_rpc.errors import SharedRPCError

__all__ = ["Carried", "Event", "Failed", "Sampler", "Trouble", "look", "pause"]

#: Of the time at most one part in so many is spent on answers: a server with many objects is not slowed down by being watched.
_SHARE = 10
#: Seconds to wait for what a device's driver says, before what it said last is shown; and where it said nothing yet.
_DEVICE_PATIENCE, _FIRST_DEVICE_PATIENCE = 0.2, 1.0


class Trouble(NamedTuple):
    """Why there is no snapshot now."""

    text: str


class Carried(NamedTuple):
    """What became of an action."""

    text: str


class Failed(NamedTuple):
    """A defect: to be raised where somebody sees it."""

    error: BaseException


Event = Snapshot | Trouble | Carried | Failed


def look(client: Client, devices: list[dict[str, Any]], commands: dict[int, str]) -> Snapshot:
    """All there is to know of a server now.

    :param devices: what ``list_devices`` told.
    :param commands: what is known of processes already; brought up to date.
    """
    server, objects = client.get_server_info(), client.list_objects()
    runs, sessions, endpoints = client.list_runs(), client.list_sessions(), client.get_statistics()
    held = (holder["pid"] for item in objects for holder in item["holders"])
    _learn(commands, {*held, *(session["pid"] for session in sessions)})
    return Snapshot(time.monotonic(), time.time(), server, objects, devices, runs, sessions, endpoints, dict(commands))


def pause(interval: float, answered_in: float) -> float:
    """Seconds until the next look, after one that the server took some seconds to answer."""
    return max(interval, _SHARE * answered_in)


def _learn(commands: dict[int, str], pids: Iterable[int]) -> None:
    """Read the command lines of processes that are new, and forget those that have gone."""
    for pid in set(commands) - set(pids):
        del commands[pid]
    for pid in set(pids) - set(commands):
        commands[pid] = command_of(pid, folder=False)


class Sampler:
    """Tells snapshots, and what keeps it from them, until it is closed.

    :param find: a client of the server to look at, or why there is none as a :class:`SharedRPCError`.
    :param interval: seconds from one snapshot to the next.
    :param tell: called in the thread of the sampler.
    """

    def __init__(self, find: Callable[[str], Client], interval: float, tell: Callable[[Event], None]) -> None:
        self._find = find
        self._interval = interval
        self._tell = tell
        self._actions: queue.SimpleQueue[Action] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._closed = False
        self._client: Client | None = None
        #: The socket of the server there was last.
        self._path = ""
        self._devices: list[dict[str, Any]] = []
        self._asking: threading.Thread | None = None
        self._commands: dict[int, str] = {}
        self._thread = threading.Thread(target=self._run, name="shared-rpc-top", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def carry_out(self, action: Action) -> None:
        """Ask the server for something, and look at once what has become of it."""
        self._actions.put(action)
        self._wake.set()

    def close(self) -> None:
        """Nothing is told any more. Does not wait for a server that does not answer."""
        self._closed = True
        self._wake.set()

    def _run(self) -> None:
        try:
            while not self._closed:
                answered_in = self._step()
                if not self._closed:
                    self._wake.wait(pause(self._interval, answered_in))
                    self._wake.clear()
        except BaseException as error:
            self._tell(Failed(error))
        finally:
            self._leave()

    def _step(self) -> float:
        """Look once: the seconds that the server took to answer."""
        try:
            if self._client is None:
                # What was asked for while no server was there was meant for the one that has gone.
                while not self._actions.empty():
                    self._tell(Carried(f"{self._actions.get().label}: not done, because the server had gone"))
                self._client = self._find(self._path)
                self._path, self._devices = self._client.socket_path, []
            while not self._actions.empty():
                self._tell(_carried_out(self._client, self._actions.get()))
            devices = self._ask_devices(self._client)
            begin = time.monotonic()
            self._tell(look(self._client, devices, self._commands))
            return time.monotonic() - begin
        except (SharedRPCError, OSError) as error:
            self._leave()
            self._tell(Trouble(f"lost the server, and looking for it: {error}" if self._path else str(error)))
            return 0.0

    def _ask_devices(self, client: Client) -> list[dict[str, Any]]:
        """What is known of the devices. A GPU's memory is asked of a worker, which may be busy for long."""
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

    def _leave(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with suppress(SharedRPCError, OSError):
                client.close()


def _carried_out(client: Client, action: Action) -> Carried:
    """Do it, and tell what became of it. That the server has gone meanwhile is for the look that follows."""
    try:
        if action.kind == "buffer":
            done = client.free_buffer(action.target)
        elif action.kind == "object":
            done = client.invalidate_object(action.target) > 0
        else:
            count = client.invalidate_endpoint_cache(action.target)
            return Carried(f"{count} cached result{'' if count == 1 else 's'} of {action.label} dropped")
    except SharedRPCError as error:
        return Carried(f"{action.label}: {error}")
    verb = "freed" if action.kind == "buffer" else "dropped from the cache"
    return Carried(f"{action.label} {verb}" if done else f"{action.label} had gone already")
