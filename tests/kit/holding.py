"""Sessions that use objects of a server in turns, without mapping them."""

from __future__ import annotations

import contextlib
import mmap
import os

from shared_rpc.protocol import messages as m
from shared_rpc.protocol import tiers as t
from shared_rpc.protocol.catalogue import decode_message
from tests.kit.raw import Raw

__all__ = ["HoldingSession"]


class HoldingSession(Raw):
    """A session that has leases on objects, suspends them and resumes them."""

    def __init__(self, socket_path: str, seconds: float = 60.0) -> None:
        super().__init__(socket_path)
        self.sock.settimeout(seconds)
        self._number = 100

    def hold(self, object_id: str) -> None:
        """Get a lease, by a request that restores nothing."""
        assert self.ask(m.Hold([object_id])) == m.Held([object_id])

    def suspend(self, object_id: str) -> None:
        """Use an object no more."""
        assert self.ask(t.Suspend([object_id])) == m.Count(1)

    def begin_resume(self, object_id: str) -> None:
        """Ask for an object."""
        self._number += 1
        self.say(t.Resume(object_id), self._number)

    def heard(self) -> m.Message:
        """Return the next answer."""
        with contextlib.closing(self.hear_frame()) as frame:
            return decode_message(frame)

    def resume(self, object_id: str) -> set[int]:
        """Use an object again, which is in host memory; the different bytes that it has."""
        self.begin_resume(object_id)
        with contextlib.closing(self.hear_frame()) as frame:
            reply = decode_message(frame)
            assert isinstance(reply, t.Resumed), reply
            return {byte for fd in frame.fds for byte in os.pread(fd, os.fstat(fd).st_size, 0)[:: mmap.PAGESIZE]}
