"""Small results share segments where nothing counts or moves them one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shared_rpc import Client, Provider, Server
from shared_rpc.errors import CapabilityError
from shared_rpc.memory.devices import device_id
from shared_rpc.memory.mapping import MAPPINGS
from tests.kit.processes import open_fds

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def shared(base_path: str, device: str) -> Provider:
    """Endpoints of small results."""
    provider = Provider(base_path, device=device)

    def filled(value: int) -> torch.Tensor:
        return torch.full((1024,), float(value), device=device)

    provider.share("cached")(filled)
    provider.share("managed", managed=True)(filled)
    provider.share("pinned", managed=True, pinned=True)(filled)
    provider.share("ahead", managed=True, host_copy="at_build")(filled)
    return provider


def share_a_segment(client: Client, endpoint: str) -> bool:
    """Whether two results of an endpoint do."""
    with client.call(endpoint, 1) as one, client.call(endpoint, 2) as other:
        found = [MAPPINGS.find(handle.value.data_ptr()) for handle in (one, other)]
        return len({mapping.info.id for mapping, _ in filter(None, found)}) == 1


def test_many_cached_results_need_few_descriptors(shared: Provider, device: str) -> None:
    """Nor does a process that has all of them need many."""
    with Server(shared), Client(shared.base_path, device=device) as client:
        before, mapped = open_fds(), len(MAPPINGS)
        results = [client.call("cached", number) for number in range(600)]
        assert open_fds() - before < 10 and len(MAPPINGS) - mapped < 10
        assert [int(result[-1]) for result in results] == list(range(600))
        assert client.get_server_info()["objects"] == 600


@pytest.mark.parametrize(
    ("endpoint", "options", "together"),
    [
        ("managed", {}, True),
        ("pinned", {}, False),
        ("ahead", {}, False),
        ("managed", {"max_bytes": 1 << 30}, False),
        ("managed", {"quotas": 1 << 30}, False),
        ("managed", {"host_quota": 1 << 30}, False),
        ("managed", {"spill_dir": "."}, False),
    ],
    ids=lambda value: value if isinstance(value, str) else "".join(value) if isinstance(value, dict) else None,
)
def test_what_is_counted_or_moved_has_a_segment_of_its_own(
    shared: Provider, device: str, endpoint: str, options: dict[str, Any], together: bool
) -> None:
    """Then a result can be dropped, or moved to another tier, without the others."""
    if "quotas" in options:
        options = {"quotas": {device_id(device): options["quotas"]}}
    with Server(shared, **options), Client(shared.base_path, device=device) as client:
        assert share_a_segment(client, endpoint) == together


def test_an_export_has_the_result_alone(shared: Provider, device: str, base_path: str) -> None:
    """No other result of the slab is exported, and another server adopts the record."""
    other = Provider(f"{base_path}-other", device=device)
    other.share("managed", managed=True)(shared.endpoints["managed"].function)
    with Server(shared), Client(shared.base_path, device=device) as client:
        client.call("managed", 1).release()
        with Server(other), Client(other.base_path, device=device) as there:
            with client.call("managed", 2) as handle, client.export(handle) as record:
                assert [segment.nbytes for segment in record.segments] == [4096]
                assert record.segments[0].tensor().view(torch.float32).unique().tolist() == [2]
                there.adopt(record)
            with there.call("managed", 2) as adopted:
                assert adopted.value.unique().tolist() == [2]


def test_a_result_in_a_slab_is_not_evicted(shared: Provider, device: str) -> None:
    """The error says how it can be."""
    with Server(shared), Client(shared.base_path, device=device) as client:
        client.call("managed", 1).release()
        with pytest.raises(CapabilityError, match="shares a segment with other small results"):
            client.evict("managed")
