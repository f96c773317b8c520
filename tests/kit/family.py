"""What the processes of one family do that send each other tensors through torch.multiprocessing."""

from __future__ import annotations

import multiprocessing
import os
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from shared_rpc.memory.mapping import MAPPINGS
from tests.kit.processes import links_of


def segments() -> list[str]:
    """The id of the segment behind each host mapping of this process."""
    return re.findall(r"memfd:shared-rpc-(\w+)", Path("/proc/self/maps").read_text())


def descriptors() -> int:
    """The descriptors of this process that keep host segments."""
    return sum("memfd:shared-rpc" in link for link in links_of())


def private() -> int:
    """Bytes of memory that no other process has, and those that torch has copied for others."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    bytes_ = sum(int(amount) * 1024 for amount in re.findall(r"Private_\w+: +(\d+) kB", rollup))
    for start, end in re.findall(r"^(\w+)-(\w+) .*/torch_", Path("/proc/self/maps").read_text(), re.MULTILINE):
        bytes_ += int(end, 16) - int(start, 16)
    return bytes_


def settle() -> None:
    """Have the GPU done, and unmap what nothing uses."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    MAPPINGS.drain()


class Peer:
    """A child process that calls functions, one after the other, and keeps what it is told to keep."""

    def __init__(self, method: str, *args: Any) -> None:
        context: Any = multiprocessing.get_context(method)
        self._connection, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(there, *args))
        self.process.start()
        there.close()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """What ``function(kept, *args)`` returns there."""
        self._connection.send((function, args))
        return self.answer()

    def answer(self) -> Any:
        """The next answer, or what was raised there."""
        kind, value = self._connection.recv()
        if kind == "error":
            raise RuntimeError(value)
        return value

    def close(self) -> int | None:
        """Have it end; its exit code."""
        with suppress(BrokenPipeError):
            self._connection.send((None, ()))
        self._connection.close()
        self.process.join(30)
        return self.process.exitcode


def _serve(connection: Any, *args: Any) -> None:
    kept = list(args)
    del args
    while True:
        function = given = answer = None
        try:
            function, given = connection.recv()
            if function is None:
                return
            answer = ("value", function(kept, *given))
            del given
        except EOFError:
            return
        except Exception as error:
            answer = ("error", f"{type(error).__name__}: {error}")
        connection.send(answer)
        settle()


@contextmanager
def peer(method: str, *args: Any) -> Iterator[Peer]:
    """A peer, which has ended after the block."""
    child = Peer(method, *args)
    try:
        yield child
        assert child.close() == 0
    finally:
        if child.process.is_alive():
            child.process.kill()
            child.process.join()


# What peers do.


def keep(kept: list[Any], *values: Any) -> None:
    """Have some more."""
    kept.extend(values)


def drop(kept: list[Any]) -> None:
    """Have nothing any more."""
    kept.clear()


def first(kept: list[Any]) -> Any:
    """The first thing that it has."""
    return kept[0]


def listed(kept: list[Any]) -> Any:
    """The elements of the first tensor that it has."""
    return kept[0].tolist()


def same(kept: list[Any], value: Any) -> Any:
    """What came, sent back."""
    return value


def read(kept: list[Any]) -> Any:
    """The first element of each tensor that it has."""
    settle()
    return [tensor.detach().flatten()[0].item() for tensor in kept]


def write(kept: list[Any], number: int, value: float) -> None:
    """Fill a tensor that it has."""
    with torch.no_grad():
        kept[number].fill_(value)
    settle()


def facts(kept: list[Any]) -> Any:
    """How many storages there are among the tensors, how many segments are mapped, and descriptors of segments kept."""
    return len({tensor.untyped_storage()._cdata for tensor in kept}), len(MAPPINGS), descriptors()


def call(kept: list[Any], base_path: str, device: str, endpoint: str) -> Any:
    """Call an endpoint with what it has: the answer, the bytes that were copied for it, and leases of its own."""
    from shared_rpc import Client

    copied = 0
    create = MAPPINGS.create

    def counted(nbytes: int, where: str) -> Any:
        nonlocal copied
        copied += nbytes
        return create(nbytes, where)

    MAPPINGS.create = counted
    try:
        with Client(base_path, device=device, connect_timeout=0) as client:
            answer = client.call(endpoint, *kept).tolist()
            return answer, copied, [info["pid"] for info in client.list_sessions() if info["leases"]]
    finally:
        MAPPINGS.create = create


# What pools do.


def row_of(tensor: torch.Tensor) -> torch.Tensor:
    """A view."""
    return tensor[1]


def fill(tensor: torch.Tensor) -> int:
    """Write to memory that came; this process's id."""
    tensor.fill_(7)
    settle()
    return os.getpid()


def access(kept: list[Any]) -> str:
    """How it may use the first thing that it has."""
    mapping, _ = MAPPINGS.find(kept[0].data_ptr()) or (None, 0)
    assert mapping is not None
    return str(mapping.info.access)


def map_for_writing(kept: list[Any]) -> None:
    """Map once more what it has, for writing."""
    mapping, _ = MAPPINGS.find(kept[0].data_ptr()) or (None, 0)
    assert mapping is not None and mapping.descriptor is not None
    mapping.backend.map(mapping.descriptor.fileno(), mapping.info.nbytes, "read_write")


def limit_address_space(kept: list[Any]) -> None:
    """Leave no room for larger mappings."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def outlive(tensor: torch.Tensor) -> None:
    """Wait for the end of the parent, and use what it sent."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    print("child has it", flush=True)
    parent.join()
    print("alone:", tensor[:, 0].tolist(), flush=True)
