"""The rule for results of endpoints.

A result is None, or any object that reaches at least one tensor or module: the pickler decomposes it, and it is rebuilt as it
was. A result that reaches none is refused: this is not a general RPC system. So is a tensor with an autograd graph outside of
modules.
"""

from __future__ import annotations

from typing import Any

import torch

from shared_rpc.codec.blocks import storages_of_parameters
from shared_rpc.codec.buffers import PickledBuffers
from shared_rpc.codec.refusals import reason_against
from shared_rpc.codec.single import is_plain
from shared_rpc.codec.skeleton import Scan, dump, graph_outside
from shared_rpc.errors import CapabilityError
from shared_rpc.protocol.records import Tensors


def dump_result(value: Any, endpoint: str, kind: str) -> tuple[bytes, Scan]:
    """Return the skeleton of a result, and the scan of its tensors.

    :param kind: ``"cpu"`` or ``"cuda"``, the required type of device of its tensors.
    :raises CapabilityError: for a result that cannot be shared, naming the attribute path; see the module.
    """
    where = f"endpoint {endpoint!r}"
    scan = Scan(kind, PickledBuffers())
    try:
        skeleton = dump(value, scan, f"{where}: result")
        if not scan.found:
            raise CapabilityError(
                f"{where} returned a value of type {_name(value)} without a tensor or module: only memory is shared. "
                f"Convert arrays (torch.from_numpy), and return other values together with a tensor"
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


def check_result(value: Any, endpoint: str, kind: str, tensors: Tensors = "all") -> int:
    """Refuse the same values as :func:`dump_result`, for a value that stays in this process.

    :param tensors: which of its tensors would be shared.
    :returns: the bytes that would be shared, of the distinct storages of its tensors, parameters and buffers, and of arrays.
    :raises CapabilityError: see :func:`dump_result`.
    """
    if value is None:
        return 0
    if type(value) is torch.Tensor and reason_against(value) is None and is_plain(value) and value.device.type == kind:
        # The most frequent value by far: pickling takes several times as long.
        return value.untyped_storage().nbytes() if tensors == "all" else 0
    _, scan = dump_result(value, endpoint, kind)
    shared = storages_of_parameters(scan) if tensors == "parameters" else range(len(scan.storages))
    storages = [scan.storages[number] for number in shared]
    arrays = scan.buffers.nbytes if scan.buffers is not None else 0
    return arrays + sum(storage.nbytes() for storage in storages if storage._cdata not in scan.repacked)


def _name(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
