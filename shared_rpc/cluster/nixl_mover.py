"""The mover by NIXL: the receiver reads from the source's memory into its own segments, by what UCX finds between the two.

For each transfer, either end has an agent of NIXL of its own, in which the segments are registered and nothing else. What the
receiver needs to know of the source's travels with each part, as the result of the source's method. When the transfer ends, in
whatever way, the agent ends, and with it the registrations, the connections and a read that is under way: before the memory
goes, which it keeps, and without a trace in the next transfer. An agent takes a tenth of a second to make, and while it lives,
a thread of it looks for messages.
"""

from __future__ import annotations

import importlib.util
import logging
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from shared_rpc.client.exported import RecordBytes, SegmentBytes
from shared_rpc.cluster.digests import digest_of
from shared_rpc.cluster.movers import DamagedPart, Mover, MoverFailed, Part

__all__ = ["NixlMover", "is_of_use", "lacking"]

_log = logging.getLogger("shared_rpc.cluster")

#: Bytes that are registered as one region at most: larger ones were refused on a GPU.
_REGION = 1 << 30
#: Bytes of a part at most: only a few words of it go by Ray.
_LARGEST_PART = 64 << 20
#: Seconds in which a part has to arrive.
_PATIENCE = 60.0
#: Seconds between two looks at a transfer, at least and at most.
_LOOK = (0.00005, 0.002)
#: Where the kernel lists devices that read another host's memory.
_RDMA = Path("/sys/class/infiniband")


def lacking() -> str:
    """Return why there is no NIXL here, ``""`` if it is installed."""
    return "" if importlib.util.find_spec("nixl") is not None else "NIXL is not installed (pip install nixl)"


def is_of_use(device: str) -> bool:
    """Tell whether NIXL is faster than the object store here: for a GPU's memory, on a host with a device for RDMA.

    Elsewhere it goes by TCP, through one connection and one thread.
    """
    return device != "cpu" and _RDMA.is_dir() and any(_RDMA.iterdir())


class _Ticket(NamedTuple):
    """Place of a part at the source, the agent that has it, and its digest: all that travels for the part."""

    agent: str
    metadata: bytes
    kind: str
    device: int
    address: int
    digest: bytes


class NixlMover(Mover):
    """NIXL, as it is installed: its backend UCX, with the settings of the environment."""

    def __init__(self) -> None:
        #: By record: what is given while it arrives is of its room first, and then of the object.
        self._ends: dict[RecordBytes, _End] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def give(self, record: RecordBytes, part: Part) -> _Ticket:
        """Return a ticket for a part, which is read where it lies."""
        end = self._end(record)
        segment = record.segments[part.segment]
        digest = digest_of(segment, part.offset, part.nbytes)
        kind, device = _place(segment)
        return _Ticket(end.name, end.metadata, kind, device, segment.address + part.offset, digest)

    def take(self, given: _Ticket, room: RecordBytes, part: Part) -> None:
        """Read a part to its place, and check it there."""
        segment = room.segments[part.segment]
        self._end(room).read(given, segment, part)
        if digest_of(segment, part.offset, part.nbytes) != given.digest:
            raise DamagedPart(f"{part.nbytes} bytes at {part.offset} of segment {part.segment} arrived with another digest")

    def close(self) -> None:
        """End NIXL's agents, with their registrations and what they read."""
        self._ended.set()
        with self._lock:
            while self._ends:
                self._ends.popitem()[1].close()

    @staticmethod
    def part_nbytes(store_nbytes: int) -> int:
        """Return the size of parts, for which the object stores do not matter."""
        return _LARGEST_PART

    def _end(self, record: RecordBytes) -> _End:
        with self._lock:
            if self._ended.is_set():
                raise MoverFailed("the transfer has ended")
            if record not in self._ends:
                self._ends[record] = _End(record, self._ended)
            return self._ends[record]


class _End:
    """An agent of NIXL with the segments of a record, which it keeps mapped.

    :param ended: is set when the transfer is to end.
    :raises MoverFailed: if there is none, or it does not take the memory.
    """

    def __init__(self, record: RecordBytes, ended: threading.Event) -> None:
        # Before anything is made: a record that is closed is no failure of NIXL.
        self._memory = [_memory(segment) for segment in record.segments]
        places = [(segment.address, segment.nbytes, *_place(segment)) for segment in record.segments]
        self.name = secrets.token_hex(16)
        self._ended = ended
        #: Of all that the agent is asked.
        self._using = threading.Lock()
        self._known: set[str] = set()
        self._registered: list[Any] = []
        try:
            from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
        except Exception as error:  # ImportError, and whatever a library says that it does not find
            raise MoverFailed(f"NIXL cannot be imported: {error}") from error
        for memory in self._memory:
            _enter(memory)
        strict = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        try:
            self._agent: Any = nixl_agent(self.name, nixl_agent_config(backends=["UCX"], sync_mode=strict))
        except Exception as error:  # NIXL's own have no base class of their own
            raise MoverFailed(f"an agent of NIXL cannot be made: {_told(error)}") from error
        try:
            for address, nbytes, kind, device in places:
                for piece in _regions(0, nbytes):
                    region = [(address + piece.start, len(piece), device, "")]
                    self._registered.append(self._agent.register_memory(region, kind))
            self.metadata: bytes = self._agent.get_agent_metadata()
        except Exception as error:
            self.close()
            raise MoverFailed(f"NIXL does not take the memory: {_told(error)}") from error

    def read(self, ticket: _Ticket, segment: SegmentBytes, part: Part) -> None:
        """Read a part from the source.

        :raises MoverFailed: if it does not arrive, or this is closed meanwhile.
        """
        kind, device = _place(segment)
        if kind != ticket.kind:
            raise MoverFailed(f"the source's memory is {ticket.kind}, and that here {kind}")
        first = ticket.address - part.offset
        pieces = list(_regions(part.offset, part.nbytes))
        with self._using:
            if self._ended.is_set():
                raise MoverFailed("the transfer has ended")
            _enter(self._memory[part.segment])
            try:
                if ticket.agent not in self._known:
                    self._agent.add_remote_agent(ticket.metadata)
                    self._known.add(ticket.agent)
                here = [(segment.address + piece.start, len(piece), device) for piece in pieces]
                there = [(first + piece.start, len(piece), ticket.device) for piece in pieces]
                lists = (self._agent.get_xfer_descs(here, kind), self._agent.get_xfer_descs(there, kind))
                self._wait(self._agent.initialize_xfer("READ", *lists, ticket.agent), part)
            except MoverFailed:
                raise
            except Exception as error:
                raise MoverFailed(f"NIXL did not read {part.nbytes} bytes: {_told(error)}") from error

    def _wait(self, handle: Any, part: Part) -> None:
        """Carry a transfer out, until its end or this one's."""
        begin, (pause, longest) = time.monotonic(), _LOOK
        try:
            state = self._agent.transfer(handle)
            while state == "PROC":
                if self._ended.wait(pause):
                    raise MoverFailed("the transfer was ended")
                if time.monotonic() - begin > _PATIENCE:
                    raise MoverFailed(f"{part.nbytes} bytes did not arrive in {_PATIENCE:g} s")
                pause = min(2 * pause, longest)
                state = self._agent.check_xfer_state(handle)
            if state != "DONE":
                raise MoverFailed(f"NIXL's state is {state}")
        finally:
            # One that cannot be cancelled ends with the agent.
            with suppress(Exception):
                self._agent.release_xfer_handle(handle)
            # It keeps the agent, and an exception keeps this frame.
            del handle

    def close(self) -> None:
        """End the agent: nothing reads or writes the memory by it any more when this returns."""
        with self._using:
            for memory in self._memory:
                _enter(memory)
            agent, self._agent = self._agent, None
            for name in self._known:
                with suppress(Exception):  # it may be lost
                    agent.remove_remote_agent(name)
            for region in self._registered:
                try:
                    agent.deregister_memory(region)
                except Exception as error:
                    _log.warning("NIXL did not deregister %s: %s", region, _told(error))
            self._known.clear()
            self._registered.clear()
            # The last reference: UCX's worker ends here, and its connections; and then the memory may go.
            del agent
            self._memory.clear()


def _regions(offset: int, nbytes: int) -> Iterator[range]:
    """Yield the bytes of a segment, cut where its regions are: a read is of one region on either side."""
    end = offset + nbytes
    while offset < end:
        following = min(end, (offset // _REGION + 1) * _REGION)
        yield range(offset, following)
        offset = following


def _place(segment: SegmentBytes) -> tuple[str, int]:
    """Return the kind of a segment's memory, and the number of its device, as NIXL has them."""
    if segment.info.device == "cpu":
        return "DRAM", 0
    return "VRAM", int(segment.tensor().device.index)


def _memory(segment: SegmentBytes) -> Any:
    """Return what keeps a segment mapped: a buffer, or a tensor on a GPU."""
    return segment.buffer() if segment.info.device == "cpu" else segment.tensor()


def _enter(memory: Any) -> None:
    """Have this thread work on a tensor's GPU: UCX looks for the CUDA context that is current."""
    if not isinstance(memory, memoryview):
        import torch

        torch.cuda.set_device(memory.device)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
