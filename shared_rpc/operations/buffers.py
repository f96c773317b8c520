"""Raw buffers, and the devices of their memory."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shared_rpc.client.handle import Lease
from shared_rpc.client.steps import Operation, Request, Work, query
from shared_rpc.client.suspension import Context
from shared_rpc.errors import ConfigurationError
from shared_rpc.memory.devices import device_id
from shared_rpc.operations.binding import Leased, Steps, id_of, operation, take_result
from shared_rpc.operations.handles import lending
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.infos import DeviceInfo

if TYPE_CHECKING:
    import torch


class BufferOperations:
    """Raw buffers and devices."""

    @lending
    def create_buffer(
        ctx: Context,
        shape_or_nbytes: int | Sequence[int],
        dtype: torch.dtype | str = "uint8",
        device: torch.device | str | None = None,
        *,
        zero: bool = False,
        ttl: float | None = None,
        keep: bool = False,
    ) -> Steps[Leased[torch.Tensor]]:
        """Create shared memory without an endpoint, which every process that has its id can read and write.

        The handle's ``value`` is a contiguous tensor over it, and :meth:`get_buffer` takes its ``object_id``, in any process,
        while a process holds the buffer: a killed process leaves nothing behind. Use ``ttl`` or ``keep=True`` in a process that
        passes the id on and exits. A buffer counts against the server's ``max_bytes``, and is never evicted.
        In the local role other processes cannot get it.

        :param shape_or_nbytes: a tuple is a shape; an int is always a number of bytes, whatever the dtype, and must be a whole
            number of elements: ``create_buffer(1024, "float32")`` has 256.
        :param dtype: the tensor's dtype, or its name; not a quantised one.
        :param device: ``"cpu"``, ``"cuda"``, ``"cuda:<index>"`` as numbered in this process, or a GPU's UUID; None for the
            server's own. A GPU's server has all GPUs visible to it, and the host's memory; see :meth:`list_devices`.
        :param zero: True to zero the memory; otherwise its content is undefined.
        :param ttl: seconds in which other processes can get it, even if no process holds it. After that its holders keep it.
        :param keep: True if other processes can get it even if no process holds it, until :meth:`free_buffer`.
        :raises ConfigurationError: for an impossible size, dtype or ``ttl``, and for both ttl and keep.
        :raises CapabilityError: if the server has no such device, or the device's total memory is too small.
        :raises ServerBusy: if the device, or its quota, has too little free memory now.
        """
        chosen = ""
        if device is not None:
            # The server does not know this process's own GPU indices.
            chosen = yield Work(lambda: device_id(str(device)))
        message = request_of(shape_or_nbytes, dtype, chosen, zero, ttl, keep)
        handle: Leased[torch.Tensor] = yield from created(ctx, message)
        return handle

    @lending
    def get_buffer(ctx: Context, buffer_id: str) -> Steps[Leased[torch.Tensor]]:
        """Return a handle of the buffer with this id: the same memory, without a copy.

        :raises BufferNotFound: if the buffer does not exist or is no longer available; ``reason`` says why.
        """
        what = f"get_buffer({buffer_id!r})"
        handle: Leased[torch.Tensor] = yield from take_result(ctx, what, (yield Request(m.GetBuffer(buffer_id), what)))
        return handle

    @operation
    def free_buffer(ctx: Context, buffer: Lease[Any] | str) -> Steps[bool]:
        """Unlist a buffer; return False if it was unlisted before.

        Processes that hold it, including this one, keep it: the memory is freed with the last handle.
        """
        object_id = id_of(buffer)
        return (yield from query(m.FreeBuffer(object_id), f"free_buffer({object_id!r})"))

    @operation
    def list_devices(ctx: Context) -> Steps[list[DeviceInfo]]:
        """Return the devices that hold memory of the server."""
        return (yield from query(m.ListDevices(), "list_devices"))


def created(ctx: Context, message: m.CreateBuffer) -> Operation[Any]:
    """Create a buffer, and return its handle."""
    return (yield from take_result(ctx, "create_buffer", (yield Request(message, "create_buffer"))))


def request_of(
    shape_or_nbytes: int | Sequence[int],
    dtype: object,
    device: str = "",
    zero: bool = False,
    ttl: float | None = None,
    keep: bool = False,
) -> m.CreateBuffer:
    """Return the request for a buffer.

    :param device: its id, ``""`` for the server's own.
    :raises ConfigurationError: for an invalid size or dtype; the server checks the rest.
    """
    from shared_rpc.protocol.buffers import Extent

    shape, name = _shape(shape_or_nbytes), str(dtype).removeprefix("torch.")
    Extent.of(shape, name)  # checked here, before a size too large for a message is sent
    return m.CreateBuffer(shape, name, device, zero, ttl, keep)


def _shape(shape_or_nbytes: Any) -> int | list[int]:
    """Return a size in the form of the message; numpy's integers are integers too."""
    try:
        if hasattr(shape_or_nbytes, "__index__"):
            return operator.index(shape_or_nbytes)
        return [operator.index(size) for size in shape_or_nbytes]
    except TypeError as error:
        raise ConfigurationError(f"{shape_or_nbytes!r} is neither a number of bytes nor a shape: {error}") from error
