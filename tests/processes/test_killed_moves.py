"""Each party of a move between tiers, killed at each of its steps: no object is lost, nothing leaks, the next call works.

The tables list the steps before which a party has sent something, or allocated memory. Add new steps there: the tests of the
tables fail if a party has an effect between two of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shared_rpc import Client
from shared_rpc.protocol import messages as m
from tests.kit.brokers import BrokerApp, is_running, memory_of
from tests.kit.deep import deep
from tests.kit.fake_driver import GPUS
from tests.kit.forks import DRIVER
from tests.kit.killing import Killing
from tests.kit.moving import APP, MovedBuffer, back_of, to_of
from tests.kit.processes import eventually
from tests.kit.service_manager import ServiceManager
from tests.kit.world import World

MakeManager = Callable[..., ServiceManager]
#: Bytes of an object, and of one whose file has two parts.
SMALL, LARGE = 64 << 10, (64 << 20) + (64 << 10)


def nbytes_for(step: str) -> int:
    """Return the bytes of an object whose move includes a step."""
    return LARGE if "Steps.count" in step else SMALL


@pytest.fixture
def killing(tmp_path: Path) -> Killing:
    """Kills at steps."""
    return Killing(tmp_path / "steps")


@pytest.fixture
def spill(tmp_path: Path) -> Path:
    """A directory for files."""
    (tmp_path / "spill").mkdir()
    return tmp_path / "spill"


def died(killing: Killing, step: str) -> int:
    """Wait until a process has ended at a step; return its process id."""
    eventually(lambda: killing.reached is not None, 60.0, step)
    assert killing.reached is not None
    pid, reached = killing.reached
    assert reached == step
    eventually(lambda: not is_running(pid), 60.0, f"the end of {pid}")
    return pid


#: Functions of several parties, with their modules.
EFFECTS = {
    "MappingTable._vacate_one": "shared_rpc.memory.mapping",
    "MappingTable._fill": "shared_rpc.memory.mapping",
    "SpillDirectory.create": "shared_rpc.memory.spill",
    "_host_segment": "shared_rpc.memory.copies",
    "ObjectStore.evict": "shared_rpc.server.state.objects",
    "ObjectStore.warm": "shared_rpc.server.state.objects",
    "Notifier.store": "shared_rpc.broker.systemd",
    "Notifier.remove": "shared_rpc.broker.systemd",
}


# Clients.

#: The functions of a client, with their modules.
OF_CLIENTS = {
    "suspend_handle": "shared_rpc.client.suspension",
    "map_again": "shared_rpc.client.suspension",
    "_unmapped": "shared_rpc.client.suspension",
    "_mapped": "shared_rpc.client.suspension",
    "Link._start": "shared_rpc.client.link",
    **EFFECTS,
}
SUSPENDING = [
    "before suspend_handle",
    "before suspend_handle, after Link._start",
    "before _unmapped",
    "before MappingTable._vacate_one",
    "after MappingTable._vacate_one",
    "after _unmapped",
    "after _unmapped, after Link._start",
    "after suspend_handle",
]
RESUMING = [
    "before map_again",
    "before map_again, after Link._start",
    "before _mapped",
    "before MappingTable._fill",
    "after MappingTable._fill",
    "after _mapped",
    "after map_again",
]

MODEL = """
@provider.share(managed=True)
def numbers():
    return torch.arange(1 << 18)
"""

#: The orders for a client with a handle, by the actions' names.
ACTIONS = {
    "suspend": "handle.suspend()",
    "resume": "handle.resume()",
    "evict": "client.evict(handle.object_id)",
    "restore": "client.restore(handle.object_id)",
}


@pytest.fixture
def client(broker_app: BrokerApp, spill: Path) -> Client:
    """A client of a broker."""
    broker_app.write(MODEL)
    broker_app.start(spill_dir=str(spill), preload=False)  # a zygote would start during some of the moves
    return broker_app.connect()


@pytest.mark.parametrize(
    ("before", "action", "step"),
    [
        *(((), "suspend", step) for step in SUSPENDING),
        *((("suspend", "evict"), "resume", step) for step in RESUMING),
        *deep(*((("suspend",), "resume", step) for step in RESUMING)),
        (("suspend",), "evict", "after Link._start"),
        (("suspend", "evict"), "restore", "after Link._start"),
    ],
)
def test_killed_clients_do_not_stop_a_move(
    client: Client, killing: Killing, world: World, before: tuple[str, ...], action: str, step: str
) -> None:
    """The lease ends, and the object can be called, evicted and called again."""
    child = world.peer(killing.code(OF_CLIENTS) + "handle = client.call('numbers')")
    broker, object_id = client.get_server_info()["pid"], client.list_objects()[0]["object_id"]
    cold = memory_of(broker)  # a file takes the place of the memory
    for earlier in before:
        child.ask(f"{ACTIONS[earlier]}; print('done', flush=True)", "done")
    killing.arm(step)
    child.tell(ACTIONS[action])
    assert died(killing, step) == child.pid
    eventually(lambda: client.get_object_info(object_id)["leases"] == 0)
    for _ in range(2):
        with client.call("numbers") as handle:
            assert handle.object_id == object_id
            assert handle.value.tolist() == list(range(1 << 18))
        assert [move["tier"] for move in client.evict(object_id)] == ["file"]
        eventually(lambda: memory_of(broker) == cold)
    assert client.get_server_info()["builds"] == 1


# Workers, and buffers of a GPU.

#: The functions of a worker, with their modules.
OF_WORKERS = {
    "OrderedMemory._copy": "shared_rpc.worker.memory",
    "GpuCopies.copy": "shared_rpc.memory.gpu_copies",
    "OrderedMemory._reply": "shared_rpc.worker.memory",
    "GpuCopies._map": "shared_rpc.memory.gpu_copies",
    "Steps.count": "shared_rpc.memory.copies",
    "GpuCopies._create": "shared_rpc.memory.gpu_copies",
    "Stream.copy": "shared_rpc.memory.gpu_streams",
    **EFFECTS,
}
#: The steps of a worker for any of its copies.
COPYING = [
    "before OrderedMemory._copy",
    "before GpuCopies.copy",
    "after GpuCopies._map",
    "after Stream.copy",
    "after Steps.count",
    "after GpuCopies.copy",
    "before OrderedMemory._reply",
    "after OrderedMemory._reply",
]
TO_MEMORY = ["after GpuCopies._create"]
#: An order for a file has two parts.
TO_FILE = ["after Steps.count, after Steps.count"]
WORKING = {
    "evicting to the host": COPYING + TO_MEMORY,
    "restoring from the host": COPYING + TO_MEMORY,
    "evicting to the host again": COPYING,
    "evicting to a file": COPYING + TO_FILE,
    "restoring from a file": COPYING + TO_MEMORY + TO_FILE,
}


#: Copying is the same in all moves: one to memory and one from a file have all of its steps, the others their own and one more.
KILLED_WORKERS = [
    (move, step)
    for move, steps in WORKING.items()
    for step in steps
    if move in ("evicting to the host", "restoring from a file") or step not in COPYING[1:]
]
OTHER_WORKERS = [(move, step) for move, steps in WORKING.items() for step in steps if (move, step) not in KILLED_WORKERS]


def check_subject(subject: MovedBuffer, move: str) -> None:
    """Nothing is left over in the broker, and the buffer can be opened, evicted and opened again.

    A copy in host memory is kept for the next time, if the host has enough.
    """
    assert subject.has_its_bytes()
    eventually(lambda: memory_of(subject.pid) == 1 + subject.is_copied)
    assert subject.moved(back_of(move)) == to_of(move)
    eventually(lambda: memory_of(subject.pid) == 1)
    assert subject.has_its_bytes()
    eventually(lambda: memory_of(subject.pid) == 1 + subject.is_copied)
    assert to_of(move) == "host" or not subject.is_copied


@pytest.mark.parametrize(("move", "step"), [*KILLED_WORKERS, *deep(*OTHER_WORKERS)])
def test_killed_workers_are_replaced_in_a_move(
    broker_app: BrokerApp, killing: Killing, spill: Path, monkeypatch: pytest.MonkeyPatch, move: str, step: str
) -> None:
    """A bare worker makes the copy, unless the answer was sent already; later copies are made by the next worker."""
    if os.environ.get("SHARED_RPC_TESTS") == "fresh":
        pytest.skip("a worker without the app has no other driver")
    monkeypatch.setenv(DRIVER, "1")
    broker_app.file.write_text(APP.format(watching=killing.code(OF_WORKERS)))
    broker_app.start(spill_dir=str(spill), preload=False)  # a zygote would start during some of the moves
    subject = MovedBuffer(broker_app, GPUS[0], nbytes_for(step))
    [worker] = subject.workers()
    subject.prepare(move)
    killing.arm(step)
    with subject.move(move) as session:
        assert died(killing, step) == worker
        assert isinstance(session.hear(), m.Answer)
    eventually(lambda: subject.workers() not in ([], [worker]), 60.0, "another worker")
    check_subject(subject, move)


# Brokers.

#: The functions of a broker, with their modules.
OF_BROKERS = {
    "Tiers.move_down": "shared_rpc.server.tiers",
    "Tiers._restore": "shared_rpc.server.tiers",
    "Tiers._copy": "shared_rpc.server.tiers",
    "DeviceMemory.lower": "shared_rpc.execution.device_memory",
    "DeviceMemory.raise_": "shared_rpc.execution.device_memory",
    "copy_on_host": "shared_rpc.memory.copies",
    "Steps.count": "shared_rpc.memory.copies",
    "WorkerRequests.begin": "shared_rpc.broker.requests",
    "RelayedMemory._written": "shared_rpc.broker.memory",
    "FdStore.keep": "shared_rpc.broker.fd_store",
    "StateFile.write": "shared_rpc.broker.fd_store",
    "RemoteCaller.reply": "shared_rpc.server.remote",
    **EFFECTS,
}
#: A service manager first stores the bytes, then the state that names them; then it drops all that the state no longer names.
STORING = [
    "before FdStore.keep",
    "before FdStore.keep, after Notifier.store",
    "before FdStore.keep, before StateFile.write",
    "before FdStore.keep, after StateFile.write",
    "before FdStore.keep, after Notifier.remove",
]
ORDERING = ["before WorkerRequests.begin", "after WorkerRequests.begin", "after RelayedMemory._written"]
EVICTING = [
    "before Tiers.move_down",
    "after DeviceMemory.lower",
    "after Tiers._copy",
    "before ObjectStore.evict",
    "after ObjectStore.evict",
    "after Tiers.move_down",
    "after Tiers.move_down, after RemoteCaller.reply",
]
RESTORING = [
    "before Tiers._restore",
    "after DeviceMemory.raise_",
    "before ObjectStore.warm",
    "after ObjectStore.warm",
    "after Tiers._restore",
    "after Tiers._restore, after RemoteCaller.reply",
]
#: Moves of host memory, which the broker copies itself, and of a GPU's.
BROKERING = {
    ("cpu", "evicting to a file"): [*EVICTING, "after SpillDirectory.create", "after Steps.count", "after copy_on_host"],
    ("cpu", "restoring from a file"): [*RESTORING, "after _host_segment", "after Steps.count", "after copy_on_host"],
    (GPUS[0], "evicting to the host"): ORDERING,
    (GPUS[0], "restoring from the host"): ORDERING,
    (GPUS[0], "evicting to the host again"): ORDERING,
}


@pytest.mark.parametrize(
    ("device", "move", "step"),
    [(*move, step) for move, steps in BROKERING.items() for step in (*steps, *(STORING if move[0] == "cpu" else ()))],
)
def test_killed_brokers_of_a_service_manager_keep_the_object(
    broker_app: BrokerApp, make_manager: MakeManager, killing: Killing, spill: Path, device: str, move: str, step: str
) -> None:
    """The next one has it in the source or the target tier; the manager stores nothing else."""
    manager = make_manager(listen=False)
    broker_app.file.write_text(APP.format(watching=""))
    broker = manager.start(program=broker_app.program(killing.code(OF_BROKERS), spill_dir=str(spill), preload=False))
    subject = MovedBuffer(broker_app, device, nbytes_for(step))
    workers = subject.workers()
    subject.prepare(move)
    killing.arm(step)
    with subject.move(move):
        assert died(killing, step) == broker.pid
    eventually(lambda: not any(map(is_running, workers)), 60.0, "the end of the workers")
    manager.start(spill_dir=str(spill), preload=False)
    assert subject.tier in ("device", to_of(move))
    eventually(lambda: subject.workers() != [], 60.0, "a worker")
    check_subject(subject, move)
    manager.expect(lambda: sorted(name.partition("-")[0] for name in manager.names()) == ["object", "segment", "state"])
