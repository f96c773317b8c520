"""The file for a spawned server."""

from __future__ import annotations

import inspect
import os
import sys

from shared_rpc.errors import ConfigurationError
from shared_rpc.server.server import App
from shared_rpc.zygote.imports import names_in


def target_of(provider: App) -> str:
    """Return the target for ``shared-rpc serve``: ``/path/app.py:provider``, or ``package.module:provider``.

    Of the modules that have the provider as a global name, it is the one whose functions are its endpoints. If there are
    several, it is the script of this process, which has imported the others.

    :raises ConfigurationError: if there is none, several, or it has no file, as in a notebook.
    """
    names: dict[str, str] = {module: name for module in list(sys.modules) if (name := _global_name(module, provider))}
    functions = {module for endpoint in provider.endpoints.values() if (module := endpoint.function.__module__) in names}
    candidates = functions or set(names)
    # In a child of multiprocessing, the parent's script has both names.
    if candidates & {"__main__", "__mp_main__"}:
        return f"{_script(provider)}:{names['__main__']}"
    if not candidates:
        raise ConfigurationError(
            "cannot start a server for a provider that is no global name of a module: write 'provider = Provider(…)' at "
            "the top level of a file, and its functions below it"
        )
    if len(candidates) > 1:
        raise ConfigurationError(
            f"cannot start a server for a provider whose functions are in several files: "
            f"{', '.join(sorted(candidates))}. Import all of them in one module, and serve that yourself: shared-rpc serve "
            f"package.module"
        )
    module = candidates.pop()
    return f"{module}:{names[module]}"


def _global_name(module: str, provider: App) -> str:
    return next((name for name, value in list(names_in(sys.modules.get(module)).items()) if value is provider), "")


def _script(provider: App) -> str:
    """Return the target that loads ``__main__`` in another process."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:  # python -m
        return str(spec.name)
    file: str | None = getattr(main, "__file__", None)
    codes = [getattr(inspect.unwrap(endpoint.function), "__code__", None) for endpoint in provider.endpoints.values()]
    typed = any(_was_typed(code.co_filename) for code in codes if code is not None)
    if file is None or typed or not os.path.isfile(file) or not file.endswith(".py"):
        raise ConfigurationError(
            "cannot start a server for functions without a .py file, as of a notebook's cells, a prompt's lines or 'python "
            "-c'. Put the provider and its functions into a file, such as models.py, and import it here"
        )
    return os.path.abspath(file)


def _was_typed(filename: str) -> bool:
    """Return True for code of a prompt or a cell: ``<stdin>``, or a nonexistent file in ``/tmp/ipykernel_…``.

    A relative path is a script's, relative to the folder of its start.
    """
    return filename.startswith("<") or (os.path.isabs(filename) and not os.path.isfile(filename))
