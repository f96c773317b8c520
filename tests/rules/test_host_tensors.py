"""Results with tensors on the host and on a GPU: their placement, and their device when rebuilt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.optim.swa_utils import AveragedModel

from shared_rpc.codec.arguments import encode_arguments, lower_arguments
from shared_rpc.codec.payload import dump_result
from shared_rpc.errors import CapabilityError
from tests.kit.models import State


def test_devices_in_objects_are_translated(device: str, rebuilt: Callable[..., Any]) -> None:
    """To the reader's own name for the same device."""
    where = torch.ones(1, device=device).device
    assert rebuilt(State(1, {"m": torch.ones(1, device=device), "at": where})).moments["at"] == where


def _optimizer() -> torch.optim.Optimizer:
    weight = torch.empty(0, requires_grad=True)  # an empty one may be anywhere
    optimizer = torch.optim.AdamW([weight])
    optimizer.state[weight] = {"step": torch.tensor(3.0)}
    return optimizer


def _schedule() -> Any:
    return pytest.importorskip("diffusers").DDPMScheduler(num_train_timesteps=10)


def _averaged() -> torch.nn.Module:
    return AveragedModel(torch.nn.Identity())


def _packed() -> PackedSequence:
    return PackedSequence(torch.empty(1, 0), torch.tensor([1]))


@pytest.mark.parametrize(
    "make", [_optimizer, _schedule, _averaged, _packed], ids=["optimizer", "schedule", "averaged model", "packed sequence"]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_host_state_of_known_objects_stays_on_the_host(make: Callable[[], Any]) -> None:
    """With memory shared on a GPU, such tensors on the host are allowed."""
    _, scan = dump_result([torch.nn.Identity(), State(1, {"m": make()})], "load", "cuda")
    assert scan.storages
    assert {storage.device.type for storage in scan.storages} == {"cpu"}


@pytest.mark.parametrize(
    "make, path",
    [
        (lambda: torch.nn.Linear(1, 1), "result[1].weight"),
        (lambda: State(1, {"m": torch.ones(1)}), "result[1].moments['m']"),
        (lambda: State(1, {"m": _optimizer(), "t": torch.ones(1)}), "result[1].moments['t']"),
        (lambda: PackedSequence(torch.ones(1, 1), torch.tensor([1])), "result[1][0]"),
    ],
    ids=["parameter", "dataclass", "beside an optimizer", "in a packed sequence"],
)
def test_other_host_tensors_are_refused(make: Callable[[], Any], path: str) -> None:
    """A tensor on the host anywhere else was forgotten there: the error has its path."""
    with pytest.raises(CapabilityError) as caught:
        dump_result([torch.nn.Identity(), make()], "load", "cuda")
    assert f"endpoint 'load': {path} is on cpu, but memory is shared on 'cuda' here: move it with .to(" in str(caught.value)


@pytest.mark.parametrize(
    "lower",
    # Sending waits for the GPU.
    [
        pytest.param(lambda *call: encode_arguments(*call).close(), id="sent", marks=pytest.mark.gpu),
        pytest.param(lower_arguments, id="within a process"),
    ],
)
def test_host_state_of_known_objects_is_allowed_in_arguments(lower: Callable[..., Any]) -> None:
    """Such as an averaged model's count; a host tensor next to it is refused, in every role."""
    model = _averaged()
    lower([model], {}, "cuda")
    model.register_buffer("scale", torch.ones(1))
    with pytest.raises(CapabilityError, match="scale is on cpu, but memory is shared on 'cuda' here"):
        lower([model], {}, "cuda")
