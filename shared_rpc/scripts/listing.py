"""Listing and stopping the zygotes of a user."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from shared_rpc.protocol.peers import peer_of
from shared_rpc.settings import resolve_base_path
from shared_rpc.zygote.process import is_readable
from shared_rpc.zygote.wire import Lost, ask, connect

#: Seconds for a zygote to answer.
_PATIENCE = 2.0


def live_zygotes(base_path: str | None, passed_over: Callable[[str], None]) -> list[dict[str, Any]]:
    """Describe the zygotes that listen in the directory of the base path.

    :param passed_over: called with the reason for each one that does not answer: it may be another program.
    """
    return [facts for _, _, facts in _answering(base_path, passed_over)]


def stop_zygotes(base_path: str | None, passed_over: Callable[[str], None]) -> list[dict[str, Any]]:
    """Stop the zygotes, and wait for their ends. Scripts continue without them. See :func:`live_zygotes`."""
    ended = []
    for path, pidfd, facts in _answering(base_path, passed_over):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)  # a zygote has no state to lose
        is_readable(pidfd)
        with suppress(OSError):
            os.unlink(path)
        ended.append(facts)
    return ended


def _answering(base_path: str | None, passed_over: Callable[[str], None]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Query the zygotes of this user in turn; yield the path, a pidfd and the facts of each that answers."""
    for path in map(str, sorted(Path(resolve_base_path(base_path)).parent.glob("*.zygote"))):
        with ExitStack() as opened:
            try:
                sock = connect(path, _PATIENCE)
                if sock is None:
                    continue
                opened.enter_context(sock)
                pid = peer_of(sock).pid
                pidfd = os.pidfd_open(pid)
            except OSError:  # another user's, or the process has just ended
                continue
            opened.callback(os.close, pidfd)
            try:
                facts = ask(sock, {"type": "TellState"})
                if facts.pop("type") != "ZygoteState":
                    raise Lost("the answer is not a zygote's")
            except (OSError, Lost) as error:
                passed_over(f"{path} (pid {pid}) did not answer as a zygote: {error}")
            else:
                yield path, pidfd, facts
