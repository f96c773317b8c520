"""One function for each request that is about the whole server, in families that have the names of the operations."""

from shared_rpc.server.handlers import calls, generations, objects, records, server, tasks, tiers
from shared_rpc.server.handlers.table import Caller, answer

__all__ = ["Caller", "answer", "calls", "generations", "objects", "records", "server", "tasks", "tiers"]
