"""The operations on raw buffers and devices; see :mod:`shared_rpc.client.steps` for how they are driven."""

from __future__ import annotations

import operator
from collections.abc import MutableMapping, Sequence
from typing import Any

from shared_rpc.client.results import result_of, valued
from shared_rpc.client.steps import Operation, Request, Tell, Work, ask
from shared_rpc.errors import ConfigurationError
from shared_rpc.lifecycle.interrupts import is_interrupt
from shared_rpc.memory.devices import device_id
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.buffers import Extent

__all__ = ["create", "free", "get", "list_devices", "request_of"]


def create(
    shape_or_nbytes: int | Sequence[int],
    dtype: object,
    device: object,
    zero: bool,
    ttl: float | None,
    max_accesses: int | None,
    keep: bool,
    values: MutableMapping[str, Any],
) -> Operation[tuple[m.Result, Any]]:
    """Make a buffer: ``(message, tensor)``. Where the tensor cannot be made, the buffer is freed.

    :param values: the values that live in this process, by object id.
    """
    chosen = ""
    if device is not None:
        # This process's own index of a GPU means nothing to the server.
        chosen = yield Work(lambda: device_id(str(device)))
    message = request_of(shape_or_nbytes, dtype, chosen, zero, ttl, max_accesses, keep)
    result = result_of("create_buffer", (yield Request(message, "create_buffer")))
    try:
        return (yield from valued(result, values))
    except GeneratorExit:
        raise
    except BaseException as error:
        # Nobody else knows of it. One who was interrupted is not to wait.
        if is_interrupt(error):
            yield Tell(m.FreeBuffer(result.message.object_id))
        else:
            yield from free(result.message.object_id)
        raise


def get(object_id: str, values: MutableMapping[str, Any]) -> Operation[tuple[m.Result, Any]]:
    """A buffer that is there: ``(message, tensor)``."""
    what = f"get_buffer({object_id!r})"
    return (yield from valued(result_of(what, (yield Request(m.GetBuffer(object_id), what))), values))


def free(object_id: str) -> Operation[bool]:
    """Have nobody get a buffer any more; False if nobody could."""
    reply = yield from ask(Request(m.FreeBuffer(object_id), f"free_buffer({object_id!r})"), m.Count)
    return bool(reply.count)


def list_devices() -> Operation[list[dict[str, Any]]]:
    """Facts about every device that the server has memory on."""
    reply = yield from ask(Request(m.ListDevices(), "list_devices", again=True), m.FactsList)
    return list(reply.items)


def request_of(
    shape_or_nbytes: int | Sequence[int],
    dtype: object,
    device: str,
    zero: bool,
    ttl: float | None,
    max_accesses: int | None,
    keep: bool,
) -> m.CreateBuffer:
    """What is asked of whoever makes memory.

    :param device: its id, ``""`` for the server's own.
    :raises ConfigurationError: for what is no size or no dtype; the other side looks at the rest.
    """
    shape, name = _shape(shape_or_nbytes), str(dtype).removeprefix("torch.")
    Extent.of(shape, name)  # here no size is too large for a message
    return m.CreateBuffer(shape, name, device, zero, ttl, max_accesses, keep)


def _shape(shape_or_nbytes: Any) -> int | list[int]:
    """As the message has it; anything that counts as an integer is one, as numpy's do."""
    try:
        if hasattr(shape_or_nbytes, "__index__"):
            return operator.index(shape_or_nbytes)
        return [operator.index(size) for size in shape_or_nbytes]
    except TypeError as error:
        raise ConfigurationError(f"{shape_or_nbytes!r} is neither a number of bytes nor a shape: {error}") from error
