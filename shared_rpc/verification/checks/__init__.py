"""The checks, in the order in which they are made."""

from __future__ import annotations

from shared_rpc.verification.checks.check import Bench, Check
from shared_rpc.verification.checks.deaths import kill_client, kill_server, kill_worker
from shared_rpc.verification.checks.endurance import growth, lifetimes
from shared_rpc.verification.checks.sharing import accuracy, one_copy, read_only, zero_copy

__all__ = ["CHECKS", "Bench", "Check"]

CHECKS = (
    Check("one_copy", "one copy in memory", one_copy),
    Check("zero_copy", "zero copy: writes are seen by all", zero_copy),
    Check("accuracy", "same results as unshared", accuracy),
    Check("read_only", "read-only memory stays as it is", read_only),
    Check("lifetimes", "workers come and go", lifetimes),
    Check("growth", "nothing grows", growth),
    Check("kill_client", "kill -9 of a client", kill_client),
    Check("kill_worker", "kill -9 of the server's worker", kill_worker),
    Check("kill_server", "kill -9 of the server", kill_server),
)
