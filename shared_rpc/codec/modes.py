"""The codec's own use of torch: without the modes of the calling thread, and not traced by ``torch.compile``.

Modes are meant for the caller's own operations. The codec does no computation: there is nothing to put into a graph, and torch
2.13 fails on some of its operations.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch

# Private, from torch 2.6 to 2.13: no public function reports active modes. Together they take less time than entering one
# context.
_dispatching = torch._C._len_torch_dispatch_stack
_overriding = torch._C._len_torch_function_stack
_transforming = torch._C._functorch.peek_interpreter_stack
_inferring = torch.is_inference_mode_enabled

P = ParamSpec("P")
R = TypeVar("R")


def without_modes(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function without the thread's modes: its tensors outlive them, and have real memory.

    Modes are ``inference_mode``, dispatch modes such as ``FakeTensorMode``, function modes such as ``torch.device(...)``, and
    the transforms of ``torch.func``. Without active modes, this costs next to nothing.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            if _inferring() or _dispatching() or _overriding() or _transforming() is not None:
                with _no_modes():
                    return function(*args, **kwargs)
            return function(*args, **kwargs)
        finally:
            # A retained error of an argument's own code may keep this frame.
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


# Private: torch.compiler.disable() would import all of torch._dynamo, which takes seconds. Its effect is available without
# that, under one name in torch 2.6 and under others in 2.13.
_dynamo: Any = torch._C._dynamo.eval_frame


def _skipping() -> Callable[[types.CodeType], object]:
    if hasattr(_dynamo, "set_code_exec_strategy"):
        strategy = _dynamo._FrameExecStrategy(_dynamo._FrameAction.SKIP, _dynamo._FrameAction.SKIP)
        return lambda code: _dynamo.set_code_exec_strategy(code, strategy)
    return getattr(_dynamo, "skip_code", lambda code: None)


_skip = _skipping()

#: Executed in layers of the user, which are traced including this module.
_TRACED = "shared_rpc.codec.recurrent"


def keep_untraced() -> None:
    """Exclude the functions of the loaded codec modules, and operations of clients, from tracing, whether called by compiled
    code or compiled.
    """
    for name, module in list(sys.modules.items()):
        if not name.startswith(("shared_rpc.codec.", "shared_rpc.client.steps")) or name == _TRACED:
            continue
        for function in _functions(module):
            function.__dict__["_torchdynamo_disable"] = True  # not traced as a part of its caller
            for code in _codes(function.__code__):
                _skip(code)  # not traced on its own


#: Functions, and the objects that wrap them.
_FUNCTIONS = (types.FunctionType, staticmethod, classmethod)


def _functions(module: types.ModuleType) -> Iterator[types.FunctionType]:
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
    for owner in (module, *kinds):
        for value in vars(owner).values():
            if not isinstance(value, _FUNCTIONS):  # reading an attribute of anything else may take long
                continue
            for function in (value, getattr(value, "__wrapped__", None)):
                if isinstance(function, types.FunctionType) and function.__module__ == module.__name__:
                    yield function


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code, and that of the functions that it creates."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
