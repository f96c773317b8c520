"""Hooks of a process: each is called with every event, and none harms others or whoever emits."""

from __future__ import annotations

import asyncio
import logging

import pytest

from shared_rpc.observability import events as i

EVENT = i.SessionOpened(session="s", pid=1)


@pytest.fixture
def hooks() -> i.Hooks:
    """Those of no process."""
    return i.Hooks()


def test_a_hook_is_called_until_it_is_removed(hooks: i.Hooks) -> None:
    """Once for each event, however often it was added; events need not be made where none is registered."""
    heard: list[i.Event] = []
    hook = heard.append
    assert not hooks.registered
    hooks.add(hook)
    hooks.add(hook)
    assert (hooks.all(), hooks.registered) == ((hook,), True)
    hooks.emit(EVENT)
    hooks.remove(hook)
    hooks.remove(hook)
    hooks.emit(EVENT)
    assert (heard, hooks.registered) == ([EVENT], False)


@pytest.mark.parametrize("error", [RuntimeError("the collector is down"), SystemExit(1), asyncio.CancelledError()])
def test_a_hook_that_raises_harms_nobody(hooks: i.Hooks, error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """The emitter goes on, other hooks are called, and the first failure is logged."""
    heard: list[i.Event] = []

    def broken(event: i.Event) -> None:
        raise error

    hooks.add(broken)
    hooks.add(heard.append)
    with caplog.at_level(logging.ERROR, "shared_rpc"):
        hooks.emit(EVENT)
        hooks.emit(EVENT)
    assert heard == [EVENT, EVENT]
    assert ["broken" in record.getMessage() for record in caplog.records] == [True]


def test_a_hook_that_removes_itself(hooks: i.Hooks) -> None:
    """It is called no more; the others are called with that event too."""
    once_heard: list[i.Event] = []
    heard: list[i.Event] = []

    def once(event: i.Event) -> None:
        hooks.remove(once)
        once_heard.append(event)

    hooks.add(once)
    hooks.add(heard.append)
    hooks.emit(EVENT)
    hooks.emit(EVENT)
    assert (len(once_heard), len(heard)) == (1, 2)


def test_a_factory_makes_its_hook_with_the_first_event(hooks: i.Hooks) -> None:
    """Not when it is registered, and once."""
    made: list[list[i.Event]] = []

    def make() -> i.Hook:
        made.append([])
        return made[-1].append

    hooks.add(i.HookFactory(make))
    assert not made
    hooks.emit(EVENT)
    hooks.emit(EVENT)
    assert made == [[EVENT, EVENT]]


def test_a_factory_that_fails_is_not_asked_again(hooks: i.Hooks, caplog: pytest.LogCaptureFixture) -> None:
    """A library that is not installed is missed once."""
    asked: list[int] = []

    def make() -> i.Hook:
        asked.append(1)
        raise ImportError("no such library")

    hooks.add(i.HookFactory(make))
    with caplog.at_level(logging.ERROR, "shared_rpc"):
        hooks.emit(EVENT)
        hooks.emit(EVENT)
    assert (len(asked), len(caplog.records)) == (1, 1)


def test_an_equal_factory_removes_one(hooks: i.Hooks) -> None:
    """And with it what it had made: another factory, which may have its place in memory, makes its own."""
    made: list[list[i.Event]] = []

    def make() -> i.Hook:
        made.append([])
        return made[-1].append

    for count in range(1, 100):
        hooks.add(i.HookFactory(make))
        hooks.emit(EVENT)
        hooks.remove(i.HookFactory(make))
        assert (len(made), made[-1]) == (count, [EVENT])


def test_an_event_cannot_be_changed() -> None:
    """Hooks share it."""
    with pytest.raises(AttributeError):
        EVENT.pid = 2  # type: ignore[misc]
    assert [kind.__name__ for kind in i.Event.__subclasses__() if not kind.__struct_config__.frozen] == []
