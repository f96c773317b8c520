"""Several GPUs: memory on one that a client does not see."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shared_rpc import Provider, Server
from tests.kit.processes import Child, python


@pytest.fixture
def two_gpus() -> None:
    """These tests need two GPUs that reach each other."""
    from shared_rpc.memory.backends.cuda import peer_capable, visible_gpus

    if len(visible_gpus()) < 2 or not peer_capable(0, 1):
        pytest.skip("needs two GPUs that are peers")


@pytest.mark.gpu
def test_a_client_that_sees_another_gpu_maps_the_memory_as_a_peer(
    two_gpus: None, base_path: str, children: list[Child]
) -> None:
    """It reads and writes what lies on the GPU that it does not see."""
    provider = Provider(base_path, device="cuda:0")
    made: dict[str, Any] = {}

    @provider.share
    def weights() -> torch.Tensor:
        made["weights"] = torch.arange(4096.0, device="cuda:0")
        return made["weights"]

    with Server(provider) as server:
        client = python(
            f"""
            import torch
            from shared_rpc import Client
            with Client(socket_path={server.socket_path!r}) as client:
                weights = client.call("weights")
                assert torch.cuda.device_count() == 1
                print("sum", weights.sum().item(), weights.device)
                weights.mul_(2)
                torch.cuda.synchronize()
                print("written")
            """,
            environ={"CUDA_VISIBLE_DEVICES": "1"},
        )
        children.append(client)

        assert client.expect("sum") == f"sum {torch.arange(4096.0).sum().item()} cuda:0"
        client.expect("written")

        assert made["weights"].sum().item() == 2 * torch.arange(4096.0).sum().item()


@pytest.mark.gpu
def test_a_client_finds_the_server_of_its_gpu_by_uuid(two_gpus: None, base_path: str, children: list[Child]) -> None:
    """An index means another GPU where CUDA_VISIBLE_DEVICES differs; the socket is named by UUID."""
    provider = Provider(base_path, device="cuda:1")
    provider.share("ones")(lambda: torch.ones(8, device="cuda:1"))
    with Server(provider):
        client = python(
            """
            from shared_rpc import Client
            with Client(device="cuda:0") as client:
                print("sum", client.call("ones").sum().item())
            """,
            environ={"CUDA_VISIBLE_DEVICES": "1"},
        )
        children.append(client)

        assert client.expect("sum") == "sum 8.0"
