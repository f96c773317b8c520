"""The role ``spawn``: a client that starts a server if none listens, once for all processes that need one."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from shared_rpc.client.starting import ServerStarter, log_path
from shared_rpc.errors import ConfigurationError
from shared_rpc.operations.client import Client
from shared_rpc.protocol.infos import RuntimeInfo
from shared_rpc.protocol.options import ServeOptions
from shared_rpc.provider.runtime import ClientRuntime
from shared_rpc.server.server import App
from shared_rpc.settings import Role
from shared_rpc.zygote.imports import names_in


class SpawnRuntime(ClientRuntime):
    """A client that starts a server if none listens, whenever it connects.

    :param target: returns the app to serve, on demand: :func:`target_of`.
    :param idle_exit: idle seconds after which that server ends; None for never.
    :param preload: True if its workers may be forks.
    :param cluster: the cluster that it joins; None for that of the environment.
    """

    role: Role = "spawn"

    def __init__(
        self,
        options: dict[str, Any],
        target: Callable[[], str],
        idle_exit: float | None,
        preload: bool,
        cluster: str | None = None,
    ) -> None:
        super().__init__(Client(**options))
        # Those of this process: settings made after importing the provider are not in the file.
        base_path, device = options["base_path"], options["device"]
        served = ServeOptions(
            base_path=None if base_path is None else os.fspath(base_path),
            devices=() if device == "auto" else (device,),
            idle_exit=idle_exit,
            preload=preload,
            cluster=cluster,
        )
        self.operations._summon = ServerStarter(target, served)

    def describe(self, info: RuntimeInfo) -> None:
        """Add the server's own description, and the log of a started server."""
        super().describe(info)
        info["log"] = log_path(self.operations.socket_path)


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
            "cannot start a server for a provider that is not a global of a module: write 'provider = Provider(…)' at "
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
            "cannot start a server for functions without a .py file, such as notebook cells, interactive input or 'python "
            "-c'. Put the provider and its functions into a file, such as models.py, and import it here"
        )
    return os.path.abspath(file)


def _was_typed(filename: str) -> bool:
    """Return True for code of a prompt or a cell: ``<stdin>``, or a nonexistent file in ``/tmp/ipykernel_…``.

    A relative path is a script's, relative to the folder of its start.
    """
    return filename.startswith("<") or (os.path.isabs(filename) and not os.path.isfile(filename))
