"""Torch's modes, in each of which values can be published or rebuilt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class NoDispatch(TorchDispatchMode):
    """A mode that refuses every operation."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Fail."""
        raise AssertionError(f"{function} under a mode")


class NoFunction(TorchFunctionMode):
    """A mode that refuses every function."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Fail."""
        raise AssertionError(f"{function} under a mode")


@contextmanager
def default_device() -> Iterator[None]:
    """Make the meta device the default."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype() -> Iterator[None]:
    """Make half precision the default dtype."""
    torch.set_default_dtype(torch.float16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    """Make nondeterministic operations raise."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _in(mode: Callable[[], Any]) -> Callable[[Callable[[], Any]], Any]:
    def run(work: Callable[[], Any]) -> Any:
        with mode():
            return work()

    return run


def _transformed(transform: Callable[..., Any]) -> Callable[[Callable[[], Any]], Any]:
    def run(work: Callable[[], Any]) -> Any:
        done = []

        def function(x: torch.Tensor) -> torch.Tensor:
            done.append(work())
            return (x * 2).sum()

        transform(function)(torch.ones(3))
        return done[0]

    return run


MODES: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "FakeTensorMode": _in(FakeTensorMode),
    "a dispatch mode": _in(NoDispatch),
    "a function mode": _in(NoFunction),
    "torch.device": _in(lambda: torch.device("meta")),
    "default device": _in(default_device),
    "default dtype": _in(default_dtype),
    "deterministic": _in(deterministic),
    "inference_mode": _in(torch.inference_mode),
    "no_grad": _in(torch.no_grad),
    "vmap": _transformed(torch.vmap),
    "grad": _transformed(torch.func.grad),
    "nested transforms": _transformed(lambda function: torch.vmap(torch.func.grad(function))),
}
