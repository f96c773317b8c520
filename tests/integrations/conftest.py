"""Fixtures: a server that loads for other processes, and a provider that is its client, both in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared_rpc import Provider
from shared_rpc.integrations.loading import serve_with
from tests.integrations.checkpoints import decoder, save
from tests.kit.world import World


@pytest.fixture
def role() -> str:
    """The role in which the tests load."""
    return "client"


@pytest.fixture
def owner(world: World) -> Provider:
    """The server's provider."""
    serve_with(world.owner)
    return world.owner


@pytest.fixture
def provider(owner: Provider, device: str, world: World) -> Provider:
    """A client's provider."""
    return world.provider


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    """The folder of a small Llama."""
    return save(decoder(), tmp_path / "llama")
