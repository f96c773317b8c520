"""Whether sharing works on this machine: real processes, a real server, a real model, and kills.

:func:`verify` does it, and ``shared-rpc verify`` shows it. It uses what every user of the package can use.
"""

from shared_rpc.verification.interrupts import Interrupted
from shared_rpc.verification.run import Report, Settings, Watcher, verify
from shared_rpc.verification.stage import CannotRun

__all__ = ["CannotRun", "Interrupted", "Report", "Settings", "Watcher", "verify"]
