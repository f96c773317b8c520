"""A process that makes segments, or uses those that it is sent: one end of the benchmark of mechanisms."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec

from benchmarks.memory import used
from benchmarks.parts import MAKING, MAPPING, Watch
from benchmarks.processes import configuration, next_command, say
from benchmarks.stats import timed
from shared_rpc.errors import CapabilityError
from shared_rpc.memory.backends.choice import backend_for
from shared_rpc.memory.segments import Backend, Segment
from shared_rpc.protocol.records import SegmentInfo

__all__ = ["receive", "send"]

#: Segments that are made to see what one of them takes.
_MANY = 16


def send(sock: socket.socket, segment: Segment, *others: int) -> None:
    """Send a segment, and descriptors that belong to it; all are borrowed."""
    socket.send_fds(sock, [msgspec.json.encode(segment.info)], [segment.fileno(), *others])


def receive(sock: socket.socket) -> tuple[Segment, list[int]]:
    """Receive a segment and its descriptors, which the caller owns."""
    body, (fd, *others), _, _ = socket.recv_fds(sock, 4096, 4)
    return Segment.owning(msgspec.json.decode(body, type=SegmentInfo), fd), others


class _End:
    """One segment, and the operations on it."""

    def __init__(self, sock: socket.socket, device: str, mechanism: Any) -> None:
        import torch

        self.sock = sock
        self.host = device == "cpu"
        self.backend: Backend = backend_for(device, mechanism)
        self.making, self.mapping = Watch(MAKING[mechanism]), Watch(MAPPING[mechanism])
        self.device = torch.device("cpu") if self.host else torch.device("cuda", 0)
        self.segment: Segment | None = None
        self.others: list[int] = []
        self.address = 0
        if not self.host:
            torch.zeros(1, device=self.device)

    @property
    def held(self) -> Segment:
        """The segment."""
        assert self.segment is not None, "nothing was made or received"
        return self.segment

    def bytes(self) -> Any:
        """Return the mapped memory as a tensor."""
        from shared_rpc.codec.storages import bytes_at

        return bytes_at(self.address, self.held.info.nbytes, self.device)

    def wait(self) -> None:
        """Wait for the GPU."""
        if not self.host:
            import torch

            torch.cuda.synchronize(self.device)

    def make(self, nbytes: int, rounds: int) -> None:
        """Make, map and give back, that many times: the seconds of each step that the mechanism has."""
        times: dict[str, list[float]] = {"map here": []}
        for _ in range(rounds):
            self.making.time(lambda: self._create(nbytes), times)
            times["map here"].append(timed(self._map))
            self._unmap()
            self.held.close()
        say(**times)

    def take(self, nbytes: int) -> None:
        """Measure the device memory of a segment."""
        time.sleep(0.2)  # what was given back before is back
        before = used(str(self.device))
        made = [self.backend.create(nbytes) for _ in range(_MANY)]
        taken = (used(str(self.device)) - before) / _MANY
        for segment in made:
            segment.close()
        say(taken=taken)

    def keep(self, nbytes: int, value: int) -> None:
        """Make one, fill it and send it."""
        self._create(nbytes)
        self._map()
        self.bytes().fill_(value)
        self.wait()
        send(self.sock, self.held)
        say(made=True)

    def attach(self, rounds: int) -> None:
        """Receive one, and map it that many times; the last one stays. The seconds of each step, as :meth:`make` tells them."""
        self.segment, self.others = receive(self.sock)
        times: dict[str, list[float]] = {"unmap": []}
        for number in range(rounds):
            self.mapping.time(self._map, times)
            if number < rounds - 1:
                times["unmap"].append(timed(self._unmap))
        say(**times)

    def call(self, count: int) -> None:
        """Measure one call's work: a small kernel, a copy of 4 KiB into the mapped memory, and a wait for the stream."""
        import torch

        source = torch.zeros(4096, dtype=torch.uint8, device=self.device)
        target = self.bytes()[:4096]

        def once() -> None:
            source.add_(1)
            target.copy_(source, non_blocking=True)
            if not self.host:
                torch.cuda.current_stream(self.device).synchronize()

        for _ in range(10):
            once()
        say(call=[timed(once) for _ in range(count)])

    def read(self, value: int) -> None:
        """Return whether all bytes are unchanged."""
        say(outcome=_outcome(lambda: "reads all bytes" if bool((self.bytes() == value).all()) else "reads other bytes"))

    def use_all(self, value: int) -> None:
        """Fill the free memory of the GPU, but for half a GiB, and free it."""
        import torch

        free, _ = torch.cuda.mem_get_info(self.device)
        blocks = [torch.full((64 << 20,), value, dtype=torch.uint8, device=self.device) for _ in range((free >> 26) - 8)]
        self.wait()
        filled = len(blocks)
        blocks.clear()
        torch.cuda.empty_cache()
        say(filled=filled)

    def open(self, value: int) -> None:
        """Receive one whose maker has ended, and open it as the library does."""
        self.segment, self.others = receive(self.sock)

        def opened() -> str:
            self._map()
            return "yes" if bool((self.bytes() == value).all()) else "yes, with other bytes"

        say(outcome=_outcome(opened))

    def open_below(self, value: int) -> None:
        """Open memory by the driver alone: the library refuses memory whose maker has ended."""

        def opened() -> str:
            from shared_rpc.memory.backends.exporter_owned import ExporterOwnedBackend, export_descriptor_of

            assert isinstance(self.backend, ExporterOwnedBackend), "a mechanism whose memory ends with its maker"
            backend: Any = self.backend
            exported = export_descriptor_of(self.held.fileno())
            memory = backend.open_pool(self.others[0], exported) if self.others else backend.open(exported)
            self.address = memory.address
            return "yes" if bool((self.bytes() == value).all()) else "yes, with other bytes"

        say(outcome=_outcome(opened))

    def write_protected(self) -> None:
        """Receive one, map it for reading, and write."""
        self.segment, self.others = receive(self.sock)
        self.address = self.backend.map(self.held.fileno(), self.held.info.nbytes, "read")

        def written() -> str:
            self.bytes()[:1].fill_(1)
            self.wait()
            return "not refused"

        say(outcome=_outcome(written))

    def _create(self, nbytes: int) -> None:
        self.segment = self.backend.create(nbytes)

    def _map(self) -> None:
        self.address = self.backend.map(self.held.fileno(), self.held.info.nbytes, "read_write")

    def _unmap(self) -> None:
        self.backend.synchronize()
        self.backend.unmap(self.address, self.held.info.nbytes)


def _outcome(action: Callable[[], str]) -> str:
    try:
        return action()
    except (CapabilityError, RuntimeError) as error:
        return f"error: {str(error).splitlines()[0][:200]}"


def main() -> None:
    """Do what is asked. Configuration: ``socket`` to connect to, ``device`` and ``mechanism``."""
    config = configuration()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(config["socket"])
        end = _End(sock, config["device"], config["mechanism"])
        say(pid=os.getpid())
        while (command := next_command()) is not None:
            getattr(end, command.pop("do"))(**command)
        # What is mapped here goes with the process.
        if end.segment is not None:
            end.segment.close()


if __name__ == "__main__":
    main()
