"""The start of a zygote for scripts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress

from shared_rpc.client.starting import LISTENING, log_path, start_detached, start_once
from shared_rpc.errors import ConfigurationError, ConnectError
from shared_rpc.protocol.election import Election
from shared_rpc.protocol.own_files import open_own
from shared_rpc.scripts.key import interpreter_options, is_relative
from shared_rpc.settings import ScriptSettings
from shared_rpc.zygote.framing import ROOM

__all__ = ["NoZygote", "start_zygote", "unfit_path"]

#: Seconds for a zygote to import torch and the other modules that it was given.
_START = 120.0
#: Seconds for which a zygote is not started again after its imports made it unfit for forks.
_BELIEVED = 600.0
#: Bytes of the reason.
_REASON = 4096

#: The imports of every zygote: torch, numpy, and the modules of a client. Users name further modules: a script's imports differ
#: from script to script, and some libraries start threads, or CUDA, when imported.
_MODULES = (
    *("numpy", "torch"),
    *("shared_rpc.provider.provider", "shared_rpc.operations.client", "shared_rpc.operations.async_client"),
    *("shared_rpc.codec.arguments", "shared_rpc.codec.results", "shared_rpc.lifecycle.main_end"),
    *("shared_rpc.provider.loopback", "shared_rpc.provider.spawn"),
    *("shared_rpc.extras.materialize", "shared_rpc.extras.safetensors"),
    *("shared_rpc.protocol.ticket", "shared_rpc.memory.backends.host", "shared_rpc.server.server"),
)
#: The working directory, first on Python's path by default, must not provide modules to a zygote.
_CODE = """\
import sys
if not sys.flags.safe_path:
    del sys.path[0]
from shared_rpc.zygote.__main__ import run
run()
"""


class NoZygote(Exception):
    """Lack of a zygote, with the reason."""


def unfit_path(path: str) -> str:
    """Return the path of the file that says why a zygote at ``path`` must not be forked."""
    return f"{path}.unfit"


def start_zygote(path: str, settings: ScriptSettings, variables: Mapping[str, str]) -> None:
    """Return when a zygote listens at ``path``, which this process has started or another one.

    :param variables: the environment of a zygote that is started.
    :raises NoZygote: if none listens, with the reason.
    """
    until = time.monotonic() + _START
    try:
        if not start_once(path, lambda election: _start(path, settings, variables, election, until), until):
            raise NoZygote(
                f"another process began to start a zygote at {path}, which does not listen in time: see {log_path(path)}"
            )
    except ConnectError as error:
        raise NoZygote(str(error)) from None
    except (ConfigurationError, OSError) as error:
        raise NoZygote(f"cannot start a zygote: {error}") from None


def _start(path: str, settings: ScriptSettings, variables: Mapping[str, str], election: Election, until: float) -> None:
    if reason := _believed(path):
        raise ConnectError(reason)
    needed = ["torch", *settings.preload]
    preload = {"type": "Preload", "steps": [*_MODULES, *settings.preload], "needed": needed}
    options = ["--listen", path, "--preload", json.dumps(preload), "--idle-exit", str(settings.idle_exit)]
    if is_relative(variables.get("PYTHONPATH", "")):
        options.append("--stay")

    def words(lock: int, pipe: int) -> list[str]:
        return [*interpreter_options(), "-c", _CODE, *options, "--lock", str(lock), "--report", str(pipe), ROOM]

    _, report = start_detached(path, words, election.fd, variables, until)
    if report == LISTENING:
        with suppress(OSError):  # there is none, or it is another user's
            os.unlink(unfit_path(path))
        return
    if report:
        _note_unfit(path, report)
    how = "did not listen in time" if report is None else "ended before it listened"
    reason = report or f"the zygote {how}: see {log_path(path)}"
    election.record_failure(reason)
    raise ConnectError(reason)


def _note_unfit(path: str, reason: str) -> None:
    """Have the next commands run without a zygote at once."""
    with suppress(ConfigurationError, OSError):  # they find out by themselves then
        fd = open_own(unfit_path(path), os.O_WRONLY)
        try:
            os.ftruncate(fd, 0)
            os.write(fd, reason.encode(errors="replace"))
        finally:
            os.close(fd)


def _believed(path: str) -> str:
    """Return why a zygote of this key must not be forked, as was found out not long ago."""
    try:
        fd = open_own(unfit_path(path), os.O_RDONLY, create=False)
    except (ConfigurationError, OSError):  # there is none, or it is another user's, whose word is not taken
        return ""
    try:
        recent = time.time() - os.fstat(fd).st_mtime < _BELIEVED
        return os.read(fd, _REASON).decode(errors="replace") if recent else ""
    finally:
        os.close(fd)
