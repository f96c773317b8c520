"""Memory named by another process: this process gets it from the server, see :mod:`shared_rpc.codec.reducers`."""

from __future__ import annotations

import functools
import weakref
from typing import Any, cast

from shared_rpc.client.results import ReceivedResult, result_of
from shared_rpc.client.steps import Operation, Request, Work
from shared_rpc.errors import ConnectError, ProtocolError, StaleHandleError
from shared_rpc.forks import after_fork, fork_safe_lock
from shared_rpc.lifecycle.finalizer import FINALIZER
from shared_rpc.memory.mapping import MAPPINGS, MappingHold
from shared_rpc.operations.binding import make_handle
from shared_rpc.operations.client import Client
from shared_rpc.operations.handles import Handle
from shared_rpc.protocol import generations as g

#: This process's leases on such memory, by socket, object and segment: each lasts as long as a tensor over it.
_leases: weakref.WeakValueDictionary[tuple[str, str, str], Handle[dict[str, MappingHold]]] = weakref.WeakValueDictionary()
#: Their clients, by socket. A client ends with its last lease, so that this process does not keep an idle server running.
_clients: weakref.WeakValueDictionary[str, Client] = weakref.WeakValueDictionary()
#: Seconds for which a new lease keeps the client at least: the next message uses the same session.
_LINGER = 2.0
_lock = fork_safe_lock()
after_fork(_leases.clear)  # the session is the parent's


def memory_of(client: Client, object_id: str, segment: str) -> Operation[Handle[dict[str, MappingHold]]]:
    """Return a handle whose value is the memory of an object, by the names of its segments.

    :param object_id: ``""`` for the object of the segment.
    """
    what = f"the memory of object {object_id or f'with segment {segment}'}"
    result = result_of(what, (yield Request(g.GetObject(object_id, segment=segment), what)))
    message = result.message
    MAPPINGS.servers[message.owner] = client.socket_path
    with result:
        holds = yield Work(functools.partial(_held, result))
    return cast(Handle[dict[str, MappingHold]], (yield from make_handle(client, message, holds)))


def _held(result: ReceivedResult) -> dict[str, MappingHold]:
    with MAPPINGS.attach(result.segments, owner=result.message.owner) as mappings:
        return {mapping.info.name: MAPPINGS.hold(mapping) for mapping in mappings}


def taken_from(socket_path: str, object_id: str, segment: str) -> tuple[MappingHold, Handle[Any]]:
    """Return a segment of an object, mapped, and this process's lease on the object, of the handle's lifetime.

    :raises StaleHandleError: if the server no longer owns the object.
    :raises ConnectError: if there is no server at the socket.
    """
    key = (socket_path, object_id, segment if not object_id else "")
    with _lock:
        handle = _leases.get(key)
        client = _clients.get(socket_path)
        if client is None:
            client = _clients[socket_path] = Client(socket_path=socket_path)
    if handle is None:
        try:
            handle = client._run(memory_of(client, object_id, segment))
        except ConnectError as error:
            error.add_note(
                "a tensor in shared memory is sent as the socket of its server: in another container, mount the folder of the "
                "socket at the same path"
            )
            raise
        except StaleHandleError as error:
            error.add_note(
                "a tensor in shared memory is sent by name: until it is received, its sender or another process must hold the "
                "object, or the server must cache it; a buffer can be made with ttl= or keep=True"
            )
            raise
        with _lock:
            handle = _leases.setdefault(key, handle)
        FINALIZER.submit(lambda: client, after=_LINGER)
    hold = handle.value.get(segment)
    if hold is None:
        raise ProtocolError(f"object {handle.object_id} of the server at {socket_path} does not lie in segment {segment}")
    return hold, handle
