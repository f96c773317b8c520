"""Many clients that are killed leave nothing behind."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from shared_rpc import Provider, Server
from tests.kit.apps import Connect, Serve
from tests.kit.deep import deep
from tests.kit.processes import Child, eventually, open_fds

#: Reads how many clients to fork, says how many are attached, reads a line and kills them all.
ZYGOTE = """
import os, signal, sys
from shared_rpc import Client
from shared_rpc.operations.calls import fetch
from shared_rpc.memory.mapping import MAPPINGS

if "torch" in sys.argv:
    import shared_rpc.codec.results

def attach(ready):
    client = Client(device="cpu", connect_timeout=10)
    if "torch" in sys.argv:
        handle = client.call("weights", os.getpid())
        shared = client.call("shared")
        assert handle.value[0] == os.getpid() and shared.value[0] == 7
        ready()
    result = client._run(fetch("weights", (os.getpid(),), {}, "cpu"))
    shared = client._run(fetch("shared", (), {}, "cpu"))
    with MAPPINGS.attach(result.segments) as mine, MAPPINGS.attach(shared.segments) as ours:
        result.close()
        shared.close()
        assert int.from_bytes(mine[0].view()[:8], sys.byteorder) == os.getpid()
        assert int.from_bytes(ours[0].view()[:8], sys.byteorder) == 7
        ready()

for line in sys.stdin:
    reader, writer = os.pipe()
    clients = []
    for _ in range(int(line)):
        pid = os.fork()
        if pid == 0:
            try:
                attach(lambda: (os.write(writer, b"+"), signal.pause()))
            finally:
                os.write(writer, b"-")
                os._exit(1)
        clients.append(pid)
    heard = b""
    while len(heard) < len(clients):
        heard += os.read(reader, len(clients))
    print("attached", heard.count(b"+"))
    sys.stdin.readline()
    for pid in clients:
        os.kill(pid, signal.SIGKILL)
    for pid in clients:
        os.waitpid(pid, 0)
    os.close(reader)
    os.close(writer)
    print("killed")
"""


def segments() -> dict[str, int]:
    """Bytes of host segments that this process holds descriptors of, and how many segments it has mapped."""
    nbytes = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:shared-rpc"):
                nbytes += os.fstat(int(fd)).st_size
        except OSError:  # another thread has closed it
            continue
    with open("/proc/self/maps") as maps:
        return {"held": nbytes, "mapped": sum("/memfd:shared-rpc" in line for line in maps)}


def account(server: Server) -> dict[str, int]:
    """All that clients could leave behind."""
    info = server.info()
    held = {name: info[name] for name in ("connections", "sessions", "leases", "running", "objects", "nbytes")}
    return {**held, "fds": open_fds(), "threads": threading.active_count(), **segments()}


@pytest.mark.parametrize(("kind", "batches", "size"), [("light", 2, 100), *deep(("torch", 2, 10))])
def test_clients_that_are_killed(
    no_leaks: None,
    provider: Provider,
    serve: Serve,
    connect: Connect,
    children: list[Child],
    kind: str,
    batches: int,
    size: int,
) -> None:
    """Killed while they have memory mapped: memory, descriptors, leases, sessions and threads are what they were."""

    @provider.share(managed=True, cache=False)
    def weights(pid: int) -> torch.Tensor:
        return torch.full((8192,), pid)

    @provider.share(managed=True)
    def shared() -> torch.Tensor:
        return torch.full((8192,), 7)

    server = serve(max_workers=1)
    with connect() as client:
        client.call("shared").release()
        client.call("weights", 1).release()
    eventually(lambda: server.info()["objects"] == 1 and server.info()["sessions"] == 0)
    # A process without torch is forked in a tenth of the time.
    zygote = Child("-c", ZYGOTE, kind, fresh=kind == "light")
    children.append(zygote)
    before = account(server)
    for _ in range(batches):
        zygote.tell(str(size))
        assert zygote.expect("attached") == f"attached {size}"
        info = server.info()
        assert (info["leases"], info["sessions"], info["objects"]) == (2 * size, size, size + 1)
        assert info["nbytes"] == (size + 1) * 65536
        zygote.tell("kill")
        zygote.expect("killed")
        eventually(lambda: server.info()["leases"] == 0, seconds=1)

    def as_before() -> bool:
        now = account(server)
        return all(now[name] <= before[name] for name in before)

    try:
        eventually(as_before)
    except AssertionError:
        pytest.fail(f"the server had {before} and now has {account(server)}")
