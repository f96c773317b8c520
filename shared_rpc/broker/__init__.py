"""A server whose endpoints run in worker processes: it holds what they make, and needs neither torch nor CUDA."""

from shared_rpc.broker.broker import Broker
from shared_rpc.broker.command import WorkerCommand

__all__ = ["Broker", "WorkerCommand"]
