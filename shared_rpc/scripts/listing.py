"""The zygotes of a user: their list, and their end."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from shared_rpc.protocol.peers import foreign_owner, is_own, peer_of
from shared_rpc.settings import resolve_base_path
from shared_rpc.zygote.process import is_readable
from shared_rpc.zygote.wire import Lost, ask

#: Seconds for a zygote to answer.
_PATIENCE = 2.0


def live_zygotes(base_path: str | None, passed_over: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return facts of the zygotes that listen in the directory of the base path.

    :param passed_over: called with the reason where one does not answer.
    """
    found = []
    for path, sock in _connections(base_path):
        try:
            found.append(_state_of(sock))
        except (OSError, Lost) as error:
            passed_over(f"the zygote at {path} (pid {peer_of(sock).pid}) did not answer: {error}")
    return found


def stop_zygotes(base_path: str | None, passed_over: Callable[[str], None]) -> list[dict[str, Any]]:
    """End the zygotes, and return when they have ended. Scripts go on: they need them no more.

    :param passed_over: called with the reason where one does not answer: it may be another program.
    """
    ended = []
    for path, sock in _connections(base_path):
        pid = peer_of(sock).pid
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:  # the process has just ended
            continue
        try:
            ended.append(_state_of(sock))
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)  # a zygote has no state to lose
            is_readable(pidfd)
            with suppress(OSError):
                os.unlink(path)
        except (OSError, Lost) as error:
            passed_over(f"{path} (pid {pid}) did not answer as a zygote, and was not stopped: {error}")
        finally:
            os.close(pidfd)
    return ended


def _connections(base_path: str | None) -> Iterator[tuple[str, socket.socket]]:
    """Connect to the zygotes of this user, one after the other; to none that has just ended."""
    for path in map(str, sorted(Path(resolve_base_path(base_path)).parent.glob("*.zygote"))):
        if os.path.islink(path) and foreign_owner(path) is not None:
            continue
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(_PATIENCE)
            try:
                sock.connect(path)
            except OSError:
                continue
            if is_own(peer_of(sock).uid):
                yield path, sock


def _state_of(sock: socket.socket) -> dict[str, Any]:
    answer = ask(sock, {"type": "TellState"})
    if answer.pop("type") != "ZygoteState":
        raise Lost("the answer is not a zygote's")
    return answer
