"""Requests whose handlers wait: their answers, their errors, and their cancellation."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
import pytest_asyncio

from shared_rpc.errors import ConnectionClosed, ServerBusy
from shared_rpc.execution.outcomes import Failure
from shared_rpc.protocol import messages as m
from shared_rpc.server.requests import Caller, Requests, handles
from shared_rpc.server.waiting import Waiter, Waits


class Asker:
    """A caller that records its answers."""

    session = name = "asker"

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.waiter = Waiter("asker", self.answers.append)

    def wait(self) -> Waiter:
        """Make the request wait."""
        return self.waiter

    def reply(self, message: m.Message) -> bool:
        """Record the answer."""
        self.answers.append(message)
        return True

    def fail(self, failure: Failure) -> None:
        """Record the error."""
        self.answers.append(failure)


class Part:
    """A part whose handler waits for the test."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.error: Exception | None = None
        self.ended = False

    @handles(m.Ping)
    async def ping(self, caller: Caller, message: m.Ping) -> m.Answer:
        """Answer on the test's command."""
        try:
            await self.go.wait()
            if self.error is not None:
                raise self.error
            return m.Answer.of(None)
        finally:
            self.ended = True


class Stage:
    """A part, its requests, and a caller whose request waits."""

    def __init__(self) -> None:
        self.part, self.asker = Part(), Asker()
        self.waits = Waits()
        self.requests = Requests(self.waits, self.part)

    def ask(self) -> None:
        """Begin the request."""
        self.requests.answer(cast(Caller, self.asker), m.Ping())

    async def turns(self) -> None:
        """Run some turns of the loop."""
        for _ in range(5):
            await asyncio.sleep(0)


@pytest_asyncio.fixture
async def stage() -> Stage:
    """A stage with a request that waits."""
    stage = Stage()
    stage.ask()
    await stage.turns()
    assert stage.asker.answers == [] and len(stage.waits) == 1
    return stage


@pytest.mark.asyncio
async def test_the_return_value_is_the_answer(stage: Stage) -> None:
    """Once the handler returns; then nothing is left of the request."""
    stage.part.go.set()
    await stage.turns()
    assert [type(answer) for answer in stage.asker.answers] == [m.Answer] and len(stage.waits) == 0


@pytest.mark.asyncio
async def test_an_error_is_the_answer(stage: Stage) -> None:
    """Like for a handler that does not wait."""
    stage.part.error = ServerBusy("full")
    stage.part.go.set()
    await stage.turns()
    assert [answer.text for answer in stage.asker.answers] == ["full"] and len(stage.waits) == 0


@pytest.mark.asyncio
async def test_leaving_cancels_the_handler(stage: Stage) -> None:
    """The requester gets no answer."""
    stage.waits.leave(stage.asker.waiter)
    await stage.turns()
    assert stage.part.ended and stage.asker.answers == [] and len(stage.waits) == 0


@pytest.mark.asyncio
async def test_a_stop_fails_requests_that_wait_and_later_ones(stage: Stage) -> None:
    """Their handlers are cancelled, or do not begin."""
    stage.waits.stop()
    assert [answer.code for answer in stage.asker.answers] == [ConnectionClosed.code]
    await stage.turns()
    assert stage.part.ended and len(stage.asker.answers) == 1
    stage.ask()
    assert [answer.code for answer in stage.asker.answers] == [ConnectionClosed.code] * 2


@pytest.mark.asyncio
async def test_a_request_that_leaves_before_its_handler_begins() -> None:
    """Nothing of the handler is left, not even an unawaited coroutine."""
    stage = Stage()
    stage.ask()
    stage.waits.leave(stage.asker.waiter)
    await stage.turns()
    assert not stage.part.ended and stage.asker.answers == [] and len(stage.waits) == 0
