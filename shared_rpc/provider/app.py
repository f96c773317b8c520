"""The app served by ``serve``, its providers, and the options of ``serve`` that override theirs."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from shared_rpc.errors import ConfigurationError
from shared_rpc.memory.devices import device_id, device_tag
from shared_rpc.protocol.options import ServeOptions
from shared_rpc.provider.provider import Provider
from shared_rpc.settings import checked_path, resolve_base_path, socket_path


def load_providers(target: str) -> list[Provider]:
    """Load the providers of ``app.py``, of ``package.module``, or the one named by ``module:name``.

    The classes of a file are pickled as code: no client can import a module without a name.

    :raises ConfigurationError: if there is no such file, module or provider. An error of the file itself passes through.
    """
    place, _, name = target.partition(":")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    if name:
        found = getattr(module, name, None)
        if not isinstance(found, Provider):
            raise ConfigurationError(f"{place} has no Provider named {name!r}")
        return [found]
    # By its type: isinstance() evaluates a lazy proxy.
    providers = list({id(value): value for value in vars(module).values() if issubclass(type(value), Provider)}.values())
    if not providers:
        raise ConfigurationError(f"{place} has no Provider at its top level: add one, or name it with {place}:name")
    return providers


class _Source(SourceFileLoader):
    """A loader that compiles a file each time, like Python does with a script.

    Cached bytecode would also match a file of the same size written in the same second.
    """

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _load_file(path: Path) -> ModuleType:
    from shared_rpc.codec.by_value import pickle_by_value

    if not path.is_file():
        raise ConfigurationError(f"no such file: {path}")
    name = path.stem
    loader = _Source(name, str(path.resolve()))
    spec = importlib.util.spec_from_file_location(name, path.resolve(), loader=loader)
    assert spec is not None, "a path with this suffix has a loader"
    module = importlib.util.module_from_spec(spec)
    # As for a script: modules in its folder can be imported.
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[name] = module
    pickle_by_value(module)
    loader.exec_module(module)
    return module


def _load_module(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigurationError(f"{name!r} is neither a file nor a module: write app.py, or package.module")
    top = name.partition(".")[0]
    try:
        if top not in sys.modules and importlib.util.find_spec(top) is None:
            # The working directory is the app's own folder if it has the app; otherwise it may be another user's.
            sys.path.insert(0, os.getcwd())
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the package exists, but not a module that it imports
        raise ConfigurationError(f"no such module: {error.name!r}; for a file write {name}.py") from error
    if name in sys.modules:  # its package has imported it
        return sys.modules[name]
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"no such module: {name!r}; for a file write {name}.py")
    # Not by an import statement, which locks the module: a call at its top level would wait for a thread that pickles objects
    # of the module, which would wait for the lock.
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    package, _, last = name.rpartition(".")
    if package:
        setattr(sys.modules[package], last, module)
    return module


def override(provider: Provider, options: ServeOptions, number: int) -> None:
    """Override the base path, device and cluster of a provider by options of ``serve``.

    :param number: this worker's number, from 0.
    """
    if options.base_path is not None:
        provider.base_path = options.base_path
    device = options.device_of(number)
    if device is not None:
        provider.device = device
    if options.cluster is not None:
        provider.asked_cluster = options.cluster


def socket_of(provider: Provider, options: ServeOptions) -> str | None:
    """Return the path of a broker's socket for a provider; None for that of the provider's own device.

    With several workers, the socket is named for the device of the first.

    :raises ConfigurationError: for a path that is not UTF-8, or too long.
    """
    if options.socket is not None:
        return checked_path(options.socket)
    if not options.devices:
        return None
    return socket_path(resolve_base_path(provider.base_path), device_tag(device_id(options.devices[0])))
