"""Attached objects: the server's memory, the same results bit for bit, and independent state."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shared_rpc import Provider
from shared_rpc.codec import by_value, placement
from shared_rpc.codec.by_value import pickle_by_value
from shared_rpc.memory.arena import pack
from tests.kit.apps import Serve

Elsewhere = Callable[..., Any]


@pytest.fixture
def provider(base_path: str, device: str) -> Provider:
    """A provider on each kind of device."""
    return Provider(base_path, device=device)


def test_more_segments_than_a_message_carries_arrive(
    device: str, get: Serve, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object in 260 segments; a message carries 253 descriptors at most."""
    monkeypatch.setattr(placement, "pack", partial(pack, limit=1))
    get([torch.full((2,), number, device=device) for number in range(260)])
    answer = elsewhere('answer = [tensor.unique().tolist() for tensor in client.call("get")]')
    assert answer == [[number] for number in range(260)]


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
def test_recurrent_layers_stay_in_shared_memory(device: str, get: Serve, elsewhere: Elsewhere) -> None:
    """On a GPU torch would move their weights into one block, on either side."""
    model = nn.LSTM(4, 4, device=device)
    get(model)
    for number in (2, 3):
        elsewhere(
            """
            import warnings
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = client.call("get")
                model.flatten_parameters()
                model.to(device)(torch.ones(1, 1, 4, device=device))
                model.weight_ih_l0.data.fill_(number)
                answer = model.weight_ih_l0.sum().item()  # waits for the GPU
            """,
            number=number,
        )
        assert model.weight_ih_l0.unique().tolist() == [number]
        model.flatten_parameters()


def test_modules_registered_by_value_are_not_needed(
    device: str, get: Serve, elsewhere: Elsewhere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those given to ``pickle_by_value`` need not exist in the client."""
    (tmp_path / "only_in_the_server.py").write_text("import torch\n\nclass Net(torch.nn.Linear):\n    answer = 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    private = importlib.import_module("only_in_the_server")
    pickle_by_value(private)
    try:
        get(private.Net(2, 2, device=device))
        assert elsewhere('answer = client.call("get").answer') == 42
    finally:
        by_value._names.discard(private.__name__)
        del sys.modules[private.__name__]
