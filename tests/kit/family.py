"""Functions of related processes that send each other tensors through torch.multiprocessing."""

from __future__ import annotations

import multiprocessing
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from shared_rpc.memory.mapping import MAPPINGS
from tests.kit.processes import links_of


def descriptors() -> int:
    """Return the descriptors of this process that keep host segments alive."""
    return sum("memfd:shared-rpc" in link for link in links_of())


def settle() -> None:
    """Wait for the GPU, and unmap unused segments."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    MAPPINGS.drain()


class Peer:
    """A child process that runs functions, one after the other, and keeps values between them."""

    def __init__(self, method: str, *args: Any) -> None:
        context: Any = multiprocessing.get_context(method)
        self._connection, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(there, *args))
        self.process.start()
        there.close()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return the result of ``function(kept, *args)`` in the child."""
        self._connection.send((function, args))
        return self.answer()

    def answer(self) -> Any:
        """Return the next result, or raise the child's exception."""
        kind, value = self._connection.recv()
        if kind == "error":
            raise RuntimeError(value)
        return value

    def close(self) -> int | None:
        """End it, and return its exit code."""
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
    """Yield a peer, and end it after the block."""
    child = Peer(method, *args)
    try:
        yield child
        assert child.close() == 0
    finally:
        if child.process.is_alive():
            child.process.kill()
            child.process.join()


# Functions of peers.


def keep(kept: list[Any], *values: Any) -> None:
    """Keep more values."""
    kept.extend(values)


def drop(kept: list[Any]) -> None:
    """Drop all values."""
    kept.clear()


def first(kept: list[Any]) -> Any:
    """Return the first value."""
    return kept[0]


def listed(kept: list[Any]) -> Any:
    """Return the elements of the first tensor as a list."""
    return kept[0].tolist()


def same(kept: list[Any], value: Any) -> Any:
    """Return the values."""
    return value


def read(kept: list[Any]) -> Any:
    """Return the first element of each tensor."""
    settle()
    return [tensor.detach().flatten()[0].item() for tensor in kept]


def write(kept: list[Any], number: int, value: float) -> None:
    """Fill a tensor."""
    with torch.no_grad():
        kept[number].fill_(value)
    settle()


def facts(kept: list[Any]) -> Any:
    """Return the number of storages of the tensors, of mapped segments, and of kept descriptors of segments."""
    return len({tensor.untyped_storage()._cdata for tensor in kept}), len(MAPPINGS), descriptors()


def call(kept: list[Any], base_path: str, device: str, endpoint: str) -> Any:
    """Call an endpoint with the values; return the answer, the bytes copied for it, and this process's leases."""
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


# Functions of pools.


def fill(tensor: torch.Tensor) -> int:
    """Fill received memory; return this process's id."""
    tensor.fill_(7)
    settle()
    return os.getpid()


def access(kept: list[Any]) -> str:
    """Return the access of the first value."""
    mapping, _ = MAPPINGS.find(kept[0].data_ptr()) or (None, 0)
    assert mapping is not None
    return str(mapping.info.access)


def limit_address_space(kept: list[Any]) -> None:
    """Limit the address space to 64 MiB more than now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def outlive(tensor: torch.Tensor) -> None:
    """Wait for the end of the parent, then use the received memory."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    print("child has it", flush=True)
    parent.join()
    print("alone:", tensor[:, 0].tolist(), flush=True)
