"""Whether sharing works on this machine: real processes, a real server, a real model, and kills.

:func:`verify` does it, and ``shared-rpc verify`` shows it. It uses what every user of the package can use.
"""

from shared_rpc.verification.run import Settings, Watcher, verify

__all__ = ["Settings", "Watcher", "verify"]
