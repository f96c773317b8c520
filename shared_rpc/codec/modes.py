"""Torch as it is without the modes of the calling thread, which are meant for the caller's own operations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import ParamSpec, TypeVar

import torch

# Private, from torch 2.6 to 2.13: no public function returns whether any mode is active. Together they take less time than
# entering one context.
_dispatching = torch._C._len_torch_dispatch_stack
_overriding = torch._C._len_torch_function_stack
_transforming = torch._C._functorch.peek_interpreter_stack
_inferring = torch.is_inference_mode_enabled

P = ParamSpec("P")
R = TypeVar("R")


def without_modes(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function as in a thread without modes: its tensors outlive them, and have real memory.

    Modes are ``inference_mode``, dispatch modes such as ``FakeTensorMode``, function modes such as ``torch.device(...)``, and
    the transforms of ``torch.func``. Where none is on, this costs next to nothing.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            if _inferring() or _dispatching() or _overriding() or _transforming() is not None:
                with _no_modes():
                    return function(*args, **kwargs)
            return function(*args, **kwargs)
        finally:
            # A kept error of an argument's own code may keep this frame.
            del args, kwargs

    return run


@contextmanager
def _no_modes() -> Iterator[None]:
    with ExitStack() as stack:
        overriding = [torch._C._pop_torch_function_stack() for _ in range(_overriding())]
        for mode in overriding:
            stack.callback(torch._C._push_on_torch_function_stack, mode)
        if _dispatching():
            stack.enter_context(torch.utils._python_dispatch._disable_current_modes())
        if _transforming() is not None:
            # Loaded with the first transform; importing it earlier would take time.
            from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

            stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(torch.inference_mode(False))
        yield
