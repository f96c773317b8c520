"""Hooks of a process: each is called with every event, and a failing one affects neither others nor the emitter."""

from __future__ import annotations

import asyncio
import logging

import pytest

from shared_rpc.observability import events as i

EVENT = i.SessionOpened(session="s", pid=1)


@pytest.fixture
def hooks() -> i.Hooks:
    """Hooks that belong to no process."""
    return i.Hooks()


def test_a_hook_is_called_until_it_is_removed(hooks: i.Hooks) -> None:
    """Once for each event, however often it was added; without hooks no event is created."""
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
def test_failing_hooks_affect_no_other(hooks: i.Hooks, error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """The emitter continues, other hooks are called, and the first failure is logged."""
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


def test_hooks_can_remove_themselves(hooks: i.Hooks) -> None:
    """The others are still called with that event."""
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


def test_factories_make_their_hook_with_the_first_event(hooks: i.Hooks) -> None:
    """Not on registration, and once."""
    made: list[list[i.Event]] = []

    def make() -> i.Hook:
        made.append([])
        return made[-1].append

    hooks.add(i.HookFactory(make))
    assert not made
    hooks.emit(EVENT)
    hooks.emit(EVENT)
    assert made == [[EVENT, EVENT]]


def test_failing_factories_are_called_once(hooks: i.Hooks, caplog: pytest.LogCaptureFixture) -> None:
    """A missing library is reported once."""
    asked: list[int] = []

    def make() -> i.Hook:
        asked.append(1)
        raise ImportError("no such library")

    hooks.add(i.HookFactory(make))
    with caplog.at_level(logging.ERROR, "shared_rpc"):
        hooks.emit(EVENT)
        hooks.emit(EVENT)
    assert (len(asked), len(caplog.records)) == (1, 1)


def test_equal_factories_can_be_removed(hooks: i.Hooks) -> None:
    """With their hook: another factory, which may have the same address, makes its own."""
    made: list[list[i.Event]] = []

    def make() -> i.Hook:
        made.append([])
        return made[-1].append

    for count in range(1, 100):
        hooks.add(i.HookFactory(make))
        hooks.emit(EVENT)
        hooks.remove(i.HookFactory(make))
        assert (len(made), made[-1]) == (count, [EVENT])


def test_events_are_immutable() -> None:
    """Hooks share them."""
    with pytest.raises(AttributeError):
        EVENT.pid = 2  # type: ignore[misc]
    assert [kind.__name__ for kind in i.Event.__subclasses__() if not kind.__struct_config__.frozen] == []
