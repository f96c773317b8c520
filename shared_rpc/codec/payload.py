"""What an endpoint may return: the rule, in one place.

A tensor, a module, None, or nested tuples, lists and string-keyed dicts that hold at least one tensor or module
beside scalars. Everything else is refused: this is not a general RPC system.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from shared_rpc.errors import CapabilityError

__all__ = ["check_devices", "check_result", "wrong_device"]

_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype)


def check_result(value: Any, endpoint: str, kind: str) -> int:
    """Refuse a result that cannot be shared, naming the place of what is wrong with it.

    :param kind: ``"cpu"`` or ``"cuda"``, the type of device its tensors must be on.
    :returns: the bytes of the distinct storages of its tensors, parameters and buffers.
    :raises CapabilityError: see the module's rule; also for a tensor with an autograd graph, which ends at the
        process that recorded it.
    """
    where = f"endpoint {endpoint!r}"
    storages: dict[int, int] = {}
    found = value is None
    for path, leaf in _leaves(value, "result", where):
        if isinstance(leaf, torch.Tensor):
            found = True
            if leaf.grad_fn is not None:
                raise CapabilityError(
                    f"{where}: {path} carries an autograd graph ({leaf.grad_fn.name()}), which cannot leave the process: "
                    f"return {path}.detach(), or compute under torch.no_grad()"
                )
            check_devices(leaf, f"{where}: {path}", kind)
            _add(leaf, storages)
        elif isinstance(leaf, torch.nn.Module):
            found = True
            check_devices(leaf, f"{where}: {path}", kind)
            for tensor in (*leaf.parameters(), *leaf.buffers()):
                _add(tensor, storages)
        elif not isinstance(leaf, _SCALARS):
            raise CapabilityError(
                f"{where}: {path} is a {_name(leaf)}; a result is a tensor, a module, None, or tuples, lists and string-keyed "
                f"dicts of those and scalars"
            )
    if not found:
        raise CapabilityError(
            f"{where} returned a plain {_name(value)} without a tensor or a module: only memory is shared; return such values "
            f"beside a tensor, or by other means"
        )
    return sum(storages.values())


def check_devices(value: torch.Tensor | torch.nn.Module, path: str, kind: str) -> None:
    """Refuse memory that is not on the kind of device a server shares, in a tensor or in a module's state."""
    if isinstance(value, torch.Tensor):
        if value.device.type != kind:
            raise CapabilityError(wrong_device(path, value.device, kind))
        return
    for name, tensor in (*value.named_parameters(), *value.named_buffers()):
        check_devices(tensor, f"{path}.{name}", kind)


def wrong_device(path: str, device: torch.device, kind: str) -> str:
    """The text for memory that is not on the kind of device a server shares."""
    if device.type == "meta":
        return f"{path} is on the meta device, which has no memory: load the weights before it is shared"
    return (
        f"{path} is on {device}, and memory is shared on {kind!r} here: move it with .to({kind!r}), or choose another device "
        f"for the Provider (a tensor in a plain attribute does not follow module.to(); register it as a buffer)"
    )


def _add(tensor: torch.Tensor, storages: dict[int, int]) -> None:
    if tensor.layout is torch.strided and not isinstance(tensor, UninitializedTensorMixin):
        try:
            storage = tensor.untyped_storage()
        except RuntimeError:
            return  # it has no memory, and is refused when it is taken apart
        storages[storage._cdata] = storage.nbytes()


def _leaves(value: Any, path: str, where: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CapabilityError(f"{where}: {path} has the key {key!r}: the keys of a shared dict are strings")
            yield from _leaves(item, f"{path}[{key!r}]", where)
    elif isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]", where)
    else:
        yield path, value


def _name(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
