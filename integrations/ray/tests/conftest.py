"""A Ray cluster of three nodes on this machine, shared by the tests of several files; some tests add nodes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import ray
import torch

from sites import Site, Sites
from tests.kit.fixtures import *  # noqa: F403  # the fixtures of all tests

_names = (f"m{number}" for number in itertools.count(1))


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def kept_cluster(beginnings: None, request: pytest.FixtureRequest) -> Iterator[Sites]:
    """A cluster, initially without sites; with GPUs, each site has the next one."""
    sites = Sites(gpus=torch.cuda.device_count() if request.param == "cuda" else 0)
    with sites.closing:
        yield sites


@pytest.fixture(scope="module")
def cluster(kept_cluster: Sites) -> Sites:
    """Three sites that have joined."""
    kept_cluster.renew()
    return kept_cluster


@pytest.fixture(scope="module")
def ray_of_its_own() -> None:
    """Stop the shared cluster, because a process can be a driver of one Ray cluster at a time."""
    ray.shutdown()


@pytest.fixture
def name() -> str:
    """A model name that no other test uses."""
    return next(_names)


@pytest.fixture
def victim(cluster: Sites) -> Iterator[Callable[..., Site]]:
    """``victim(*options)`` adds a site that the test may kill; it is killed at the end."""
    added: list[Site] = []

    def add(*options: str, **named: str) -> Site:
        site = cluster.add(*options, **named)
        added.append(site)
        return site

    yield add
    for site in added:
        if site in cluster.sites:
            site.lose()
