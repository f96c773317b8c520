"""Candidates: generations that are there, and nobody's until they are promoted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shared_rpc import Client, Generation, Handle
from shared_rpc.errors import RefreshError
from tests.kit.apps import App, at_once
from tests.kit.processes import eventually


class Builds:
    """What an endpoint builds: a tensor with the number of its build, when it may."""

    def __init__(self) -> None:
        self.count = 0
        self.go = threading.Event()
        self.go.set()
        self.fails = False

    def build(self, size: int = 3) -> torch.Tensor:
        """The next one."""
        self.count += 1
        number = self.count
        assert self.go.wait(30)
        if self.fails:
            raise ZeroDivisionError("no weights today")
        return torch.full((size,), float(number))


@pytest.fixture
def builds() -> Iterator[Builds]:
    """Counts them, and lets them go on at the end."""
    builds = Builds()
    yield builds
    builds.go.set()


@pytest.fixture
def load(app: App, builds: Builds) -> Any:
    """The endpoint, in each role."""
    return app.share("load", managed=True)(builds.build)


def number(handle: Handle[torch.Tensor]) -> float:
    """The build that a handle's value is of."""
    return float(handle.value[0])


def test_a_candidate_is_nobody_s_until_it_is_promoted(app: App, load: Any, builds: Builds) -> None:
    """It is built while calls get the present generation; then it is current at once, with the news of a refresh."""
    present = load()
    candidate = app.provider.prepare("load")
    assert (candidate.generation, candidate.value.object_id, candidate.value.endpoint) == (2, candidate.object_id, "load")
    assert (number(load()), present.is_current(), candidate.is_current()) == (1, True, False)
    with app.provider.refreshes() as news:
        made = app.provider.promote(candidate)
        assert next(news) == made
    assert (made.object_id, made.generation, made.previous_id) == (candidate.object_id, 2, present.object_id)
    assert (number(load()), number(present.latest()), number(present), builds.count) == (2, 2, 1, 2)
    assert not present.is_current() and candidate.is_current()
    candidate.release()
    assert number(load()) == 2


def test_a_candidate_of_nothing_is_the_first_generation(app: App, load: Any) -> None:
    """It may be prepared before anybody calls."""
    with app.provider.prepare("load", 5) as candidate:
        assert candidate.generation == 1
        assert app.provider.promote(candidate.object_id).previous_id == ""
    assert load(5).generation == 1


def test_a_candidate_goes_with_its_handle(app: App, load: Any, builds: Builds) -> None:
    """Nothing else keeps it."""
    load().release()
    candidate = app.provider.prepare("load")
    assert [info.get("candidate", False) for info in app.provider.list_objects()] == [False, True]
    candidate.release()
    eventually(lambda: len(app.provider.list_objects()) == 1)
    with pytest.raises(RefreshError, match=f"object {candidate.object_id} is no candidate"):
        app.provider.promote(candidate)
    assert load().generation == 1


def test_a_candidate_is_promoted_once(app: App, load: Any) -> None:
    """And what is current, or was, is none."""
    present = load()
    candidate = app.provider.prepare("load")
    for _ in range(2):
        with pytest.raises(RefreshError, match=r"is no candidate: it is generation 1 of load\(size=3\)"):
            app.provider.promote(present)
    app.provider.promote(candidate)
    with pytest.raises(RefreshError, match="is no candidate"):
        app.provider.promote(candidate)


def test_a_later_generation_is_not_replaced(app: App, load: Any) -> None:
    """Neither by an earlier candidate, nor by a run that began before."""
    load()
    first, second = app.provider.prepare("load"), app.provider.prepare("load")
    app.provider.promote(second)
    with pytest.raises(RefreshError, match=r"generation 3 .* is later than candidate 2"):
        app.provider.promote(first)
    third = app.provider.prepare("load")
    load.refresh()
    with pytest.raises(RefreshError, match="is later than candidate 4"):
        app.provider.promote(third)
    assert load().generation == 5


@pytest.mark.parametrize("how", ["call", "endpoint", "object"])
def test_an_invalidation_ends_a_candidate(app: App, load: Any, how: str) -> None:
    """What was invalidated is out of date, and so is what was prepared before."""
    present = load()
    candidate, another = app.provider.prepare("load"), app.provider.prepare("load", 4)
    if how == "call":
        app.provider.invalidate_call_cache("load")
    elif how == "endpoint":
        app.provider.invalidate_endpoint_cache("load")
    else:
        app.provider.invalidate_object(present.object_id)
    with pytest.raises(RefreshError, match=r"load\(size=3\) was invalidated"):
        app.provider.promote(candidate)
    if how != "endpoint":
        assert app.provider.promote(another).generation == 1
    assert app.provider.promote(app.provider.prepare("load")).previous_id == ""


def test_an_invalidation_during_a_preparation(app: App, load: Any, builds: Builds) -> None:
    """Nothing is prepared then, and nothing is left."""
    load().release()
    builds.go.clear()

    def invalidate() -> None:
        eventually(lambda: builds.count == 2)
        load.invalidate()
        builds.go.set()

    outcome, _ = at_once(lambda: app.provider.prepare("load"), invalidate)
    assert isinstance(outcome, RefreshError) and "was invalidated while its next generation was being built" in str(outcome)
    eventually(lambda: app.provider.list_objects() == [])


def test_a_call_does_not_join_a_preparation(app: App, load: Any, builds: Builds) -> None:
    """With nothing in the cache it builds its own, which is newer than the candidate that began before."""
    builds.go.clear()

    def call() -> Handle[torch.Tensor]:
        eventually(lambda: builds.count == 1)
        app_thread = threading.Timer(0, builds.go.set)
        app_thread.start()
        handle: Handle[torch.Tensor] = load()
        return handle

    candidate, handle = at_once(lambda: app.provider.prepare("load"), call)
    assert (builds.count, number(handle)) == (2, 2)
    with pytest.raises(RefreshError, match="is later than candidate"):
        app.provider.promote(candidate)


def test_an_unmanaged_endpoint_has_candidates(app: App, builds: Builds) -> None:
    """Though its calls get no handles."""
    plain = app.share("plain")(builds.build)
    first = plain()
    with app.provider.prepare("plain") as candidate:
        assert float(plain()[0]) == 1
        made: Generation = app.provider.promote(candidate)
    assert (made.generation, float(plain()[0]), float(first[0])) == (2, 2, 1)


def test_a_candidate_is_attached_to_by_its_ticket(base_path: str, builds: Builds) -> None:
    """Before it is promoted: to try it out."""
    app = App("client", base_path)
    app.share("load", managed=True)(builds.build)
    provider = app.provider
    with provider.call("load"), provider.prepare("load") as candidate:
        with provider.open_ticket(candidate.ticket()) as tried:
            assert number(tried) == 2
        assert provider.promote(candidate).generation == 2
    app.close()


def test_a_session_s_end_ends_its_candidates(base_path: str, builds: Builds) -> None:
    """Whatever way its client goes."""
    app = App("client", base_path)
    app.share("load", managed=True)(builds.build)
    with Client(base_path, device="cpu", timeout=30) as client:
        candidate = client.prepare("load")
        assert len(app.provider.list_objects()) == 1
    eventually(lambda: app.provider.list_objects() == [])
    with pytest.raises(RefreshError):
        app.provider.promote(candidate.object_id)
    app.close()
