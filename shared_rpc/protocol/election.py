"""Election of the process that starts a server.

The lock is a flock(2) on a file in the socket's folder. The process that starts a server has it, and the server inherits the
descriptor. So no second one is started while the first loads its app, even if the process that started it has been killed, nor
while it ends and its memory is not yet free. The kernel releases the lock with the last of the two, however they end.

The file counts failures and has the reason of the last one: a process that gets the lock after waiting, and finds one more
failure, has waited for that start.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

from shared_rpc.forks import after_fork
from shared_rpc.protocol.own_files import open_own

#: Maximum bytes of a reason.
_LIMIT = 1 << 16
#: Follows the number of failures if the last one is permanent.
_LASTING = " lasting"


class Election:
    """The candidacy of a process or thread to start the server at ``path``. Owns a descriptor until :meth:`close`.

    :raises ConfigurationError: if the lock is another user's.
    """

    def __init__(self, path: str) -> None:
        self.fd = open_own(f"{path}.spawn", os.O_RDWR)
        # With a child's copy of the descriptor, the lock would outlive its parent and the server.
        after_fork(self.close)
        self._failures, _ = self._read()

    def acquire(self) -> bool:
        """Take the lock until :meth:`close`, without blocking; return True if this process must start the server."""
        with suppress(BlockingIOError):
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def failure(self) -> str:
        """Return the reason of a failed start since this object was created; ``""`` if there was none. Requires the lock."""
        failures, reason = self._read()
        return reason if failures != self._failures else ""

    def lasting_failure(self, since: float) -> str:
        """Return the reason of the last failure if it is permanent and occurred after ``since`` (time.time())."""
        recent = os.fstat(self.fd).st_mtime > since
        head, _, reason = os.pread(self.fd, _LIMIT, 0).decode(errors="replace").partition("\n")
        return reason if recent and head.endswith(_LASTING) else ""

    def record_failure(self, reason: str, lasting: bool = False) -> None:
        """Record the reason for waiting processes. Requires the lock.

        :param lasting: True if a later process would fail for the same reason.
        """
        count, _ = self._read()
        content = f"{count + 1}{_LASTING if lasting else ''}\n".encode() + reason.encode(errors="replace")[: _LIMIT // 2]
        os.pwrite(self.fd, content, 0)
        os.ftruncate(self.fd, len(content))

    def close(self) -> None:
        """Close this object's descriptor; a started server keeps its own."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def _read(self) -> tuple[int, str]:
        head, _, reason = os.pread(self.fd, _LIMIT, 0).decode(errors="replace").partition("\n")
        count = head.removesuffix(_LASTING)
        return int(count) if count.isdigit() else 0, reason
