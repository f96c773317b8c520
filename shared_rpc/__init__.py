"""Share GPU models between the processes of a host: one copy in memory, attached in milliseconds.

Importing this package configures nothing and imports no torch; every public name is loaded on first use. The names are listed
in ``__init__.pyi``.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

with open(f"{__file__}i", encoding="utf-8") as _stub:
    #: The modules of the public names.
    _HOMES = {line.split()[-1]: line.split()[1] for line in _stub if line.startswith("from ")}

__all__ = [*_HOMES, "__version__"]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("shared_rpc.errors")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from shared_rpc.lifecycle import collector

    with collector.paused():
        return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
