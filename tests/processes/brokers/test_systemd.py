"""A broker under a service manager: its objects outlive it, no client is refused during a restart, and the protocol of both."""

from __future__ import annotations

import gc
import os
import signal
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch

from shared_rpc import AsyncClient, Client, errors
from shared_rpc.broker.systemd import inherit
from shared_rpc.memory.mapping import MAPPINGS
from tests.kit.brokers import APP, BrokerApp
from tests.kit.processes import Child, eventually
from tests.kit.service_manager import ServiceManager
from tests.kit.world import World

#: Before anything else of an app: holds its import up, or makes it fail.
GATE = """
import os, time
open({gate!r} + "-reached", "w").close()
while os.path.exists({gate!r}):
    time.sleep(0.005)
if os.path.exists({gate!r} + "-broken"):
    raise LookupError("no such checkpoint")
"""

#: A process that has a channel open, and prints its messages.
READER = """
    from shared_rpc import Client

    with Client(device="cpu") as client, client.open_channel("c") as channel:
        for message in channel:
            print("received", message.meta, flush=True)
"""


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A file that keeps the app from being loaded."""
    return tmp_path / "gate"


@pytest.fixture
def app(broker_app: BrokerApp, gate: Path) -> BrokerApp:
    """An app, not served yet."""
    broker_app.file.write_text(GATE.format(gate=str(gate)) + APP)
    return broker_app


@pytest.fixture
def broker(app: BrokerApp, manager: ServiceManager) -> Child:
    """The first broker of the service."""
    return manager.start()


@pytest.fixture
def client(app: BrokerApp, broker: Child) -> Client:
    """A client that waits for the next broker."""
    return app.connect(connect_timeout=20)


def restart(broker: Child, manager: ServiceManager, objects: int | None = None, **options: Any) -> Child:
    """Kill a broker when this many objects are in the store, and start the next one."""
    if objects is not None:
        manager.expect(lambda: len(manager.objects()) == objects)
    broker.kill()
    return manager.start(**options)


def loaded(client: Any) -> bool:
    """Return whether a worker of the current broker has loaded the app."""
    return any(worker["state"] == "ready" for worker in client.get_server_info()["workers"])


def ids(client: Any) -> dict[str, str]:
    """Return the ids of objects, by the prefixes of their cache keys."""
    return {str(info["cache_key"]): info["object_id"] for info in client.list_objects()}


def test_objects_survive_a_killed_broker(app: BrokerApp, manager: ServiceManager, gate: Path) -> None:
    """The next one sends the same memory before any worker has loaded the app, under the same ids, without builds."""
    broker = manager.start()
    client = app.connect()
    model, (facts,) = client.call("model"), client.list_objects()
    gate.touch()
    restart(broker, manager, 1)
    other = app.connect()
    attached, info = other.call("model"), other.get_server_info()
    with torch.no_grad():
        attached.weight[0, 1] = 43
    assert model.weight[0].tolist() == [4, 43, 4, 4]
    assert (info["builds"], info["cache_hits"], info["server_id"]) == (0, 1, facts["server_id"])
    assert not loaded(other)
    same = ("object_id", "server_id", "endpoint", "cache_key", "nbytes", "device", "generation", "created_at")
    assert {name: other.list_objects()[0][name] for name in same} == {name: facts[name] for name in same}
    gate.unlink()
    assert other.call("model", 9).weight[0, 0] == 9


@pytest.mark.asyncio
async def test_handles_and_leases_survive_a_restart(
    app: BrokerApp, manager: ServiceManager, gate: Path, broker: Child, client: Client
) -> None:
    """A client of the next broker takes its leases again: handles stay valid, and are released as usual."""
    async with AsyncClient(app.base_path, device="cpu", connect_timeout=20) as other:
        mine, again, theirs = client.call("held"), client.call("held"), await other.call("held", 5)
        await anyio.Path(gate).touch()
        broker.kill()
        await anyio.to_thread.run_sync(manager.start)
        assert not mine.is_stale()
        assert not await theirs.is_stale()
        assert app.connect().get_server_info()["leases"] == 2
        mine.release()
        assert client.get_server_info()["leases"] == 2
        again.release()
        await theirs.release()
        assert client.get_server_info()["leases"] == 0


def test_an_object_is_stored_before_the_reply(app: BrokerApp, manager: ServiceManager) -> None:
    """By a broker that is killed before the end of its loop's turn."""
    never = "from shared_rpc.broker.fd_store import FdStore\nFdStore.__init__.__defaults__ = (None, lambda write: None)\n"
    manager.start(program=app.program(never))
    buffer = app.connect().create_buffer(16)
    assert manager.objects() == [buffer.object_id]


def test_dropped_objects_leave_the_store(app: BrokerApp, manager: ServiceManager) -> None:
    """By invalidation, and for the budget; exactly the others exist after a restart."""
    broker = manager.start(max_bytes=12 << 10)
    client = app.connect(connect_timeout=20)
    for size in (2, 3):
        client.call("model", size)
    manager.expect(lambda: len(manager.objects()) == 2)
    client.invalidate_call_cache("model", 2)
    manager.expect(lambda: len(manager.objects()) == len(manager.names("segment-")) == 1)
    for size in (4, 5, 6):
        client.call("model", size)
    manager.expect(lambda: len(manager.objects()) == len(manager.names("segment-")) == 3)
    kept = ids(client)
    restart(broker, manager, 3, max_bytes=12 << 10)
    assert ids(client) == kept


def test_revisions_survive_a_restart(app: BrokerApp, manager: ServiceManager, broker: Child, client: Client) -> None:
    """Earlier and later handles have one page over one memory: writers take turns, and see each other's writes."""
    before = client.call("held")
    with client.update(before) as value:
        value.fill_(1.0)
    restart(broker, manager)
    other = app.connect(connect_timeout=20)
    after = other.call("held")
    with client.update(before) as value:
        value.add_(1.0)
        with pytest.raises(errors.ConfigurationError, match="deadlock: this thread is updating"), other.update(after):
            pass
    assert after.read_consistent(lambda value: float(value.sum())) == float(before.value.sum()) == 8.0
    assert after.revision == before.revision == 4
    client.invalidate_endpoint_cache("held")
    manager.expect(lambda: not manager.names("page-"))


def test_buffers_survive_a_restart(app: BrokerApp, manager: ServiceManager, broker: Child, client: Client) -> None:
    """With the rest of their terms; they leave the store once they are unavailable."""
    held, brief = client.create_buffer(8, "uint8"), client.create_buffer(16, ttl=3600)
    held.value.fill_(7)
    ends = brief.get_object_info()["expires_at"]
    restart(broker, manager, 2)
    other = app.connect()
    assert other.get_object_info(brief)["expires_at"] == pytest.approx(ends, abs=1)
    assert other.get_buffer(held.object_id).value.tolist() == [7] * 8
    other.free_buffer(held)
    manager.expect(lambda: len(manager.objects()) == len(manager.names("segment-")) == 1)


def test_an_open_channel_survives_a_restart_without_its_name(
    app: BrokerApp, manager: ServiceManager, broker: Child, world: World
) -> None:
    """Its processes use it, no other one opens it, and a new channel may have the name."""
    channel = app.connect().create_channel("c", 4096)
    reader = world.process(READER)
    channel.send({}, "before")
    reader.expect("received before")
    restart(broker, manager, 2)
    channel.send({}, "after")
    reader.expect("received after")
    with pytest.raises(errors.BufferNotFound, match=r"restarted .*: create it"):
        app.connect().open_channel("c")
    app.connect().create_channel("c", 4096).close()
    channel.close()
    assert reader.close()[0] == 0


@pytest.mark.parametrize("how", ["its value is cut off", "its segment is not there"])
def test_an_unrecoverable_object_is_removed(manager: ServiceManager, how: str, broker: Child, client: Client) -> None:
    """It is logged and leaves the store; the rest is unaffected."""
    with client.call("held") as handle, client.call("held", 1 << 19):
        assert handle.revision == 0  # now it has a page
    manager.expect(lambda: len(manager.objects()) == 2 and len(manager.names("page-")) == 1)
    broken = ids(client)["held(size=4)"]
    broker.kill()
    found = manager.entry(broken)
    if how == "its value is cut off":
        data = os.pread(manager.fd(f"object-{broken}"), 1 << 20, 0)
        manager.replace(f"object-{broken}", _memfd(data[:-10]))
    else:
        manager.remove(found.memory[0].name)
    broker = manager.start()
    assert broken in broker.expect_error("is unusable and is removed")
    manager.expect(lambda: len(manager.names("object-")) == len(manager.names("segment-")) == 1)
    with client.call("held", 1 << 19):
        assert client.get_server_info()["builds"] == 0
    with client.call("held") as handle:
        assert (handle.object_id != broken, handle.revision) == (True, 0)
    assert client.get_server_info()["builds"] == 1


def _memfd(data: bytes) -> int:
    fd = os.memfd_create("stored", os.MFD_CLOEXEC)
    os.write(fd, data)
    return fd


def test_a_state_of_another_version_is_removed(manager: ServiceManager, broker: Child, client: Client) -> None:
    """With a log line, together with everything it named, and descriptors of other programs."""
    client.call("model")
    manager.expect(lambda: len(manager.objects()) == 1)
    broker.kill()
    manager.replace("state", _memfd(b"shared-rpc state 0\n"))
    manager.store.append(("stored", _memfd(b"what is this")))
    broker = manager.start()
    broker.expect_error("the stored state is unusable and is removed: another version wrote it")
    manager.expect(lambda: manager.names() == ["state"])
    assert client.call("model").weight[0, 0] == 4
    assert client.get_server_info()["builds"] == 1


def test_a_full_store_is_reported(app: BrokerApp, make_manager: Callable[..., ServiceManager]) -> None:
    """If the manager has reported its capacity. Complete objects are recovered. The broker binds its socket itself here."""
    manager = make_manager(capacity=5, listen=False)
    manager.environ["FDSTORE"] = "5"
    broker = manager.start()
    client = app.connect(connect_timeout=20)
    for size in (2, 3, 4):
        client.call("model", size)
    assert "keeps at most 5 descriptors" in broker.expect_error("service manager")
    restart(broker, manager)
    assert list(ids(client)) == ["model(size=2)", "model(size=3)"]
    manager.expect(lambda: len(manager.objects()) == 2)
    assert client.call("model", 3).weight[0, 0] == 3


def test_readiness_is_reported_to_the_manager(app: BrokerApp, manager: ServiceManager, gate: Path) -> None:
    """The first time when the app is loaded; with recovered objects as soon as these can be attached."""
    gate.touch()
    broker = manager.start(wait_for="")
    waiting = app.connect(connect_timeout=30)
    eventually(Path(f"{gate}-reached").exists)
    assert not manager.has_received("READY=1")
    gate.unlink()
    manager.expect(lambda: manager.has_received("STATUS=0 objects can be attached; the app is loaded"))
    waiting.call("model")
    gate.touch()
    manager.received.clear()
    restart(broker, manager, 1)
    manager.expect(lambda: manager.has_received("STATUS=1 objects can be attached; the app is being loaded"))
    assert manager.has_received("READY=1")
    gate.unlink()
    manager.expect(lambda: manager.has_received("STATUS=1 objects can be attached; the app is loaded"))


def test_a_broken_app_does_not_prevent_attaching(manager: ServiceManager, gate: Path, broker: Child, client: Client) -> None:
    """The next broker serves existing objects, and reports why nothing is built; a reload repairs it."""
    client.call("model")
    manager.expect(lambda: len(manager.objects()) == 1)
    broken = Path(f"{gate}-broken")
    broken.touch()
    restart(broker, manager)
    assert client.call("model").weight[0, 0] == 4
    with pytest.raises(errors.WorkerCrashed, match="LookupError: no such checkpoint"):
        client.call("model", 9)
    broken.unlink()
    client.reload()
    assert client.call("model", 9).weight[0, 0] == 9
    assert client.get_server_info()["builds"] == 1


def test_code_changed_before_a_restart_is_detected(app: BrokerApp, manager: ServiceManager) -> None:
    """As after a reload: results of changed endpoints are dropped, those of the others stay."""
    source = """
        model(2)  # from here on the broker is notified of each endpoint separately

        @provider.share
        def answer():
            return torch.full((1,), {value})
    """
    app.write(source.format(value=1.0))
    broker = manager.start()
    client = app.connect(connect_timeout=20)
    assert client.call("answer").item() == 1
    client.call("model")
    manager.expect(lambda: len(manager.objects()) == 3)
    broker.kill()
    app.write(source.format(value=2.0))
    manager.start()
    eventually(lambda: loaded(client))
    assert sorted(ids(client)) == ["model(size=2)", "model(size=4)"]
    manager.expect(lambda: len(manager.objects()) == 2)
    assert client.call("answer").item() == 2
    assert client.call("model").weight[0, 0] == 4
    assert client.get_server_info()["builds"] == 1


def test_a_reload_is_reported_to_the_manager(app: BrokerApp, manager: ServiceManager, broker: Child, client: Client) -> None:
    """Its beginning and its end; a restart recovers the new endpoints."""
    manager.expect(lambda: manager.has_received("READY=1"))
    manager.received.clear()
    app.write("""
        @provider.share
        def later():
            return torch.ones(1)
    """)
    broker.process.send_signal(signal.SIGHUP)
    broker.expect("reloaded")
    manager.expect(lambda: manager.has_received("READY=1"))
    assert manager.received[0] == "RELOADING=1" and manager.has_received("MONOTONIC_USEC=")
    client.call("later")
    restart(broker, manager, 1)
    assert client.call("later").item() == 1
    assert client.get_server_info()["builds"] == 0


def test_stopping_is_reported_to_the_manager(
    app: BrokerApp, manager: ServiceManager, gate: Path, broker: Child, client: Client
) -> None:
    """The socket stays the manager's, and the stored state stays for the next start."""
    client.call("model")
    buffer = client.create_buffer(16)
    manager.expect(lambda: len(manager.objects()) == 2)
    kept = manager.names()
    app.connect().stop_server()
    assert broker.close() == (0, "")
    manager.expect(lambda: manager.has_received("STOPPING=1"))
    assert manager.names() == kept
    assert os.path.exists(manager.path)
    gate.touch()
    manager.start()
    assert client.call("model").weight[0, 0] == 4
    assert not buffer.is_stale()


def test_removed_providers_are_not_recovered(app: BrokerApp, manager: ServiceManager) -> None:
    """Results of a provider that the app lacks are dropped with it; those of the others stay."""
    app.write("""
        second = Provider(os.environ["SHARED_TENSOR_BASE_PATH"] + "-2", device="cpu")
        second.share("other")(lambda: torch.ones(1))
    """)
    broker = manager.start()
    client = app.connect(connect_timeout=20)
    client.call("model")
    with Client(f"{app.base_path}-2", device="cpu") as other:
        other.call("other")
    app.write()
    restart(broker, manager, 2)
    manager.expect(lambda: len(manager.state.services) == len(manager.objects()) == 1)
    manager.expect(lambda: not os.path.exists(f"{app.base_path}-2-cpu.sock"))
    assert list(ids(client)) == ["model(size=4)"]


def test_a_socket_without_a_provider_is_an_error(app: BrokerApp, manager: ServiceManager) -> None:
    """Its clients would wait without end, so the error names both."""
    broker = manager.start(base_path=f"{app.base_path}-other", wait_for="")
    code, stderr = broker.close()
    assert code == 1
    assert f"the service manager listens at {manager.path}, but the app serves at {app.base_path}-other-cpu.sock" in stderr


#: An app on a GPU.
GPU_APP = """
import os, time
import torch
from shared_rpc import Provider

provider = Provider(device="cuda")

@provider.share
def weights():
    return torch.arange(1 << 20, device="cuda", dtype=torch.float32)
"""


@pytest.mark.gpu
def test_gpu_memory_survives(app: BrokerApp, make_manager: Callable[..., ServiceManager]) -> None:
    """The manager holds it without CUDA: after the end of broker, worker and all clients, every byte is intact."""
    app.file.write_text(GPU_APP)
    manager = make_manager(listen=False)
    broker = manager.start()
    with Client(app.base_path, device="cuda", connect_timeout=20) as client:
        weights, buffer = client.call("weights"), client.create_buffer(1 << 20)
        weights[0] = 42
        buffer.value.fill_(7)
        torch.cuda.synchronize()
        buffer_id = buffer.object_id
        manager.expect(lambda: len(manager.objects()) == len(manager.names("segment-")) == 2)
        broker.kill()
        del weights, buffer
    gc.collect()
    MAPPINGS.drain()
    manager.start()
    with Client(app.base_path, device="cuda", connect_timeout=20) as client:
        weights = client.call("weights")
        assert (weights[0].item(), weights[1:].double().sum().item()) == (42, sum(range(1 << 20)))
        assert client.get_buffer(buffer_id).value.eq(7).all()
        assert client.get_server_info()["builds"] == 0


# The protocol, without a broker: the values that are read, and the notifications that are sent.


#: Moves its open descriptors to 3 and above, like a manager, and prints the resulting values.
TAKES = """
import fcntl, os, socket, sys
from shared_rpc.broker.systemd import inherit
from shared_rpc.errors import ConfigurationError
from shared_rpc.settings import take_service_variables

kinds, pid = sys.argv[1].split(), sys.argv[2]
for fd in range(3, 20):
    try:
        os.close(fd)
    except OSError:
        pass

for number, kind in enumerate(kinds):
    if kind == "memory":
        fd = os.memfd_create("stored", 0)
    elif kind != "nothing":
        sock = socket.socket(socket.AF_UNIX)
        if kind == "listens":
            sock.bind(sys.argv[3])
            sock.listen()
        fd = sock.detach()
    if kind != "nothing":
        assert fd == 3 + number, fd
        os.set_inheritable(fd, True)
os.environ.update(LISTEN_PID=pid or str(os.getpid()), LISTEN_FDS=str(len(kinds)), LISTEN_FDNAMES=":".join(kinds))
try:
    inherited = inherit(take_service_variables())
except ConfigurationError as error:
    print("refused", error)
    sys.exit()
print("took", list(inherited.listeners), inherited.stored)
print("left", [name for name in os.environ if name.startswith("LISTEN_")])
print("inheritable", [fd for fd in range(3, 3 + len(kinds)) if os.get_inheritable(fd)])
print("blocking", [listener.getblocking() for listener in inherited.listeners.values()])
"""


def test_inherited_sockets_and_descriptors_are_taken(world: World, tmp_path: Path) -> None:
    """Sockets by their path, stored descriptors by name; children inherit neither them nor the variables."""
    path = str(tmp_path / "socket")
    child = world.process(TAKES, "listens memory memory", "", path)
    assert child.expect("took") == f"took [{path!r}] [Passed(name='memory', fd=4), Passed(name='memory', fd=5)]"
    assert child.expect("left") == "left []"
    assert child.expect("inheritable") == "inheritable []"
    assert child.expect("blocking") == "blocking [False]"


def test_descriptors_for_another_pid_are_left_alone(world: World, tmp_path: Path) -> None:
    """``LISTEN_PID`` is not this process: nothing is touched."""
    child = world.process(TAKES, "listens memory", "1", str(tmp_path / "socket"))
    assert child.expect("took") == "took [] []"
    assert child.expect("inheritable") == "inheritable [3, 4]"


@pytest.mark.parametrize(
    ("kinds", "why"),
    [
        ("mute", "socket 'mute' is no listening Unix stream socket: use ListenStream= with a path"),
        ("memory nothing", "LISTEN_FDS=2, but descriptor 4 is not open"),
    ],
)
def test_unusable_descriptors_are_configuration_errors(world: World, kinds: str, why: str) -> None:
    """The error names the socket or descriptor."""
    assert why in world.process(TAKES, kinds, "").expect("refused")


def test_a_stuck_manager_does_not_block(no_leaks: None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its queue is full: lost messages are logged after a moment, and the broker continues."""
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        notifier = inherit({"NOTIFY_SOCKET": address}).notifier
        notifier._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 10_000))
        for _ in range(5000):
            notifier.notify("STATUS=again")
            if caplog.records:
                break
        notifier._socket.close()
    assert "cannot send STATUS=again to the service manager" in caplog.text
