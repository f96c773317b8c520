"""Kills at random instants: of clients within their calls, of workers within theirs, and of the broker at the end."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress

import pytest
import torch

from shared_rpc import errors
from tests.kit.brokers import BrokerApp, is_running, worker_pids
from tests.kit.deep import repetitions
from tests.kit.processes import Child, eventually
from tests.kit.world import World

#: Elements of every tensor here: segments of their own, and pages enough for a torn write to be seen.
SIZE = 1 << 18

ENDPOINTS = """
provider.device = {device!r}

@provider.share
def numbered(number):
    return torch.full(({size},), float(number), device={device!r})

@provider.share(managed=True, cache=False)
def made(number):
    return torch.full(({size},), float(number), device={device!r})

@provider.share(managed=True)
def load(start=[0]):
    start[0] += 1
    return torch.full(({size},), float(start[0]), device={device!r})

@provider.share(cache=False)
def plus(x):
    return x + 1
"""

#: Random operations, whose results it checks. It expects errors of killed workers, and exits when the broker is gone.
CLIENT = """
    import itertools, random, sys
    import torch
    from shared_rpc import Client, errors

    device, seed = {device!r}, {seed}
    choose = random.Random(seed)
    client = Client(device=device, timeout=60.0, connect_timeout=20.0)

    def right(value, number):
        assert value.shape == ({size},) and bool((value == number).all()), (number, value)

    def attach():
        number = choose.randrange(8)
        right(client.call("numbered", number), number)

    def publish():
        number = choose.random()
        with client.call("made", number) as handle:
            right(handle.value, torch.tensor(number, dtype=torch.float32).item())

    def send():
        number = choose.randrange(1000)
        right(client.call("plus", torch.full(({size},), float(number), device=device)), number + 1)

    def update():
        with client.call("load") as handle, client.update(handle) as value:
            value.fill_(choose.random())

    def read():
        with client.call("load") as handle:
            value = handle.read_consistent(torch.clone, timeout=5.0)
            right(value, value[0].item())

    def refresh():
        client.refresh("load")

    def buffer():
        with client.create_buffer(({size},), "float32") as handle:
            handle.value.fill_(3)
            with client.get_buffer(handle.object_id) as again:
                right(again.value, 3)

    operations = [attach, publish, send, update, read, refresh, buffer]
    expected = (errors.WorkerCrashed, errors.UpdateInterrupted, errors.DeadlineExceeded, errors.RefreshError)
    kept = client.call("numbered", 100)
    print("ready", flush=True)
    for count in itertools.count():
        operation = choose.choice(operations)
        try:
            operation()
        except expected:
            pass
        except (errors.ConnectionClosed, errors.ConnectError):
            break
        except BaseException as error:
            print("wrong", operation.__name__, repr(error), flush=True)
            raise
    right(kept, 100)
    print("ended", count, flush=True)
"""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.whole_gpu])])
def device(request: pytest.FixtureRequest) -> str:
    """The device of the memory."""
    kind: str = request.param
    return kind


def in_use() -> int:
    """Return the bytes in use on the GPU, by any process, once this process has its context."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def kill(client: Child) -> None:
    """Send SIGKILL to a client that has detected no error until then."""
    assert client.close(signal.SIGKILL) == (-signal.SIGKILL, "")


@pytest.mark.timeout(300)
def test_kills_at_random_instants(broker_app: BrokerApp, world: World, device: str) -> None:
    """Results are right, dead clients hold nothing; after the broker, all is freed but what living clients have mapped."""
    seed, seconds = random.randrange(1 << 30), repetitions(5, 120)
    print("seed", seed)
    choose = random.Random(seed)
    before = in_use() if device == "cuda" else 0
    broker_app.write(ENDPOINTS.format(device=device, size=SIZE))
    broker = broker_app.start()
    watching = broker_app.connect(device=device, timeout=60.0)

    def another() -> Child:
        child = world.process(CLIENT.format(device=device, seed=choose.randrange(1 << 30), size=SIZE))
        child.expect("ready")
        return child

    clients = [another() for _ in range(3)]
    end = time.monotonic() + seconds
    worker_kills = [end - seconds * share for share in (0.4, 0.8)]
    killed = 0
    while time.monotonic() < end:
        time.sleep(choose.uniform(0.0, 0.5))
        kill(clients.pop(choose.randrange(len(clients))))
        killed += 1
        if worker_kills and time.monotonic() > worker_kills[-1]:
            worker_kills.pop()
            with suppress(ProcessLookupError, IndexError):  # the next one is not there yet
                os.kill(choose.choice(worker_pids(watching)), signal.SIGKILL)
        clients.append(another())
    assert killed > seconds / 5
    for client in clients[1:]:
        kill(client)
    # One client continues; only its objects are held, besides the cached ones.
    eventually(lambda: watching.get_server_info()["sessions"] == 2, what="dead clients have no session")
    eventually(lambda: all(one["endpoint"] in ("numbered", "load") or one["leases"] for one in watching.list_objects()))
    workers = worker_pids(watching)
    broker.kill()
    clients[0].expect("ended")
    assert clients[0].close() == (0, "")
    watching.close()
    eventually(lambda: not any(map(is_running, workers)), what="workers end with their broker")
    if device == "cuda":
        eventually(lambda: in_use() <= before, what=f"the GPU's memory in use is what it was before, {before}")
    with pytest.raises((errors.ConnectError, errors.ConnectionClosed)):
        broker_app.connect(connect_timeout=0).ping()
