"""A Ray cluster of three nodes on this machine, which the tests share, those of several files too; some tests add nodes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch

from sites import Site, Sites
from tests.conftest import *  # noqa: F403  # the fixtures of all tests

_names = (f"m{number}" for number in itertools.count(1))


class _Kept:
    """The cluster of the last file, which the next one has too if it is to be such a one."""

    def __init__(self) -> None:
        self.device = ""
        self.sites: Sites | None = None

    def of(self, device: str) -> Sites:
        """Return the cluster of a kind of device, with three sites that have joined."""
        if self.device != device:
            self.close()
            self.sites = Sites(gpus=torch.cuda.device_count() if device == "cuda" else 0)
            self.device = device
        assert self.sites is not None, "it was kept with its device"
        for extra in self.sites.sites[3:]:
            extra.lose()
        while len(self.sites.sites) < 3:
            self.sites.add()
        for site in self.sites.sites:
            if not site.serves:
                site.serve()
        self.sites.all_joined()
        return self.sites

    def close(self) -> None:
        """End it."""
        sites, self.sites, self.device = self.sites, None, ""
        if sites is not None:
            sites.close()


_kept = _Kept()


@pytest.fixture(scope="session", autouse=True)
def end_of_cluster(beginnings: None) -> Iterator[None]:
    """The last cluster ends with the tests."""
    yield
    _kept.close()


@pytest.fixture(scope="module")
def ray_of_its_own(end_of_cluster: None) -> None:
    """For files that start Ray themselves: a process can be a driver of one Ray cluster."""
    _kept.close()


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def cluster(end_of_cluster: None, request: pytest.FixtureRequest) -> Sites:
    """Three sites that have joined; on GPUs, each has the next one."""
    try:
        return _kept.of(request.param)
    except BaseException:
        _kept.close()
        raise


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
