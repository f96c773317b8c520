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
