"""The start of a zygote for scripts."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping

from shared_rpc.client.starting import LISTENING, log_path, start_detached, start_once
from shared_rpc.errors import ConfigurationError, ConnectError
from shared_rpc.protocol.election import Election
from shared_rpc.scripts.key import interpreter_options, is_relative
from shared_rpc.settings import ScriptSettings
from shared_rpc.zygote.wire import PADDING

#: Seconds for a zygote to import torch and its other modules.
_START = 120.0
#: Seconds for which no zygote is started after its imports made it unfit for forks.
_BELIEVED = 600.0
#: The imports of every zygote: torch, numpy, and the modules of a client. Users name further modules: the imports of scripts
#: differ, and some libraries start threads, or CUDA, when imported.
_MODULES = (
    *("numpy", "torch"),
    *("shared_rpc.provider.provider", "shared_rpc.operations.client", "shared_rpc.operations.async_client"),
    *("shared_rpc.codec.arguments", "shared_rpc.codec.results", "shared_rpc.provider.main_end"),
    *("shared_rpc.provider.loopback", "shared_rpc.provider.spawn"),
    *("shared_rpc.extras.materialize", "shared_rpc.extras.safetensors"),
    *("shared_rpc.protocol.ticket", "shared_rpc.memory.backends.host", "shared_rpc.server.server"),
)
#: The working directory, first on Python's path by default, must not provide modules to a zygote.
CODE = """\
import sys
if not sys.flags.safe_path:
    del sys.path[0]
from shared_rpc.zygote.__main__ import run
run()
"""


def start_zygote(path: str, settings: ScriptSettings, variables: Mapping[str, str]) -> None:
    """Start a zygote at ``path``, unless another process does; return once it listens.

    :param variables: the environment of the new zygote.
    :raises ConnectError: if none listens, with the reason.
    """
    until = time.monotonic() + _START
    try:
        if not start_once(path, lambda election: _start(path, settings, variables, election, until), until):
            raise ConnectError(
                f"another process began to start a zygote at {path}, which does not listen in time: see {log_path(path)}"
            )
    except ConnectError:
        raise
    except (ConfigurationError, OSError) as error:
        raise ConnectError(f"cannot start a zygote: {error}") from None


def _start(path: str, settings: ScriptSettings, variables: Mapping[str, str], election: Election, until: float) -> None:
    if reason := election.lasting_failure(time.time() - _BELIEVED):
        raise ConnectError(reason)
    needed = ["torch", *settings.preload]
    preload = json.dumps([needed, [*_MODULES, *settings.preload]])
    options = ["--listen", path, "--preload", preload, "--idle-exit", str(settings.idle_exit)]
    if is_relative(variables.get("PYTHONPATH", "")):
        options.append("--stay")

    def words(lock: int, pipe: int) -> list[str]:
        return [*interpreter_options(), "-c", CODE, *options, "--detach", str(lock), "--report", str(pipe), PADDING]

    _, report = start_detached(path, words, election.fd, variables, until)
    if report == LISTENING:
        return
    how = "did not listen in time" if report is None else "ended before it listened"
    reason = report or f"the zygote {how}: see {log_path(path)}"
    election.record_failure(reason, lasting=bool(report))
    raise ConnectError(reason)
