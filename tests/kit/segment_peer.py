"""The process at the other end of a segment: it maps received segments, and executes commands line by line.

``python -m tests.kit.segment_peer <socket path> [<module>:<backend>]`` connects; the descriptor comes over SCM_RIGHTS with the
segment's info as its bytes. Commands on standard input, one answer on standard output each::

    create <device> <mechanism> <nbytes>    make a segment and send it
    vacate                      undo the last map, and keep the range of addresses
    fill <access>               map it there again
    close                       close the descriptor
    receive                     take a descriptor; nothing is mapped yet
    map <access>                map it
    read <offset> <nbytes>      print the bytes, in hex
    write <offset> <hex>        write them
"""

from __future__ import annotations

import importlib
import socket
import sys
from typing import Any

import msgspec

from shared_rpc.memory.backends.choice import backend_for
from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.segments import Backend, Segment
from shared_rpc.protocol.records import SegmentInfo


def is_gpu_memory(backend: Any) -> bool:
    """Return True if the processor cannot access a backend's memory."""
    return hasattr(backend, "ordinal") and getattr(backend, "on_gpu", True)


def load(backend: Backend, address: int, nbytes: int) -> bytes:
    """Return bytes of mapped memory of any kind."""
    if is_gpu_memory(backend):
        return tensor_of(backend, address, nbytes).cpu().numpy().tobytes()
    return bytes(HOST.view(address, nbytes))


def store(backend: Backend, address: int, data: bytes) -> None:
    """Write ``data`` to mapped memory; a GPU's has it on return."""
    if not is_gpu_memory(backend):
        HOST.view(address, len(data))[:] = data
        return
    import torch

    target = tensor_of(backend, address, len(data))
    # Written by a kernel, as in computations with tensors.
    torch.add(torch.tensor(list(data), dtype=torch.uint8, device=target.device), 0, out=target)
    torch.cuda.synchronize(target.device)


def tensor_of(backend, address, nbytes):
    """Return mapped memory of a GPU as a tensor of bytes."""
    import torch

    from shared_rpc.codec.storages import bytes_at

    return bytes_at(address, nbytes, torch.device("cuda", backend.ordinal))


def send(sock: socket.socket, segment: Segment) -> None:
    """Send a segment; its descriptor is borrowed."""
    socket.send_fds(sock, [msgspec.json.encode(segment.info)], [segment.fileno()])


def receive(sock: socket.socket) -> Segment:
    """Receive a segment, which the caller owns."""
    body, fds, _, _ = socket.recv_fds(sock, 4096, 1, socket.MSG_CMSG_CLOEXEC)
    return Segment.owning(msgspec.json.decode(body, type=SegmentInfo), fds[0])


def main(path: str, own: str = "") -> None:
    """Execute commands until standard input ends. ``own`` is a backend that replaces the library's."""
    module, _, name = own.partition(":")
    given = getattr(importlib.import_module(module), name) if own else None
    segment: Segment | None = None
    address = 0

    def backend() -> Backend:
        assert segment is not None
        return given or backend_for(segment.info.device, segment.info.mechanism)

    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        for line in sys.stdin:
            answer = "done"
            match line.split():
                case ["create", device, mechanism, nbytes]:
                    segment = (given or backend_for(device, mechanism)).create(int(nbytes))
                    send(sock, segment)
                case ["receive"]:
                    segment = receive(sock)
                case ["map", access]:
                    address = backend().map(segment.fileno(), segment.info.nbytes, access)
                case ["read", offset, nbytes]:
                    answer = load(backend(), address + int(offset), int(nbytes)).hex()
                case ["write", offset, data]:
                    store(backend(), address + int(offset), bytes.fromhex(data))
                case ["vacate"]:
                    backend().synchronize()
                    backend().vacate(address, segment.info.nbytes)
                case ["fill", access]:
                    filled = backend().map(segment.fileno(), segment.info.nbytes, access, at=address)
                    answer = "filled" if filled == address else f"mapped at {filled:#x}, not at {address:#x}"
                case ["close"]:
                    segment.close()
            print("answer:", answer)
        if segment is not None:
            segment.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
