"""One function for each request, in families that have the names of the operations which send them."""

from shared_rpc.server.handlers import buffers, calls, generations, objects, records, server, sources, tasks, tiers
from shared_rpc.server.handlers.table import Caller, answer

__all__ = ["Caller", "answer", "buffers", "calls", "generations", "objects", "records", "server", "sources", "tasks", "tiers"]
