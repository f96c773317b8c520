"""Refusals: the same error in every role, which names the place and the remedy."""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch

from shared_rpc.errors import CapabilityError, CodecError
from tests.kit.interrupting import raising_handler
from tests.kit.models import Locked
from tests.kit.world import World


class Refusal(NamedTuple):
    """A value, and the parts of the error's text."""

    make: Callable[[], Any]
    text: str


#: Refusals that each role detects in its own way; the tests of the codec have all kinds.
RESULTS = {
    "plain": Refusal(lambda: 3, "returned a value of type int without a tensor or module"),
    "generator": Refusal(lambda: (torch.ones(1) for _ in range(2)), "result cannot be pickled: cannot pickle 'generator'"),
    "lock of a module": Refusal(Locked, "result.layers.1.guard['of'][0] cannot be pickled"),
    "meta module": Refusal(lambda: [torch.nn.Linear(1, 1, device="meta")], "result[0].weight is on the meta device"),
}

ARGUMENTS = {
    "nested": Refusal(lambda: [1, {"at": {2}}], "argument 'value'[1]['at'] is a builtins.set"),
    "meta module": Refusal(lambda: torch.nn.Linear(1, 1, device="meta"), "argument 'value'.weight is on the meta device"),
}


def common_error(worlds: list[World], ask: Callable[[World], Any]) -> str:
    """Return the text of the error that a question has in every role."""
    errors = set()
    for world in worlds:
        with pytest.raises(CapabilityError) as caught:
            ask(world)
        errors.add(str(caught.value))
    (text,) = errors
    return text


@pytest.mark.parametrize("case", RESULTS)
def test_refused_results_name_endpoint_and_path(every_world: list[World], case: str) -> None:
    """The error is the same in every role."""
    text = common_error(every_world, lambda world: world.share("make")(RESULTS[case].make)())
    assert text.startswith("endpoint 'make'")
    assert RESULTS[case].text in text


@pytest.mark.parametrize("case", ARGUMENTS)
def test_refused_arguments_name_the_path(every_world: list[World], case: str) -> None:
    """The error is the same in every role."""

    def take(value: Any) -> None:
        return None

    text = common_error(every_world, lambda world: world.share("take")(take)(value=ARGUMENTS[case].make()))
    assert text.startswith(ARGUMENTS[case].text)


def test_type_errors_within_the_server_are_not_signature_errors(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller gets an error that names the server, and the server's log has the traceback."""
    world.share("one", managed=True)(lambda: torch.ones(1))
    error = TypeError("'NoneType' object is not iterable")
    monkeypatch.setattr("shared_rpc.server.calls.key_of", Mock(side_effect=error))
    with pytest.raises(CapabilityError, match=r"the server \(pid \d+\) failed: TypeError: 'NoneType' object"):
        world.client().call("one")
    assert ["Traceback" in (record.exc_text or "") for record in caplog.records if record.exc_info] == [True]


#: Levels beyond the limits of pickle and of messages: from Python 3.14 on, the stack's size is the limit.
DEEP = 200_000


@pytest.mark.parametrize(
    ("role", "wrap"),
    [("client", lambda value: {"k": value}), ("local", lambda value: [value])],
    ids=["dicts for a client", "lists"],
)
def test_excessive_nesting_is_refused(world: World, wrap: Callable[[Any], Any], role: str) -> None:
    """The error names the endpoint and the beginning of the path."""

    @world.share(cache=False)
    def made() -> Any:
        value: Any = torch.ones(1)
        for _ in range(DEEP):
            value = wrap(value)
        return value

    with pytest.raises(CapabilityError, match=r"endpoint 'made': result[\[.].{1,80} is nested deeper"):
        made()


class EndsItsReader(torch.nn.Linear):
    """A module whose unpickling ends the process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, ("unpickled",)


def test_arguments_that_end_their_receiver_do_not_stop_the_server(world: World) -> None:
    """The server reports them, and continues to serve."""

    @world.share(cache=False)
    def take(x: torch.nn.Module) -> None:
        pass

    client = world.client()
    with pytest.raises(CodecError, match="SystemExit: unpickled"):
        client.call("take", EndsItsReader(2, 2))
    client.ping()


def test_results_that_cannot_be_rebuilt_release_their_lease(world: World) -> None:
    """There is no handle that would."""
    world.share("kept", managed=True)(lambda: EndsItsReader(2, 2))
    client = world.client()
    with pytest.raises(CodecError, match="SystemExit: unpickled"):
        client.call("kept")
    assert client.get_server_info()["leases"] == 0


class SignalsItsReader(torch.nn.Linear):
    """A module whose unpickling sends a signal to its reader."""

    def __reduce__(self) -> tuple[Any, ...]:
        return signal.raise_signal, (signal.SIGUSR1,)


@pytest.mark.parametrize("kind", [lambda handler: handler, functools.partial], ids=["function", "partial"])
def test_the_exception_of_a_signal_handler_ends_the_call(world: World, kind: Callable[[Any], Any]) -> None:
    """Also one that ends the process, while the result is rebuilt."""
    world.share("kept", managed=True)(lambda: SignalsItsReader(2, 2))
    client = world.client()
    with raising_handler(SystemExit):
        signal.signal(signal.SIGUSR1, kind(lambda *_: sys.exit(3)))
        with pytest.raises(SystemExit):
            client.call("kept")
    client.ping()
