"""The store: state and memory that a broker's service manager keeps for the next broker.

The manager keeps descriptors by name. It accepts the same open file only once, and keeps no order::

    state                      mutable facts: the providers, and all of each object except its memory and value
    object-<object id>         an object's skeleton and table, which may be large, and never change
    page-<object id>           the page of its revision, if any
    segment-<device>-<inode>   a file: host memory, or a copy in a lower tier
    segment-<tier>-<id>        memory of a GPU, or a copy of it in memory of its driver, all of which has one inode

The state is a memfd shared by broker and manager: it is stored once, and written in place: before the next reply to a client,
which may depend on the changes, and otherwise at the end of the loop's turn. Descriptors are stored before the state names
them, and removed once it no longer names them, so a broker killed in between leaves a consistent store. The next one drops
descriptors that the state does not name, and incomplete objects: without its page, for example, processes that have the page
would miss the writes of others.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import hashlib
import logging
import os
import stat
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import msgspec
import xxhash

from shared_rpc.broker.systemd import Notifier, Passed
from shared_rpc.memory.copies import LowerCopy
from shared_rpc.memory.records import Record
from shared_rpc.memory.revisions import recovered_page
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.records import EXPORTER_OWNED, HostCopy, SegmentInfo, Tier
from shared_rpc.protocol.specs import EndpointSpec
from shared_rpc.server.core import Core
from shared_rpc.server.state.buffers import Terms
from shared_rpc.server.state.objects import StoredObject

_log = logging.getLogger("shared_rpc.broker")

#: The name of the state in the manager's store.
STATE = "state"
#: The first bytes of the state. The number is raised with every change of the format.
_FORMAT = b"shared-rpc state 4\n"
#: The offsets of its halves; and the head of a half: the number of the write, the size, the digest.
_HALVES = (1 << 12, 1 << 31)
_HEAD = struct.Struct("<QQ16s")
#: Maximum bytes of the state.
_LIMIT = 1 << 30


class _Service(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A provider. ``serve`` has its current endpoints."""

    server_id: str
    serve: w.Serve


class _Facts(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Fields of a :class:`StoredObject`."""

    object_id: str
    kind: Literal["result", "buffer"]
    endpoint: str
    cache_key: str | None
    generation: int
    created_at: float
    idle_ttl: float | None
    managed: bool
    tier: Tier
    host_copy: HostCopy
    pinned: bool


class _Memory(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Memory of the segment with this number, by the name of its descriptor: its own, or a :class:`LowerCopy` of it."""

    name: str
    segment: int
    info: SegmentInfo
    tier: Tier
    digest: bytes


class StoredEntry(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """An object of the state. ``key`` is the provider's key, ``code`` the :func:`code_of` its endpoint.

    ``memory`` lists its segments in order, or their copies if it is cold; ``page`` is the name of its page.
    """

    key: str
    code: str
    facts: _Facts
    nbytes: int
    device: str
    private_nbytes: int
    segments: list[SegmentInfo]
    memory: list[_Memory]
    page: str | None
    terms: tuple[float | None, bool] | None

    def names(self) -> set[str]:
        """Return the names of all its descriptors."""
        own = [f"object-{self.facts.object_id}", *([self.page] if self.page is not None else [])]
        return {*own, *(memory.name for memory in self.memory)}


class StoredState(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The whole state: providers by their keys, and objects by their ids: each an :class:`StoredEntry` in MessagePack, which a
    change of another one does not encode again.
    """

    services: dict[str, _Service] = {}
    objects: dict[str, msgspec.Raw] = {}


def code_of(spec: EndpointSpec | None) -> str:
    """Return a digest that changes with an endpoint's code or options."""
    return hashlib.blake2b(msgspec.msgpack.encode(spec), digest_size=16).hexdigest() if spec is not None else ""


class StateFile:
    """A memfd that is updated in place. Its two halves are written alternately, the head of a half last.

    A half with a wrong digest was being written when its writer was killed: the other one is the latest then.

    :param fd: that of an earlier writer, which this object takes ownership of; None for a new one.
    :raises ValueError: for a file of another version.
    """

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            fd = os.memfd_create("shared-rpc-state", os.MFD_CLOEXEC)
            os.pwrite(fd, _FORMAT, 0)
        begin = os.pread(fd, len(_FORMAT), 0)
        if begin != _FORMAT:
            raise ValueError(f"another version wrote it: it begins with {begin!r}, not with {_FORMAT!r}")
        self.fd = fd
        #: The latest data of an earlier writer, empty for none.
        self._number, self.data = max(map(self._read, _HALVES))

    def _read(self, offset: int) -> tuple[int, bytes]:
        head = os.pread(self.fd, _HEAD.size, offset)
        if len(head) < _HEAD.size:
            return 0, b""
        number, nbytes, digest = _HEAD.unpack(head)
        data = os.pread(self.fd, min(nbytes, _LIMIT), offset + _HEAD.size)
        return (number, data) if xxhash.xxh3_128_digest(data) == digest else (0, b"")

    def write(self, data: bytes) -> None:
        """Replace the data.

        :raises OSError: if writing fails; the file keeps the earlier data.
        """
        number = self._number + 1
        offset = _HALVES[number % 2]
        if len(data) > _LIMIT or os.pwrite(self.fd, data, offset + _HEAD.size) != len(data):
            raise OSError(errno.ENOSPC, f"no space for a state of {len(data)} bytes")
        os.pwrite(self.fd, _HEAD.pack(number, len(data), xxhash.xxh3_128_digest(data)), offset)
        self._number = number


class FdStore:
    """The descriptors and the state that a broker stores with its service manager, if it has one.

    On the broker's loop only, except for :meth:`close`.

    :param soon: schedules a call for the end of the loop's turn.
    :param capacity: the manager's limit of descriptors, None if unknown.
    """

    def __init__(
        self,
        notifier: Notifier,
        capacity: int | None = None,
        soon: Callable[[Callable[[], None]], object] = lambda write: asyncio.get_running_loop().call_soon(write),
    ) -> None:
        self._notifier = notifier
        self._capacity = capacity
        self._soon = soon
        self._closed = not notifier.there
        self._file: StateFile | None = None
        self._state = StoredState()
        #: The names of all stored descriptors except the state, and those that the next write removes if no object has them.
        self._stored: set[str] = set()
        self._unused: set[str] = set()
        #: The names of each object's descriptors, and the number of objects that have a name.
        self._names: dict[str, set[str]] = {}
        self._uses: Counter[str] = Counter()
        #: True if the state has changed since it was written.
        self._changed = False

    def close(self) -> None:
        """Ignore changes from now on."""
        self._closed = True

    # Storing.

    def keep_service(self, serve: w.Serve, core: Core) -> None:
        """Store a provider, or its changes; and its objects from now on."""
        if self._closed:
            return
        core.objects.observer = functools.partial(self.keep, serve.key, core)
        service = _Service(core.server_id, msgspec.structs.replace(serve, endpoints=core.registry.all()))
        if self._state.services.get(serve.key) != service:
            self._state.services[serve.key] = service
            self._change()

    def remove_service(self, key: str, core: Core) -> None:
        """Remove a provider and its objects."""
        core.objects.observer = None
        for stored in core.objects:
            self.remove(stored.object_id)
        if not self._closed and self._state.services.pop(key, None) is not None:
            self._change()

    def keep(self, key: str, core: Core, stored: StoredObject) -> None:
        """Store an object, or its changes; remove it once it is unlisted. Memory that ends with a process is not stored.

        If its changes cannot be stored, the object is removed, because its description is out of date.

        :param key: its provider's key.
        """
        if not stored.listed:
            self.remove(stored.object_id)
            return
        if self._closed or any(segment.info.mechanism in EXPORTER_OWNED for segment in stored.record.segments):
            return
        try:
            found = self._describe(key, core, stored)
        except Exception as error:
            _log.error("cannot store object %s for the next broker: %s", stored.object_id, error)
            self.remove(stored.object_id)
        else:
            self._put(found)
            self._change()

    def remove(self, object_id: str) -> None:
        """Remove an object, if it is stored."""
        if not self._closed and self._pop(object_id):
            self._change()

    def _put(self, found: StoredEntry) -> None:
        object_id = found.facts.object_id
        self._pop(object_id)
        self._state.objects[object_id] = msgspec.Raw(msgspec.msgpack.encode(found))
        self._names[object_id] = found.names()
        self._uses.update(self._names[object_id])

    def _pop(self, object_id: str) -> bool:
        """Remove an object from the state; return False if it is not there."""
        if self._state.objects.pop(object_id, None) is None:
            return False
        names = self._names.pop(object_id)
        self._uses.subtract(names)
        self._unused |= names
        return True

    def _describe(self, key: str, core: Core, stored: StoredObject) -> StoredEntry:
        """Store the descriptors of an object; return its entry in the state."""
        record, memory = stored.record, []
        terms = core.buffers.table.terms(stored.object_id) if stored.kind == "buffer" else None
        for number, segment in enumerate(record.segments):
            for part in core.objects.copies.of(segment.info.id) if stored.cold else [LowerCopy(segment, "device")]:
                name = _name_of(segment.info.id, part)
                self._store(name, part.segment.fileno())
                memory.append(_Memory(name, number, part.segment.info, part.tier, part.digest))
        page = f"page-{stored.object_id}" if stored.page is not None else None
        if page is not None and stored.page is not None:
            self._store(page, stored.page.fileno())
        self._store_value(f"object-{stored.object_id}", record)
        return StoredEntry(
            key,
            code_of(core.registry.find(stored.endpoint)),
            msgspec.convert(stored, _Facts, from_attributes=True),
            record.nbytes,
            record.device,
            record.private_nbytes,
            [segment.info for segment in record.segments],
            memory,
            page,
            (terms.expires_at, terms.kept) if terms is not None else None,
        )

    def _store_value(self, name: str, record: Record) -> None:
        if name not in self._stored:
            with open(os.memfd_create(name, os.MFD_CLOEXEC), "wb") as file:
                file.write(msgspec.msgpack.encode((record.skeleton, bytes(record.table))))
                file.flush()
                self._store(name, file.fileno())

    def _store(self, name: str, fd: int) -> None:
        if name in self._stored:
            return
        self._notifier.store(name, fd)
        self._stored.add(name)
        self._unused.add(name)
        if self._capacity is not None and len(self._stored) >= self._capacity:  # the state is one more
            text = "the service manager keeps at most %d descriptors, and %d were sent: raise FileDescriptorStoreMax="
            _log.warning(text, self._capacity, len(self._stored) + 1)

    def _change(self) -> None:
        if not self._changed:
            self._changed = True
            self._soon(self.write)

    def write(self) -> None:
        """Write the state if it has changed, then remove descriptors that it does not name.

        A failed write is retried with the next change.
        """
        if not self._changed:
            return
        self._changed = False
        try:
            if self._file is None:
                self._file = StateFile()
                self._notifier.store(STATE, self._file.fd)
            self._file.write(msgspec.msgpack.encode(self._state))
        except OSError as error:
            _log.error("cannot store the broker's state with the service manager: %s", error)
            return
        for name in self._unused:
            if self._uses[name] == 0:
                del self._uses[name]
                self._stored.discard(name)
                self._notifier.remove(name)
        self._unused.clear()

    # Recovery.

    def recover(self, passed: Iterable[Passed], serve: Callable[[w.Serve, str], Core]) -> None:
        """Serve an earlier broker's providers and objects again. Unusable ones are logged and removed.

        :param serve: serves a provider, with the id of its earlier server.
        """
        fds: dict[str, int] = {}
        for name, fd in passed:
            if fds.setdefault(name, fd) != fd:
                os.close(fd)
        objects = self._recover_state(fds.pop(STATE, None))
        self._stored, self._unused = set(fds), set(fds)
        for found in objects:
            self._put(found)
        cores = {key: serve(service.serve, service.server_id) for key, service in list(self._state.services.items())}
        for found in sorted(objects, key=lambda found: found.facts.created_at):
            try:
                if found.key not in cores:
                    raise ValueError(f"its provider {found.key!r} is not stored")
                cores[found.key].recover(*_recovered(found, self._state.services[found.key].serve.endpoints, fds))
            except (ValueError, OSError) as error:
                _log.error("the stored object %s is unusable and is removed: %s", found.facts.object_id, error)
                self._pop(found.facts.object_id)
        for core in cores.values():
            core.objects.settle()  # the budget may have changed
        for fd in fds.values():
            os.close(fd)
        if not self._closed:
            self._change()

    def _recover_state(self, fd: int | None) -> list[StoredEntry]:
        """Take an earlier broker's state over; return its objects, which are not part of the state yet."""
        if fd is None:
            return []
        try:
            file = StateFile(fd)
            state = msgspec.msgpack.decode(file.data, type=StoredState) if file.data else StoredState()
            objects = [msgspec.msgpack.decode(encoded, type=StoredEntry) for encoded in state.objects.values()]
        except (ValueError, OSError) as error:
            _log.error("the stored state is unusable and is removed: %s", error)
            os.close(fd)
            self._notifier.remove(STATE)
            return []
        self._file, self._state.services = file, state.services
        return objects


def _name_of(segment_id: str, part: LowerCopy) -> str:
    """Return the name of a segment's memory in a tier. Host memory that is its own copy has one name in both."""
    found = os.fstat(part.segment.fileno())
    return f"segment-{found.st_dev}-{found.st_ino}" if stat.S_ISREG(found.st_mode) else f"segment-{part.tier}-{segment_id}"


def _recovered(
    found: StoredEntry, endpoints: Iterable[EndpointSpec], fds: Mapping[str, int]
) -> tuple[StoredObject, Terms | None, list[tuple[SegmentInfo, LowerCopy]]]:
    """Return an object with duplicates of its descriptors, a buffer's terms, and the copies of a cold one's segments.

    :raises ValueError: if one is missing or unusable.
    """
    facts = found.facts
    missing = sorted(found.names() - fds.keys())
    if missing or {memory.segment for memory in found.memory} != set(range(len(found.segments))):
        raise ValueError(f"its {', '.join(missing) or 'copies'} are not stored")
    value = fds[f"object-{facts.object_id}"]
    skeleton, table = msgspec.msgpack.decode(os.pread(value, os.fstat(value).st_size, 0), type=tuple[bytes, bytes])
    made = _duplicates([(memory.info, fds[memory.name]) for memory in found.memory])
    copies: list[tuple[SegmentInfo, LowerCopy]] = []
    segments = made
    if facts.tier != "device":
        segments = [Segment(info) for info in found.segments]
        parts = zip(found.memory, made, strict=True)
        copies = [(found.segments[part.segment], LowerCopy(copy, part.tier, part.digest)) for part, copy in parts]
    specs = {spec.name: spec for spec in endpoints}
    stored = StoredObject(
        record=Record(skeleton, table, segments, found.nbytes, found.device, private_nbytes=found.private_nbytes),
        last_accessed_at=facts.created_at,
        stale=facts.kind == "result" and found.code != code_of(specs.get(facts.endpoint)),
        page=recovered_page(os.dup(fds[found.page])) if found.page is not None else None,
        **msgspec.structs.asdict(facts),
    )
    return stored, Terms(*found.terms) if found.terms is not None else None, copies


def _duplicates(parts: Iterable[tuple[SegmentInfo, int]]) -> list[Segment]:
    made: list[Segment] = []
    try:
        for info, fd in parts:
            if info.mechanism in ("memfd", "file") and os.fstat(fd).st_size < info.nbytes:
                raise ValueError(f"its segment {info.id} has fewer than {info.nbytes} bytes")
            made.append(Segment.owning(info, os.dup(fd)))
    except BaseException:
        for segment in made:
            segment.close()
        raise
    return made
