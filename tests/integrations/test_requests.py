"""Requests to load: the server loads what the key describes, whatever else the requesting process sends."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from shared_rpc.errors import ConfigurationError
from shared_rpc.integrations.loading import load


class Build:
    """A request for a tensor of one value."""

    def __init__(self, value: float) -> None:
        self.value = value

    def key(self, versions: dict[str, str]) -> str:
        """A key like those of libraries' requests."""
        return f"a tensor of {self.value:g}"

    def __call__(self) -> dict[str, Any]:
        """Load it."""
        return {"tensor": torch.tensor(self.value)}


def test_a_request_is_loaded_under_its_own_key() -> None:
    """The server has an object of the key's description."""
    assert load("a tensor of 1", {}, pickle.dumps(Build(1)))["tensor"] == 1


def test_a_request_under_the_key_of_another_one_is_refused() -> None:
    """Otherwise all requests for that one would get this one's result."""
    with pytest.raises(ConfigurationError, match="sent a tensor of 1, computed a tensor of 666"):
        load("a tensor of 1", {}, pickle.dumps(Build(666)))
