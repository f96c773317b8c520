"""Raw buffers, and the devices that they lie on."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shared_rpc.client.steps import Operation, Request, Tell, Work, ask
from shared_rpc.errors import ConfigurationError
from shared_rpc.errors.interrupts import is_interrupt
from shared_rpc.handle import Lease
from shared_rpc.memory.devices import device_id
from shared_rpc.operations.binding import Context, Leased, Steps, id_of, lending, operation, taken
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.buffers import Extent
from shared_rpc.protocol.infos import DeviceInfo

if TYPE_CHECKING:
    import torch

__all__ = ["BufferOperations", "request_of"]


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
        max_accesses: int | None = None,
        keep: bool = False,
    ) -> Steps[Leased[torch.Tensor]]:
        """New shared memory that belongs to no endpoint, to be read and written by all who have its id.

        The handle's ``value`` is a contiguous tensor over it, and its ``object_id`` what :meth:`get_buffer` takes, in any
        process. Others can get it while somebody holds it: it ends with its last handle, so a process that is killed leaves
        nothing behind. Who hands the id on and ends says for how long it is to be there by ``ttl``, or ``keep=True``.
        It counts against the server's ``max_bytes``, and is never evicted. In the local role nobody else can get it.

        :param shape_or_nbytes: a tuple is a shape; an int is always a number of bytes, whatever the dtype, and must be a whole
            number of elements: ``create_buffer(1024, "float32")`` has 256.
        :param dtype: of the tensor, or its name; quantised ones are not possible.
        :param device: ``"cpu"``, ``"cuda"``, ``"cuda:<index>"`` as this process counts, or a GPU's UUID; None for the server's
            own. A GPU's server has all GPUs that it sees, and the host's memory; see :meth:`list_devices`.
        :param zero: whether the memory must be zeros; its content is not specified otherwise.
        :param ttl: seconds for which others can get it, whether or not somebody holds it. It never ends under those who do.
        :param max_accesses: how many times it may be got; this call does not count.
        :param keep: whether it is there though nobody holds it, until :meth:`free_buffer` or the end of the server.
        :raises ConfigurationError: for a size, a dtype, a ``ttl`` or a ``max_accesses`` that cannot be; for both ttl and keep.
        :raises CapabilityError: if the server has no such device, or the device never so much memory.
        :raises ServerBusy: if the device has not so much memory left now, or its quota does not.
        """
        chosen = ""
        if device is not None:
            # This process's own index of a GPU means nothing to the server.
            chosen = yield Work(lambda: device_id(str(device)))
        message = request_of(shape_or_nbytes, dtype, chosen, zero, ttl, max_accesses, keep)
        reply = yield Request(message, "create_buffer")
        try:
            handle: Leased[torch.Tensor] = yield from taken(ctx, "create_buffer", reply)
        except GeneratorExit:
            raise
        except BaseException as error:
            reply.frame.close()
            # Nobody else knows of it. One who was interrupted is not to wait.
            if isinstance(reply.message, m.Result) and is_interrupt(error):
                yield Tell(m.FreeBuffer(reply.message.object_id, release=True))
            elif isinstance(reply.message, m.Result):
                yield from _freed(reply.message.object_id)
            raise
        return handle

    @lending
    def get_buffer(ctx: Context, buffer_id: str) -> Steps[Leased[torch.Tensor]]:
        """The buffer of that id, whoever made it: a handle of the same memory, without a copy.

        :raises BufferNotFound: if there is none, or not any more; ``reason`` says why.
        """
        what = f"get_buffer({buffer_id!r})"
        handle: Leased[torch.Tensor] = yield from taken(ctx, what, (yield Request(m.GetBuffer(buffer_id), what)))
        return handle

    @operation
    def free_buffer(ctx: Context, buffer: Lease[Any] | str) -> Steps[bool]:
        """Have nobody get a buffer any more; False if nobody could.

        Those who hold it keep it, this process too: memory goes with the last handle.
        """
        return (yield from _freed(id_of(buffer)))

    @operation
    def list_devices(ctx: Context) -> Steps[list[DeviceInfo]]:
        """Return the devices that the server has memory on."""
        return (yield from ask(Request(m.ListDevices(), "list_devices", again=True), m.DevicesReply)).infos


def _freed(object_id: str) -> Operation[bool]:
    reply = yield from ask(Request(m.FreeBuffer(object_id), f"free_buffer({object_id!r})"), m.Count)
    return bool(reply.count)


def request_of(
    shape_or_nbytes: int | Sequence[int],
    dtype: object,
    device: str,
    zero: bool,
    ttl: float | None,
    max_accesses: int | None,
    keep: bool,
) -> m.CreateBuffer:
    """Return what is asked of whoever makes memory.

    :param device: its id, ``""`` for the server's own.
    :raises ConfigurationError: for what is no size or no dtype; the other side looks at the rest.
    """
    shape, name = _shape(shape_or_nbytes), str(dtype).removeprefix("torch.")
    Extent.of(shape, name)  # here no size is too large for a message
    return m.CreateBuffer(shape, name, device, zero, ttl, max_accesses, keep)


def _shape(shape_or_nbytes: Any) -> int | list[int]:
    """Return it as the message has it; anything that counts as an integer is one, as numpy's do."""
    try:
        if hasattr(shape_or_nbytes, "__index__"):
            return operator.index(shape_or_nbytes)
        return [operator.index(size) for size in shape_or_nbytes]
    except TypeError as error:
        raise ConfigurationError(f"{shape_or_nbytes!r} is neither a number of bytes nor a shape: {error}") from error
