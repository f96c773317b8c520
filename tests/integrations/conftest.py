"""Fixtures: a server that loads for other processes, and a provider that is its client, both in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shared_rpc import Provider, Server
from shared_rpc.integrations.loading import serve_with
from tests.integrations.checkpoints import decoder, save


@pytest.fixture
def owner(base_path: str, device: str) -> Iterator[Provider]:
    """The server's provider."""
    provider = Provider(base_path, execution_mode="server", device=device)
    serve_with(provider)
    with Server(provider):
        yield provider


@pytest.fixture
def provider(owner: Provider, base_path: str, device: str) -> Iterator[Provider]:
    """A client's provider."""
    provider = Provider(base_path, execution_mode="client", device=device, server_startup_timeout=0)
    yield provider
    provider.close()


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    """The folder of a small Llama."""
    return save(decoder(), tmp_path / "llama")
