"""The memory of dropped objects is freed outside the server's loop, which answers other clients in the meantime."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shared_rpc import Client, Provider, Server
from shared_rpc.errors import ServerBusy
from shared_rpc.execution import device_memory
from shared_rpc.memory.closing import CLOSER
from tests.kit.brokers import BrokerApp
from tests.kit.closings import FILE, LARGE, late_closings
from tests.kit.processes import eventually


def test_a_broker_s_loop_closes_no_large_memory(broker_app: BrokerApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread closes an object's last descriptor."""
    closings = tmp_path / "closings"
    monkeypatch.setenv(FILE, str(closings))
    broker_app.start("--hook", "tests.kit.closings:hook")
    with broker_app.connect() as client:
        client.create_buffer(LARGE).release()
        eventually(lambda: closings.exists() and closings.read_text().endswith("\n"), what="memory is closed")
    assert set(closings.read_text().split()) == {"shared-rpc-closer"}


def memory() -> set[str]:
    """Return the large memory that this process has descriptors of."""
    links = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{number}")
            large = "memfd:shared-rpc-" in link and os.stat(f"/proc/self/fd/{number}").st_size == LARGE
        except OSError:  # closed in the meantime
            continue
        links |= {link} if large else set()
    return links


def test_quotas_count_dropped_memory_as_free(
    device: str, base_path: str, connect: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused request is admitted once an object is dropped; on a GPU it waits for the actual free."""
    with Server(Provider(base_path, device=device), quotas={device: LARGE}):
        client = connect(device=device)
        full = client.create_buffer(LARGE)
        with pytest.raises(ServerBusy):
            client.create_buffer(LARGE)
        with late_closings() as go:
            notify = CLOSER.notify
            monkeypatch.setattr(CLOSER, "notify", lambda freed: (go.set(), notify(freed)))
            full.release()
            eventually(lambda: len(CLOSER) == 1)
            with client.create_buffer(LARGE) as buffer:
                assert buffer.value.shape == (LARGE,)
                assert go.is_set() == (device != "cpu")


def test_builds_wait_for_pending_frees(
    provider: Provider,
    serve: Callable[..., Server],
    connect: Callable[..., Client],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the device has less free memory than is being freed."""
    left: list[int] = []

    @provider.share
    async def weights() -> torch.Tensor:
        left.append(len(CLOSER))
        return torch.zeros(4)

    serve()
    client = connect()
    with late_closings() as go:
        notify = CLOSER.notify
        monkeypatch.setattr(CLOSER, "notify", lambda function: (go.set(), notify(function)))
        client.create_buffer(LARGE).release()
        eventually(lambda: len(CLOSER) == 1)
        monkeypatch.setattr(device_memory, "free_bytes", lambda device: 0)
        client.call("weights")
    assert left == [0]
