"""Rules for devices: a shared model is entirely on its server's device."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn

from shared_rpc.integrations.keys import Unshareable
from shared_rpc.memory.devices import torch_device

#: Device maps computed by a library, which have a single choice if there is one device.
_MADE = ("auto", "balanced", "balanced_low_0", "sequential")


def check_device_map(device_map: Any, device: str) -> None:
    """Check that all of a model is requested on the server's device.

    This is so without a device map and a default device: a later move to that device does nothing.

    :param device: the id of the server's device.
    :raises Unshareable: if not.
    """
    here = torch_device(device)
    if device_map is None:
        default = torch.get_default_device()
        wanted: set[torch.device | str] = {default} if default.type != "cpu" else set()
    elif isinstance(device_map, dict):
        wanted = {_device(value) for value in device_map.values()}
    elif device_map in _MADE:
        count = torch.cuda.device_count()
        wanted = {torch.device("cuda", index) for index in range(count)} if count else {torch.device("cpu")}
    else:
        wanted = {_device(device_map)}
    if wanted and wanted != {here}:
        raise Unshareable(
            f"device_map={device_map!r:.200}: that is {', '.join(sorted(map(str, wanted)))}, and what is shared lies on {here}"
        )


def _device(value: Any) -> torch.device | str:
    try:
        device = torch.device("cuda", value) if isinstance(value, int) else torch.device(value)
    except RuntimeError:
        return str(value)  # "disk"
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    return torch.device(device.type, index) if index is not None and device.type != "cpu" else torch.device(device.type)


class LoadDevice:
    """The device to which a server loads."""

    def __init__(self, device: str) -> None:
        self._device = torch_device(device)
        direct = self._device.type != "cpu" and importlib.util.find_spec("accelerate") is not None
        #: Options by which ``from_pretrained`` loads weights there directly.
        self.options: dict[str, Any] = {"device_map": {"": self._device}} if direct else {}

    def move(self, model: nn.Module) -> nn.Module:
        """Move the tensors that are not on the device yet."""
        tensors = [*model.parameters(), *model.buffers()]
        return model if all(tensor.device == self._device for tensor in tensors) else model.to(self._device)
