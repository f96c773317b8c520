"""The entries that a broker has its service manager keep, so that the next broker begins with them.

One entry of the manager's store for each thing, because the manager takes the same open file only once, tells no order, and
removes by name alone::

    service-<digest of the key>-<revision>   a worker's first message about a provider, and the server's id
    object-<object id>-<revision>            a record without its memory: of a cached result, or of a buffer with its terms
    segment-<segment id>                     memory, once for all the objects that lie in it
    copy-<tier>-<segment id>                 the bytes of memory in a lower tier, where the objects in it are cold
    page-<object id>                         the page of an object's revision, where it has one

The first two are sealed memfds with MessagePack in them, after a line that names the format. Of each the highest revision
counts: a new one is stored before the old one is removed. An object is there when its own entry is and those of its segments,
or of their copies if it is cold, and its page are; they are stored before it and removed after it, so that a broker which is
killed in between leaves nothing half. Host memory that is its own copy therefore keeps the name under which it was stored
first, and an object's entry has the names of its memory. Without its page an object is not restored: processes that have the
page would not see what others write.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import stat
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import msgspec

from shared_rpc.broker.systemd import Notifier, Passed
from shared_rpc.memory.copies import LowerCopy
from shared_rpc.memory.records import Record
from shared_rpc.memory.revisions import restored_page
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.records import EXPORTER_OWNED, HostCopy, SegmentInfo, Tier
from shared_rpc.protocol.specs import EndpointSpec
from shared_rpc.server.state.buffers import Terms
from shared_rpc.server.state.objects import StoredObject

__all__ = ["Persistence", "RestoredObject", "RestoredService", "code_of"]

_log = logging.getLogger("shared_rpc.broker")

T = TypeVar("T", bound=msgspec.Struct)

#: The first bytes of an entry. The number is raised with every change of the format.
_SERVICE, _OBJECT = b"shared-rpc service 1\n", b"shared-rpc object 7\n"
#: The largest entry in bytes; the skeleton of a large module has some millions.
_LIMIT = 1 << 30
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class _Service(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A provider. ``serve`` has the endpoints as they are now."""

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


class _Value(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Fields of a :class:`Record`."""

    skeleton: bytes
    table: bytes
    nbytes: int
    device: str
    private_nbytes: int


class _Copy(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A :class:`LowerCopy` of the segment with that number."""

    segment: int
    tier: Tier
    info: SegmentInfo
    digest: bytes


class _Object(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """An object. ``key`` is the provider's, ``code`` the :func:`code_of` its endpoint.

    ``memory`` has the names of the entries of its segments, or of the copies if it is cold, in their order.
    """

    key: str
    code: str
    facts: _Facts
    value: _Value
    segments: list[SegmentInfo]
    copies: list[_Copy]
    memory: list[str]
    has_page: bool
    terms: tuple[float | None, int | None, bool] | None


@dataclass
class RestoredObject:
    """An object as it was kept: a buffer with its terms, one that was cold with the copies of its segments."""

    stored: StoredObject
    terms: Terms | None
    copies: list[tuple[SegmentInfo, LowerCopy]]


@dataclass
class RestoredService:
    """A provider as it was served, and its objects in the order they were made."""

    server_id: str
    serve: w.Serve
    objects: list[RestoredObject] = field(default_factory=list)


def code_of(spec: EndpointSpec | None) -> str:
    """Return a digest that changes with an endpoint's code or options."""
    return hashlib.blake2b(msgspec.msgpack.encode(spec), digest_size=16).hexdigest() if spec is not None else ""


class Persistence:
    """The store of a service manager; where there is none, nothing is stored. On the broker's loop only, but for :meth:`close`.

    :param capacity: how many descriptors the manager keeps, None where that is not known.
    """

    def __init__(self, notifier: Notifier, capacity: int | None = None) -> None:
        self._notifier = notifier
        self._capacity = capacity
        self._closed = not notifier.there
        self._revision = 0
        #: Names of entries by their subject, a provider's key or an object's id; and the contents of the providers' entries.
        self._names: dict[str, str] = {}
        self._said: dict[str, bytes] = {}
        #: Objects by the name of each stored segment or copy, and these names by object.
        self._users: defaultdict[str, set[str]] = defaultdict(set)
        self._memory: dict[str, list[str]] = {}
        #: The files behind these names, None for a GPU's memory; and the names by file.
        self._files: dict[str, tuple[int, int] | None] = {}
        self._by_file: dict[tuple[int, int], str] = {}
        #: Objects with a stored page.
        self._pages: set[str] = set()

    def __len__(self) -> int:
        """Return how many descriptors are stored, if the manager has taken all."""
        return len(self._names) + len(self._users) + len(self._pages)

    def close(self) -> None:
        """Store and remove nothing from now on."""
        self._closed = True

    # Storing.

    def keep_service(self, server_id: str, serve: w.Serve) -> None:
        """Store a provider, where it is not stored as it is."""
        if self._closed:
            return
        data = _SERVICE + msgspec.msgpack.encode(_Service(server_id, serve))
        if self._said.get(serve.key) != data:
            digest = hashlib.blake2b(serve.key.encode(), digest_size=16).hexdigest()
            self._store(serve.key, f"service-{digest}", data)
            self._said[serve.key] = data

    def remove_service(self, key: str) -> None:
        """Remove a provider; its objects are removed one by one."""
        self._said.pop(key, None)
        self._remove_entry(key)

    def keep(
        self, key: str, stored: StoredObject, code: str, terms: Terms | None, copies: Mapping[str, Sequence[LowerCopy]]
    ) -> None:
        """Store an object, or its changes. An object whose memory ends with a process is not stored.

        Where its changes cannot be stored, nothing of it is: an earlier entry is out of date.

        :param code: see :func:`code_of`.
        :param copies: of a cold object, by the ids of its segments.
        """
        if self._closed or any(segment.info.mechanism in EXPORTER_OWNED for segment in stored.record.segments):
            return
        try:
            self._keep(key, stored, code, terms, copies)
        except Exception as error:
            _log.error("cannot store object %s for the next broker: %s", stored.object_id, error)
            self.remove(stored.object_id)

    def _keep(
        self, key: str, stored: StoredObject, code: str, terms: Terms | None, copies: Mapping[str, Sequence[LowerCopy]]
    ) -> None:
        record = stored.record
        infos = [segment.info for segment in record.segments]
        cold = [(number, copy) for number, info in enumerate(infos) for copy in copies[info.id]] if stored.cold else []
        parts = [(f"copy-{copy.tier}-{infos[number].id}", copy.segment) for number, copy in cold]
        if not stored.cold:
            parts = [(f"segment-{segment.info.id}", segment) for segment in record.segments]
        former = self._memory.get(stored.object_id, [])
        memory = [self._store_memory(stored.object_id, *part) for part in parts]
        self._memory[stored.object_id] = [*former, *memory]
        if stored.page is not None and stored.object_id not in self._pages:
            self._notifier.store(f"page-{stored.object_id}", stored.page.fileno())
            self._pages.add(stored.object_id)
        entry = _Object(
            key,
            code,
            msgspec.convert(stored, _Facts, from_attributes=True),
            _Value(record.skeleton, bytes(record.table), record.nbytes, record.device, record.private_nbytes),
            infos,
            [_Copy(number, copy.tier, copy.segment.info, copy.digest) for number, copy in cold],
            memory,
            stored.page is not None,
            (terms.expires_at, terms.accesses_left, terms.kept) if terms is not None else None,
        )
        self._store(stored.object_id, f"object-{stored.object_id}", _OBJECT + msgspec.msgpack.encode(entry))
        self._memory[stored.object_id] = memory
        self._remove_memory(stored.object_id, set(former).difference(memory))

    def remove(self, object_id: str) -> None:
        """Remove an object that is listed no more."""
        if self._closed:
            return
        self._remove_entry(object_id)
        if object_id in self._pages:
            self._pages.discard(object_id)
            self._notifier.remove(f"page-{object_id}")
        self._remove_memory(object_id, self._memory.pop(object_id, []))

    def _store_memory(self, object_id: str, name: str, segment: Segment) -> str:
        """Store memory of an object; return its name, which is an earlier one where the manager has the file already."""
        file = _file_of(segment)
        name = self._by_file.get(file, name) if file is not None else name
        if name not in self._users:
            self._note(name, file)
            self._notifier.store(name, segment.fileno())
        self._users[name].add(object_id)
        return name

    def _note(self, name: str, file: tuple[int, int] | None) -> None:
        self._files[name] = file
        if file is not None:
            self._by_file[file] = name

    def _remove_memory(self, object_id: str, names: Iterable[str]) -> None:
        for name in names:
            users = self._users.get(name)
            if users is None:
                continue
            users.discard(object_id)
            if not users:
                del self._users[name]
                file = self._files.pop(name)
                if file is not None:
                    del self._by_file[file]
                self._notifier.remove(name)

    def _store(self, about: str, name: str, data: bytes) -> None:
        self._revision += 1
        fd = _sealed(name, data)
        try:
            self._notifier.store(f"{name}-{self._revision}", fd)
        finally:
            os.close(fd)
        self._remove_entry(about)
        self._names[about] = f"{name}-{self._revision}"
        if self._capacity is not None and len(self) > self._capacity:
            text = "the service manager keeps at most %d descriptors, and %d were sent: raise FileDescriptorStoreMax="
            _log.warning(text, self._capacity, len(self))

    def _remove_entry(self, about: str) -> None:
        name = self._names.pop(about, None)
        if name is not None:
            self._notifier.remove(name)

    # Restoring.

    def restore(self, passed: Iterable[Passed]) -> list[RestoredService]:
        """Return an earlier broker's services and objects. An unreadable entry is logged and removed."""
        memory: dict[str, int] = {}
        pages: dict[str, int] = {}
        services: dict[str, RestoredService] = {}
        objects: list[tuple[Passed, _Object]] = []
        seen: set[str] = set()
        for entry in sorted(passed, key=lambda entry: _revision_of(entry.name), reverse=True):
            kind, _, rest = entry.name.partition("-")
            if kind in ("segment", "copy", "page"):
                found_fds, name = (pages, rest) if kind == "page" else (memory, entry.name)
                if found_fds.setdefault(name, entry.fd) != entry.fd:
                    os.close(entry.fd)
                continue
            try:
                self._revision = max(self._revision, _revision_of(entry.name))
                if kind == "service":
                    service = _read(entry, _SERVICE, _Service)
                    _claim(service.serve.key, seen)
                    services[service.serve.key] = RestoredService(service.server_id, service.serve)
                    self._names[service.serve.key] = entry.name
                elif kind == "object":
                    found = _read(entry, _OBJECT, _Object)
                    _claim(found.facts.object_id, seen)
                    objects.append((entry, found))
                else:
                    raise ValueError("no kind of entry has such a name")
            except (ValueError, OSError) as error:
                self._throw_away(entry.name, error)
            finally:
                os.close(entry.fd)
        for entry, found in sorted(objects, key=lambda pair: pair[1].facts.created_at):
            try:
                self._restore(entry, found, services, memory, pages)
            except (ValueError, OSError) as error:
                self._throw_away(entry.name, error)
        for prefix, found_fds, users in (("", memory, self._users), ("page-", pages, self._pages)):
            for name, fd in found_fds.items():
                os.close(fd)
                if name not in users:
                    self._notifier.remove(f"{prefix}{name}")
        return list(services.values())

    def _restore(
        self,
        entry: Passed,
        found: _Object,
        services: dict[str, RestoredService],
        memory: dict[str, int],
        pages: dict[str, int],
    ) -> None:
        service = services.get(found.key)
        if service is None:
            raise ValueError(f"its provider {found.key!r} is not stored")
        facts = found.facts
        cold = facts.tier != "device"
        copied = {copy.segment for copy in found.copies}
        parts = list(zip(found.memory, [copy.info for copy in found.copies] if cold else found.segments, strict=True))
        missing = [name for name, _ in parts if name not in memory]
        if missing or (cold and copied != set(range(len(found.segments)))):
            raise ValueError(f"its {', '.join(missing) or 'copies'} are not stored")
        if found.has_page and facts.object_id not in pages:
            raise ValueError("its revision page is not stored")
        made = _duplicates([(info, memory[name]) for name, info in parts])
        copies = [
            (found.segments[copy.segment], LowerCopy(segment, copy.tier, copy.digest))
            for copy, segment in zip(found.copies, made, strict=False)
        ]
        segments = [Segment(info) for info in found.segments] if cold else made
        record = Record(segments=segments, **msgspec.structs.asdict(found.value))
        specs = {spec.name: spec for spec in service.serve.endpoints}
        stored = StoredObject(
            record=record,
            last_accessed_at=facts.created_at,
            stale=facts.kind == "result" and found.code != code_of(specs.get(facts.endpoint)),
            **msgspec.structs.asdict(facts),
        )
        if found.has_page:
            stored.page = restored_page(os.dup(pages[facts.object_id]))
            self._pages.add(facts.object_id)
        service.objects.append(RestoredObject(stored, Terms(*found.terms) if found.terms is not None else None, copies))
        self._names[facts.object_id] = entry.name
        self._memory[facts.object_id] = [name for name, _ in parts]
        for (name, _), segment in zip(parts, made, strict=True):
            self._users[name].add(facts.object_id)
            self._note(name, _file_of(segment))

    def _throw_away(self, name: str, error: Exception) -> None:
        _log.error("the stored entry %s is unusable and is removed: %s", name, error)
        self._notifier.remove(name)


def _revision_of(name: str) -> int:
    text = name.rpartition("-")[2]
    return int(text) if name.startswith(("service-", "object-")) and text.isdecimal() and len(text) < 20 else 0


def _claim(about: str, seen: set[str]) -> None:
    if about in seen:
        raise ValueError("a newer entry has the same subject")
    seen.add(about)


def _file_of(segment: Segment) -> tuple[int, int] | None:
    """Return the file of host memory or of a copy, None for a GPU's memory: all of that is the driver's device."""
    found = os.fstat(segment.fileno())
    return (found.st_dev, found.st_ino) if stat.S_ISREG(found.st_mode) else None


def _sealed(name: str, data: bytes) -> int:
    fd = os.memfd_create(name[:100], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _read(entry: Passed, begin: bytes, kind: type[T]) -> T:
    """Return the contents of an entry.

    :raises ValueError: if it is none, or of another version.
    """
    if not fcntl.fcntl(entry.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE:
        raise ValueError("its memfd is not sealed against writes")
    size = os.fstat(entry.fd).st_size
    data = os.pread(entry.fd, min(size, _LIMIT), 0)
    if not data.startswith(begin):
        raise ValueError(f"another version wrote it: it begins with {data[:40]!r}, not with {begin!r}")
    return msgspec.msgpack.decode(data[len(begin) :], type=kind)


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
