"""Memory of a GPU and of copies, written and read through the driver whatever its kind."""

from __future__ import annotations

import threading
from typing import Any

from shared_rpc.lifecycle.finalizer import FINALIZER
from shared_rpc.memory.backends.choice import backend_for
from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.segments import Segment
from tests.kit.processes import eventually


def settle() -> None:
    """Wait until a separate thread has unmapped the host memory of closed copies."""
    waiting, done = "shared-rpc-unmapping", threading.Event()
    FINALIZER.start()
    FINALIZER.submit(done.set)
    assert done.wait(30)
    eventually(lambda: waiting not in {thread.name for thread in threading.enumerate()}, what=f"no thread {waiting}")


def write(segment: Segment, data: bytes, offset: int = 0) -> None:
    """Write to memory through the driver."""
    _copy(segment, data, offset)


def bytes_of(segment: Segment) -> bytes:
    """Read memory through the driver."""
    return _copy(segment, None, 0)


def _copy(segment: Segment, data: bytes | None, offset: int) -> bytes:
    backend: Any = backend_for(segment.info.device, segment.info.mechanism)
    size = len(data) if data is not None else segment.info.nbytes
    address = backend.map(segment.fileno(), segment.info.nbytes, "read_write")
    if segment.info.device == "cpu":
        view = HOST.view(address, segment.info.nbytes)
        if data is not None:
            view[offset : offset + size] = data
        found = bytes(view)
        HOST.unmap(address, segment.info.nbytes)
        return found
    from cuda.bindings import driver

    from shared_rpc.memory.backends.cuda import check

    with backend.current():
        staging = int(check(driver.cuMemHostAlloc(size, 0)))
        view = HOST.view(staging, size)
        stream = check(driver.cuStreamCreate(1))
        if data is not None:
            view[:] = data
            check(driver.cuMemcpyAsync(address + offset, staging, size, stream))
        else:
            check(driver.cuMemcpyAsync(staging, address, size, stream))
        check(driver.cuStreamSynchronize(stream))
        found = bytes(view)
        del view
        check(driver.cuStreamDestroy(stream))
        check(driver.cuMemFreeHost(staging))
    backend.unmap(address, segment.info.nbytes)
    return found
