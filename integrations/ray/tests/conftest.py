"""A Ray cluster of three nodes on this machine, which the tests share, those of several files too; some tests add nodes."""

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
    """A cluster, without sites in the beginning; on GPUs, each has the next one."""
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
    """For files that start Ray themselves: a process can be a driver of one Ray cluster at a time."""
    ray.shutdown()


@pytest.fixture
def name() -> str:
    """A model's name that no other test has."""
    return next(_names)


@pytest.fixture
def victim(cluster: Sites) -> Iterator[Callable[..., Site]]:
    """``victim(*options)`` is one more site, which the test may lose; it is lost at the end."""
    added: list[Site] = []

    def add(*options: str, **named: str) -> Site:
        site = cluster.add(*options, **named)
        added.append(site)
        return site

    yield add
    for site in added:
        if site in cluster.sites:
            site.lose()
