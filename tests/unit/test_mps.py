"""NVIDIA's Multi-Process Service, as the driver reports it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shared_rpc.memory.backends.choice import backend_for, mechanism_info
from tests.kit import fake_driver


@pytest.fixture(params=[False, True], ids=["without", "under"])
def mps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether the GPUs are used through it."""
    with fake_driver.installed():
        monkeypatch.setitem(fake_driver._ATTRIBUTES, 133, int(request.param))
        yield request.param


def test_a_process_tells_whether_it_shares_its_context(mps: bool) -> None:
    """With the mechanism, in ``info`` of a server."""
    assert mechanism_info("auto", fake_driver.GPUS[0])["mps"] is mps


def test_the_first_protected_mapping_warns(mps: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Once, and only where a write ends other processes too."""
    backend = backend_for(fake_driver.GPUS[0])
    with backend.create(1) as segment:
        for access in ("read_write", "read", "read"):
            address = backend.map(segment.fileno(), segment.info.nbytes, access)
            backend.unmap(address, segment.info.nbytes)
    assert [("Multi-Process Service" in record.getMessage()) for record in caplog.records] == [True] * mps
