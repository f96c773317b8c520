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
def changed(change: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    """Change a setting of torch within the block."""
    change(value)
    try:
        yield
    finally:
        change(before)


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
    "default device": _in(lambda: changed(torch.set_default_device, "meta", None)),
    "default dtype": _in(lambda: changed(torch.set_default_dtype, torch.float16, torch.float32)),
    "deterministic": _in(lambda: changed(torch.use_deterministic_algorithms, True, False)),
    "inference_mode": _in(torch.inference_mode),
    "no_grad": _in(torch.no_grad),
    "vmap": _transformed(torch.vmap),
    "grad": _transformed(torch.func.grad),
    "nested transforms": _transformed(lambda function: torch.vmap(torch.func.grad(function))),
}
