"""Exclusion of the codec from ``torch.compile``, if compiled code makes a call.

What the codec does with tensors is no computation: there is nothing to put into a graph, and torch 2.13 fails on some of it.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

# Private: torch.compiler.disable() would import all of torch._dynamo, which takes seconds. Its effect is available without
# that, under one name in torch 2.6 and under others in 2.13.
_dynamo: Any = torch._C._dynamo.eval_frame


def _skip(code: types.CodeType) -> None:
    if hasattr(_dynamo, "set_code_exec_strategy"):
        skipped = _dynamo._FrameAction.SKIP
        _dynamo.set_code_exec_strategy(code, _dynamo._FrameExecStrategy(skipped, skipped))
    elif hasattr(_dynamo, "skip_code"):
        _dynamo.skip_code(code)


#: Layers of the user run this module, which is traced with them.
_TRACED = "shared_rpc.codec.recurrent"


def keep_untraced() -> None:
    """Have the functions of the codec's modules that are loaded run as they are, called by compiled code or from within."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("shared_rpc.codec.") or name == _TRACED:
            continue
        for function in _functions(module):
            function.__dict__["_torchdynamo_disable"] = True  # not traced as a part of its caller
            for code in _codes(function.__code__):
                _skip(code)  # not traced on its own


def _functions(module: types.ModuleType) -> Iterator[types.FunctionType]:
    for owner in (module, *(kind for kind in vars(module).values() if isinstance(kind, type))):
        for value in vars(owner).values():
            for function in (value, getattr(value, "__wrapped__", None)):
                if isinstance(function, types.FunctionType) and function.__module__ == module.__name__:
                    yield function


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code, and that of the functions it makes."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
