"""The rule for results of endpoints.

A result is None, or any object that reaches at least one tensor or module: the pickler decomposes it, and it is rebuilt as it
was. A result that reaches none is refused: this is not a general RPC system. So is a tensor with an autograd graph outside of
modules.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

import msgspec
import torch

from shared_rpc.codec.buffers import PickledBuffers
from shared_rpc.codec.parameters import storages_of_parameters
from shared_rpc.codec.refusals import reason_against
from shared_rpc.codec.skeleton import Scan, dump, graph_outside
from shared_rpc.errors import CapabilityError
from shared_rpc.protocol.records import Tensors

_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_CONTAINERS = (tuple, list, dict, OrderedDict)
#: Objects that execute when the caller iterates or awaits them, in this process only, and the advice for each.
_RUNNING = {
    GeneratorType: "return what it yields, as a list",
    AsyncGeneratorType: "return what it yields, as a list",
    CoroutineType: "make the endpoint an async def, which is awaited",
}

#: Levels of containers; the pickler checks deeper ones.
_DEPTH = 20


def dump_result(value: Any, endpoint: str, kind: str) -> tuple[bytes, Scan]:
    """Return the skeleton of a result, and the scan of its tensors.

    :param kind: ``"cpu"`` or ``"cuda"``, the required type of device of its tensors.
    :raises CapabilityError: for a result that cannot be shared, naming the attribute path; see the module.
    """
    where = f"endpoint {endpoint!r}"
    advice = _RUNNING.get(type(value))
    if advice is not None:
        raise CapabilityError(f"{where} returned a {type(value).__name__}, which runs in this process only: {advice}")
    scan = Scan(kind, PickledBuffers())
    try:
        skeleton = dump(value, scan, f"{where}: result")
        if not scan.found:
            raise CapabilityError(
                f"{where} returned a value of type {_name(value)} without a tensor or module: only memory is shared. "
                f"Convert arrays (torch.from_numpy), and return other values beside a tensor, or by other means"
            )
        outside = graph_outside(value, scan, "result") if scan.graph else None
        if outside is not None:
            path, function = outside
            raise CapabilityError(
                f"{where}: {path} carries an autograd graph ({function}), which cannot leave the process: "
                f"return {path}.detach(), or compute under torch.no_grad()"
            )
        return skeleton, scan
    finally:
        # A retained error of the value's own code may keep this frame.
        del value, scan


class _Found(msgspec.Struct):
    """Bytes of distinct storages, by address, and the addresses of those used by parameters."""

    storages: dict[int, int] = msgspec.field(default_factory=dict)
    of_parameters: set[int] = msgspec.field(default_factory=set)


def check_result(value: Any, endpoint: str, kind: str, tensors: Tensors = "all") -> int:
    """Refuse the same values as :func:`dump_result`, for a value that stays in this process.

    Tensors, modules and containers of them are inspected without pickling: the other attributes of a module are not checked.

    :param tensors: which of its tensors would be shared.
    :returns: the bytes that would be shared, of the distinct storages of its tensors, parameters and buffers, and of arrays.
    :raises CapabilityError: see :func:`dump_result`.
    """
    if value is None:
        return 0
    found, arrays = _Found(), 0
    try:
        plain = _is_plain(value, kind, found, set(), 0)
    except RecursionError:  # nested modules; pickling reports the place
        plain = False
    if not plain or not found.storages:
        _, scan = dump_result(value, endpoint, kind)
        found.storages = {storage._cdata: storage.nbytes() for storage in scan.storages if storage._cdata not in scan.repacked}
        found.of_parameters = {scan.storages[number]._cdata for number in storages_of_parameters(scan)}
        arrays = scan.buffers.nbytes if scan.buffers is not None else 0
    shared = found.of_parameters if tensors == "parameters" else found.storages.keys()
    return arrays + sum(nbytes for address, nbytes in found.storages.items() if address in shared)


def _is_plain(value: Any, kind: str, found: _Found, seen: set[int], depth: int) -> bool:
    """Return True if a value needs no check by the pickler. Its storages are added to ``found``.

    :param seen: the ids of containers that were, or are being, inspected.
    """
    if isinstance(value, torch.Tensor):
        return value.grad_fn is None and _add((value,), kind, found)
    if isinstance(value, torch.jit.ScriptModule):
        return False
    if isinstance(value, torch.nn.Module):
        return _add(value.parameters(), kind, found) and _add(value.buffers(), kind, found)
    if isinstance(value, _SCALARS):
        return True
    if type(value) not in _CONTAINERS or depth >= _DEPTH:
        return False
    if id(value) in seen:
        return True
    seen.add(id(value))
    items = value
    if isinstance(value, dict):
        if not all(isinstance(key, _SCALARS) for key in value):
            return False
        items = value.values()
    return all(_is_plain(item, kind, found, seen, depth + 1) for item in items)


def _add(tensors: Iterable[torch.Tensor], kind: str, found: _Found) -> bool:
    for tensor in tensors:
        if (
            type(tensor) not in _TENSORS
            or tensor.device.type != kind
            or tensor.layout is not torch.strided
            or reason_against(tensor) is not None
        ):
            return False
        storage = tensor.untyped_storage()
        found.storages[storage._cdata] = storage.nbytes()
        if type(tensor) is torch.nn.Parameter:
            found.of_parameters.add(storage._cdata)
    return True


def _name(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
