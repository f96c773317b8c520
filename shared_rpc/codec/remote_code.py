"""Classes of Hugging Face's ``transformers_modules``, which travel as code, and which transformers looks for by their module.

``save_pretrained()`` copies the file of a class's module. So a client has a module of that name, with the file and the classes
that came; it is run when the client itself loads that code.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from shared_rpc.codec.by_value import pickle_by_value

_PACKAGE = "transformers_modules."


def reduce_remote_class(kind: type, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Add what :func:`_finish` needs to cloudpickle's reduction of a class, if it is one of those."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if not kind.__module__.startswith(_PACKAGE) or file is None or len(reduced) != 6:
        return reduced
    *rest, setter = reduced
    rest[2] = (setter, rest[2], file)
    return *rest, _finish


def _finish(kind: type, state: tuple[Any, Any, str]) -> None:
    setter, own, file = state
    setter(kind, own)
    module = sys.modules.get(kind.__module__)
    if module is None:
        spec = importlib.util.spec_from_file_location(kind.__module__, file)
        if spec is None:
            return
        module = sys.modules[kind.__module__] = importlib.util.module_from_spec(spec)
        pickle_by_value(module)  # for every receiver
    if "__transformers_module_hash__" not in vars(module):  # present once the code has run
        setattr(module, kind.__qualname__, kind)
