"""What is refused is the same error in every role, and says where and what to do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import Lock
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch

from shared_rpc import Client, Provider
from shared_rpc.errors import CapabilityError, EndpointNotFound, SignatureError
from tests.kit.apps import App, Connect, Serve
from tests.kit.models import Marked, State


class Refusal(NamedTuple):
    """A value, and what the error says of it."""

    make: Callable[[], Any]
    text: str


#: What each role finds out in a way of its own; the tests of the codec have all kinds.
RESULTS = {
    "plain": Refusal(lambda: 3, "returned a value of type int without a tensor or module"),
    "generator": Refusal(
        lambda: (torch.ones(1) for _ in range(2)),
        "returned a generator, which runs in this process only: return what it yields, as a list",
    ),
    "lock": Refusal(lambda: State(1, {"m": [Lock()]}), "result.moments['m'][0] cannot be pickled"),
    "graph of a subclass": Refusal(
        lambda: [torch.ones(1, requires_grad=True).as_subclass(Marked) * 2], "result[0] carries an autograd graph"
    ),
    "meta module": Refusal(lambda: [torch.nn.Linear(1, 1, device="meta")], "result[0].weight is on the meta device"),
}

ARGUMENTS = {
    "nested": Refusal(lambda: [1, {"at": {2}}], "argument 'value'[1]['at'] is a builtins.set"),
    "meta module": Refusal(lambda: torch.nn.Linear(1, 1, device="meta"), "argument 'value'.weight is on the meta device"),
}


def error_of(call: Callable[[], Any]) -> tuple[type[BaseException], str]:
    """Type and text of what a call raises."""
    with pytest.raises(Exception) as caught:
        call()
    return caught.type, str(caught.value)


@pytest.mark.parametrize("case", RESULTS)
def test_refused_result(every_app: list[App], case: str) -> None:
    """A result that cannot be shared is the same error in every role; it names the endpoint and the place."""
    errors = set()
    for app in every_app:
        make = app.share("make")(RESULTS[case].make)
        errors.add(error_of(make))
    ((kind, text),) = errors
    assert kind is CapabilityError
    assert text.startswith("endpoint 'make'")
    assert RESULTS[case].text in text


@pytest.mark.parametrize("case", ARGUMENTS)
def test_refused_argument(every_app: list[App], case: str) -> None:
    """An argument that cannot travel is the same error in every role, and names the place."""
    errors = set()
    for app in every_app:

        @app.share()
        def take(value: Any) -> None:
            return None

        errors.add(error_of(lambda: take(value=ARGUMENTS[case].make())))
    ((kind, text),) = errors
    assert kind is CapabilityError
    assert text.startswith(ARGUMENTS[case].text)


def test_arguments_that_do_not_fit(every_app: list[App]) -> None:
    """Arguments that do not fit the signature are the TypeError of a plain function, in every role."""
    errors = set()
    for app in every_app:

        @app.share()
        def load(size: int, *, bias: bool = True) -> torch.nn.Module:
            return torch.nn.Linear(size, size, bias=bias)

        errors.add((error_of(load), error_of(lambda: load(1, True)), error_of(lambda: load(1, biass=True))))
    ((missing, positional, unknown),) = errors
    assert missing == (SignatureError, "load(): missing a required argument: 'size'")
    assert positional == (SignatureError, "load(): too many positional arguments")
    assert unknown == (SignatureError, "load(): got an unexpected keyword argument 'biass'")


@pytest.mark.parametrize(
    ("place", "ask"),
    [
        ("shared_rpc.server.calls.key_of", lambda client: client.call("one")),
        ("shared_rpc.server.calls.identity_of", lambda client: client.refresh("one")),
        ("shared_rpc.server.core.Core.info", lambda client: client.get_server_info()),
        ("shared_rpc.server.generations.Generations.prepared", lambda client: client.prepare("one")),
    ],
    ids=["call", "refresh", "info", "prepared"],
)
def test_a_type_error_in_the_server_is_no_mistake_of_the_caller(
    place: str,
    ask: Callable[[Client], object],
    provider: Provider,
    serve: Serve,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The caller gets an error that names the server, and the server's log has the traceback."""
    provider.share("one", managed=True)(lambda: torch.ones(1))
    serve()
    client = connect()
    monkeypatch.setattr(place, Mock(side_effect=TypeError("'NoneType' object is not iterable")))
    with pytest.raises(CapabilityError, match=r"the server \(pid \d+\) failed: TypeError: 'NoneType' object"):
        ask(client)
    assert ["Traceback" in (record.exc_text or "") for record in caplog.records if record.exc_info] == [True]


def test_unknown_endpoint(every_app: list[App]) -> None:
    """A name that is not there is the same error in every role, and says what is meant perhaps."""
    errors = set()
    for app in every_app:
        app.share("load_model")(lambda: torch.ones(1))
        errors.add(error_of(functools.partial(app.provider.call, "load_modle")))
        errors.add(error_of(functools.partial(app.provider.invalidate_endpoint_cache, "load_modle")))
        errors.add(error_of(functools.partial(app.provider.invalidate_call_cache, "load_modle")))
    ((kind, text),) = errors
    assert kind is EndpointNotFound
    assert "'load_modle'" in text
    assert "did you mean 'load_model'?" in text
