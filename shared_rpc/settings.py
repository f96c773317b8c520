"""Settings of a process, from the environment: its role and its socket's path.

This module alone reads the environment. ``shared-rpc run`` imports it, so it loads neither msgspec nor dataclasses.

Role, from the two variables (an empty value counts as unset, any other value is an error)::

    SHARED_TENSOR_ENABLED    SHARED_TENSOR_ROLE           role
    false                    anything                     local
    unset                    unset                        local
    unset                    server / client / local /    as named
                             spawn
    true                     server / client / local /    as named
                             spawn
    true                     unset                        client

Arguments of ``Provider`` override the environment.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Mapping, MutableMapping
from contextlib import suppress
from typing import Literal, NamedTuple, get_args

from shared_rpc.errors import ConfigurationError

Role = Literal["local", "server", "client", "spawn"]
_ROLES: dict[str, Role] = {role: role for role in get_args(Role)}

_ENABLED = "SHARED_TENSOR_ENABLED"
_ROLE = "SHARED_TENSOR_ROLE"
_BASE_PATH = "SHARED_TENSOR_BASE_PATH"
_GPUS = "CUDA_VISIBLE_DEVICES"
_CLUSTER = "SHARED_TENSOR_CLUSTER"
_RUN_PRELOAD = "SHARED_TENSOR_RUN_PRELOAD"
_RUN_IDLE_EXIT = "SHARED_TENSOR_RUN_IDLE_EXIT"
_SOURCE_TOKEN = "SHARED_TENSOR_SOURCE_TOKEN"
_SWITCH = {"": None, "1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}

#: sockaddr_un.sun_path holds 108 bytes, the last of them the terminator (unix(7)).
SOCKET_PATH_LIMIT = 107
#: The form of a cluster's name, which no command line of a program matches.
CLUSTER_NAME = re.compile(r"[\w.-]+")
_SOCKET_END = re.compile(r"-(cpu|[0-9a-f]{8})\.sock")


def resolve_role(
    enabled: bool | None = None,
    execution_mode: str = "auto",
    environ: Mapping[str, str] | None = None,
) -> Role:
    """Return the role of this process; see the table above.

    :raises ConfigurationError: for an invalid value, naming the variable and the allowed values.
    """
    environ = os.environ if environ is None else environ
    if execution_mode not in ("auto", *_ROLES):
        raise ConfigurationError(f"execution_mode={execution_mode!r}: use 'auto', 'local', 'server', 'client' or 'spawn'")
    if enabled is False:
        return "local"
    if execution_mode != "auto":
        return _ROLES[execution_mode]
    words = f"one of {', '.join(filter(None, _SWITCH))}"
    switch = _SWITCH[_choice(environ, _ENABLED, _SWITCH, words)] if enabled is None else enabled
    if switch is False:
        return "local"
    role = _choice(environ, _ROLE, _ROLES, "'server', 'client', 'local' or 'spawn'")
    return _ROLES.get(role, "client" if switch else "local")


def _choice(environ: Mapping[str, str], name: str, values: Collection[str], allowed: str) -> str:
    """Return the value of a variable, ``""`` if unset; ``allowed`` lists the values in words."""
    text = environ.get(name, "").strip().lower()
    if text and text not in values:
        raise ConfigurationError(f"{name}={text!r}: use {allowed}, or leave it unset")
    return text


def server_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for a server started by this process: its own, in the server role, with its ``sys.path``.

    The interpreter's own folders are left out: a server's functions may start another interpreter. So are folders within
    installed packages, which add these themselves: setuptools appends its old copies of other packages, and in ``PYTHONPATH``
    they would precede installed packages. Output is not buffered, so that prints of workers appear in the server's log at
    once.
    """
    import site
    import sysconfig

    environ = os.environ if environ is None else environ
    standard = {*sysconfig.get_paths().values(), *site.getsitepackages(), *sysconfig.get_config_vars("DESTSHARED")}
    standard.add(f"{sys.base_prefix}/{sys.platlibdir}/python{sys.version_info.major}{sys.version_info.minor}.zip")
    packages = tuple(os.path.join(folder, "") for folder in (*site.getsitepackages(), site.getusersitepackages()))
    own = (entry for entry in sys.path if entry not in standard and not entry.startswith(packages))
    path = os.pathsep.join(map(os.path.abspath, own))
    chosen = {"PYTHONUNBUFFERED": "1", **environ, "PYTHONPATH": path, _ROLE: "server"}
    chosen.pop(_ENABLED, None)
    return chosen


def client_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for a client started by a server, with this process's module path."""
    return {**server_environment(environ), _ROLE: "client"}


def source_environment(token: str) -> dict[str, str]:
    """Return the environment for a source of records started by a server: a client's, with the server's token."""
    return {**client_environment(), _SOURCE_TOKEN: token}


def source_token() -> str:
    """Return the token of the server that started this process as a source of records, ``""`` for none."""
    return os.environ.get(_SOURCE_TOKEN, "")


def open_descriptors() -> list[int]:
    """Return the numbers of all open descriptors in ascending order."""
    found = []
    for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
        with suppress(OSError):  # the descriptor of the listing itself
            os.fstat(fd)
            found.append(fd)
    return found


def inheritable() -> list[int]:
    """Return the descriptors inherited by a program executed in this process, in ascending order."""
    found = []
    for fd in open_descriptors():
        with suppress(OSError):  # another thread has closed it
            if os.get_inheritable(fd):
                found.append(fd)
    return found


def program(module: str, *words: str) -> list[str]:
    """Return the command line that runs a module of this package as a program.

    No module is taken from the working directory (``-P``), which may be another user's. Unlike ``PYTHONSAFEPATH``, the option
    is not inherited by interpreters that the program starts.
    """
    return [sys.executable, "-P", "-m", module, *words]


def resolve_base_path(base_path: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None) -> str:
    """Return the common prefix of the socket paths of one application.

    It is the argument, else ``SHARED_TENSOR_BASE_PATH``, else ``$XDG_RUNTIME_DIR/shared-tensor``, else
    ``/tmp/shared-tensor-<uid>/shared-tensor``.
    """
    environ = os.environ if environ is None else environ
    chosen = os.fspath(base_path) if base_path else environ.get(_BASE_PATH, "")
    if chosen:
        return os.path.abspath(os.path.expanduser(chosen))
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    # Under sudo and in containers, the variable often names a directory that does not exist.
    if runtime and os.path.isdir(runtime):
        return os.path.join(runtime, "shared-tensor")
    return f"/tmp/shared-tensor-{os.geteuid()}/shared-tensor"


def resolve_cluster(cluster: str | None = None, environ: Mapping[str, str] | None = None) -> str:
    """Return the cluster that servers join: the argument, else ``SHARED_TENSOR_CLUSTER``, else ``""`` for none.

    It is a cluster's name, or the command line of a program.
    """
    environ = os.environ if environ is None else environ
    return (environ.get(_CLUSTER, "") if cluster is None else cluster).strip()


def socket_path(base_path: str, tag: str) -> str:
    """Return ``<base_path>-<tag>.sock``; the tag is ``cpu`` or the first eight hex digits of the GPU's UUID.

    :raises ConfigurationError: if the path is too long for a Unix socket address, or not UTF-8.
    """
    path = checked_path(f"{base_path}-{tag}.sock")
    if len(os.fsencode(path)) > SOCKET_PATH_LIMIT:
        raise ConfigurationError(
            f"the socket path {path!r} has {len(os.fsencode(path))} bytes, but Linux allows {SOCKET_PATH_LIMIT}: "
            f"set a shorter base_path or {_BASE_PATH}"
        )
    return path


def checked_path(path: str) -> str:
    """Return the path of a socket, which must be UTF-8, like all text on the wire.

    :raises ConfigurationError: if it is not.
    """
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(
            f"the socket path {os.fsencode(path)!r} is not UTF-8: set another base_path or {_BASE_PATH}"
        ) from None
    return path


def is_socket_of(base_path: str, path: str) -> bool:
    """Return True if :func:`socket_path` gives ``path`` for some tag. A base path may begin with another one."""
    return path.startswith(f"{base_path}-") and _SOCKET_END.fullmatch(path, len(base_path)) is not None


#: sd_listen_fds(3), sd_notify(3), and FileDescriptorStoreMax= of systemd.exec(5).
_SERVICE = ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "NOTIFY_SOCKET", "FDSTORE")


def take_service_variables(environ: MutableMapping[str, str] | None = None) -> dict[str, str]:
    """Remove a service manager's variables from the environment, and return them: child processes must not inherit them."""
    environ = os.environ if environ is None else environ
    return {name: environ.pop(name) for name in _SERVICE if name in environ}


def environment() -> dict[str, str]:
    """Return a copy of this process's environment."""
    return dict(os.environ)


def change_environment(changes: Mapping[str, str | None]) -> None:
    """Set variables of this process; a value of None removes the variable."""
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        elif os.environ.get(name) != value:
            os.environ[name] = value


class ScriptSettings(NamedTuple):
    """Settings of ``shared-rpc run``.

    :param preload: names of modules that its zygote imports besides its usual ones.
    :param idle_exit: seconds without a script after which the zygote ends.
    """

    preload: tuple[str, ...] = ()
    idle_exit: float = 1800.0


def script_settings(environ: Mapping[str, str] | None = None) -> ScriptSettings:
    """Read ``SHARED_TENSOR_RUN_PRELOAD``, comma-separated names, and ``SHARED_TENSOR_RUN_IDLE_EXIT``, seconds.

    :raises ConfigurationError: for a text that is not a number of seconds.
    """
    environ = os.environ if environ is None else environ
    names = tuple(name.strip() for name in environ.get(_RUN_PRELOAD, "").split(",") if name.strip())
    text = environ.get(_RUN_IDLE_EXIT, "").strip()
    if not text:
        return ScriptSettings(names)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ConfigurationError(f"{_RUN_IDLE_EXIT}={text!r}: use a number of seconds, or leave it unset")
    return ScriptSettings(names, seconds)
