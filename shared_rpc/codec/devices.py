"""Rule for the device that memory must be on to be shared."""

from __future__ import annotations

import torch

from shared_rpc.codec.hosted import host_tensors
from shared_rpc.errors import CapabilityError

__all__ = ["check_devices", "wrong_device"]


def check_devices(value: torch.Tensor | torch.nn.Module, path: str, kind: str) -> None:
    """Refuse memory that is not on the kind of device a server shares, in a tensor or in a module's state.

    What computes on the host by design may stay there.
    """
    if isinstance(value, torch.Tensor):
        if value.device.type != kind:
            raise CapabilityError(wrong_device(path, value.device, kind))
        return
    try:
        hosted = {id(tensor) for module in value.modules() for tensor in host_tensors(module)}
        state = (*value.named_parameters(), *value.named_buffers())
    except RecursionError:
        raise CapabilityError(
            f"{path} is nested deeper than its modules can be walked (RecursionError): make it flat"
        ) from None
    for name, tensor in state:
        if id(tensor) not in hosted:
            check_devices(tensor, f"{path}.{name}", kind)


def wrong_device(path: str, device: torch.device, kind: str) -> str:
    """Return the text for memory that is not on the kind of device a server shares."""
    if device.type == "meta":
        return f"{path} is on the meta device, which has no memory: load the weights before it is shared"
    return (
        f"{path} is on {device}, and memory is shared on {kind!r} here: move it with .to({kind!r}), or choose another device "
        f"for the Provider (a tensor in a plain attribute does not follow module.to(); register it as a buffer)"
    )
