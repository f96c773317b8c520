"""What is refused is the same error in every role, and says where and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from shared_rpc.errors import CapabilityError, EndpointNotFound
from tests.apps import App


class Refusal(NamedTuple):
    """A value, and what the error says of it."""

    make: Callable[[], Any]
    text: str


RESULTS = {
    "plain": Refusal(lambda: 3, "returned a plain int without a tensor or a module"),
    "empty": Refusal(lambda: {"a": [1, "b"]}, "returned a plain dict without a tensor"),
    "object": Refusal(object, "result is a object"),
    "path": Refusal(lambda: [torch.ones(1), (1, Path("x"))], "result[1][1] is a pathlib.PosixPath"),
    "keys": Refusal(lambda: {1: torch.ones(1)}, "result has the key 1"),
    "graph": Refusal(
        lambda: {"y": torch.ones(1, requires_grad=True) * 2}, "result['y'] carries an autograd graph (MulBackward0)"
    ),
    "meta": Refusal(lambda: torch.ones(1, device="meta"), "result is on the meta device"),
    "meta module": Refusal(lambda: [torch.nn.Linear(1, 1, device="meta")], "result[0].weight is on the meta device"),
}

ARGUMENTS = {
    "path": Refusal(lambda: Path("weights"), "argument 'value' is a pathlib.PosixPath"),
    "nested": Refusal(lambda: [1, {"at": {2}}], "argument 'value'[1]['at'] is a builtins.set"),
    "keys": Refusal(lambda: {1: 2}, "argument 'value' has the key 1"),
    "meta": Refusal(lambda: torch.ones(1, device="meta"), "argument 'value' is on the meta device"),
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
    assert missing == (TypeError, "load(): missing a required argument: 'size'")
    assert positional == (TypeError, "load(): too many positional arguments")
    assert unknown == (TypeError, "load(): got an unexpected keyword argument 'biass'")


def test_unknown_endpoint(every_app: list[App]) -> None:
    """A name that is not there is the same error in every role, and says what is meant perhaps."""
    errors = set()
    for app in every_app:
        app.share("load_model")(lambda: torch.ones(1))
        errors.add(error_of(lambda: app.provider.call("load_modle")))  # noqa: B023
        errors.add(error_of(lambda: app.provider.invalidate_endpoint_cache("load_modle")))  # noqa: B023
        errors.add(error_of(lambda: app.provider.invalidate_call_cache("load_modle")))  # noqa: B023
    ((kind, text),) = errors
    assert kind is EndpointNotFound
    assert "'load_modle'" in text
    assert "did you mean 'load_model'?" in text


def test_template_that_names_a_tensor(every_app: list[App]) -> None:
    """A template over an argument that is a tensor in this call is refused in every role."""
    errors = set()
    for app in every_app:
        look_up = app.share("look_up", cache_format_key="{x}")(lambda x: x)
        errors.add(error_of(lambda: look_up(torch.ones(1))))  # noqa: B023
    ((kind, text),) = errors
    assert kind is CapabilityError
    assert "cache_format_key='{x}' names 'x', which is a tensor" in text
