"""Torch as it is without the modes of the calling thread, which are meant for the caller's own operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

__all__ = ["undisturbed"]

# Private, from torch 2.6 to 2.13: there is no public way to ask whether any mode is on. Together they take less time than
# entering one context does.
_dispatching = torch._C._len_torch_dispatch_stack
_overriding = torch._C._len_torch_function_stack
_transforming = torch._C._functorch.peek_interpreter_stack
_inferring = torch.is_inference_mode_enabled

_NOTHING: AbstractContextManager[None] = nullcontext()


def undisturbed() -> AbstractContextManager[None]:
    """A block in which no mode of this thread has a say: what is rebuilt outlives it, and memory is memory.

    ``inference_mode``, dispatch modes such as ``FakeTensorMode``, function modes such as ``torch.device(...)``, and the
    transforms of ``torch.func``. Where none is on, this costs next to nothing.
    """
    if _inferring() or _dispatching() or _overriding() or _transforming() is not None:
        return _undisturbed()
    return _NOTHING


@contextmanager
def _undisturbed() -> Iterator[None]:
    with ExitStack() as stack:
        overriding = [torch._C._pop_torch_function_stack() for _ in range(_overriding())]
        for mode in overriding:
            stack.callback(torch._C._push_on_torch_function_stack, mode)
        if _dispatching():
            stack.enter_context(torch.utils._python_dispatch._disable_current_modes())
        if _transforming() is not None:
            # Loaded with the first transform, and not to be before.
            from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

            stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(torch.inference_mode(False))
        yield
