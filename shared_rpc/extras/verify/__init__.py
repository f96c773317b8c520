"""Whether sharing works on this machine: real processes, a real server, a real model, and kills.

:func:`verify` does it, and ``shared-rpc verify`` shows it. It uses what every user of the package can use.
"""

from shared_rpc.extras.verify.interrupts import Interrupted
from shared_rpc.extras.verify.run import Report, Settings, verify
from shared_rpc.extras.verify.stage import CannotRun
from shared_rpc.extras.verify.verdict import Observer

__all__ = ["CannotRun", "Interrupted", "Observer", "Report", "Settings", "verify"]
