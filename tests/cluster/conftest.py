"""A Ray cluster of three nodes on this machine, which the tests share; those that lose nodes add some of their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.kit.ray_sites import Site, Sites

_names = (f"m{number}" for number in itertools.count(1))


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def cluster(beginnings: None, request: pytest.FixtureRequest) -> Iterator[Sites]:
    """Three sites that have joined; on GPUs, each has the next one."""
    sites = Sites(gpus=torch.cuda.device_count() if request.param == "cuda" else 0)
    try:
        for _ in range(3):
            sites.add()
        sites.all_joined()
        yield sites
    finally:
        sites.close()


@pytest.fixture
def name() -> str:
    """A model's name that no other test has."""
    return next(_names)


@pytest.fixture
def victim(cluster: Sites) -> Iterator[Callable[..., Site]]:
    """``victim(*options)`` is one more site, which the test may lose; it is lost at the end."""
    added: list[Site] = []

    def add(*options: str, **named: object) -> Site:
        site = cluster.add(*options, **named)
        added.append(site)
        return site

    yield add
    for site in added:
        if site in cluster.sites:
            site.lose()
