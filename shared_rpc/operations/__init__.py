"""Public operations, each written once: its signature, its docstring, and the steps for a driver.

``Client``, ``AsyncClient`` and ``Provider`` have all of them, see :func:`shared_rpc.operations.binding.bound`.
"""

from shared_rpc.operations.buffers import BufferOperations
from shared_rpc.operations.calls import CallOperations
from shared_rpc.operations.generations import GenerationOperations
from shared_rpc.operations.objects import ObjectOperations
from shared_rpc.operations.records import RecordOperations
from shared_rpc.operations.server import ChannelOperations, ServerOperations
from shared_rpc.operations.tasks import TaskOperations
from shared_rpc.operations.tiers import TierOperations


class Operations(
    CallOperations,
    TaskOperations,
    ObjectOperations,
    BufferOperations,
    ChannelOperations,
    GenerationOperations,
    RecordOperations,
    ServerOperations,
    TierOperations,
):
    """All operations."""
