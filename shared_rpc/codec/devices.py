"""The rule for the device of shared memory.

A tensor on the host is refused if memory is shared on a GPU, because it was most likely forgotten there. In objects of
libraries that compute on the host by design it was not: it stays there, and is shared as host memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from shared_rpc.errors import CapabilityError

#: Classes by their modules, which are not imported for this, each with its attributes on the host; without a list, all may be.
#: The noise schedules of diffusers; the step counts of torch's optimizers (``capturable=False``); the number of models in
#: averaged weights, which stays on the host when the model moves to a device; and the lengths in a packed batch of
#: sequences, which torch accepts from the host only.
_CLASSES: dict[tuple[str, str], tuple[str, ...]] = {
    ("diffusers.schedulers.scheduling_utils", "SchedulerMixin"): (),
    ("torch.optim.optimizer", "Optimizer"): (),
    ("torch.optim.swa_utils", "AveragedModel"): ("n_averaged",),
    ("torch.nn.utils.rnn", "PackedSequence"): ("batch_sizes",),
}


def check_devices(value: torch.Tensor | torch.nn.Module, path: str, kind: str) -> None:
    """Check that the memory of a tensor, or of a module's state, is on the kind of device that the server shares.

    Tensors that belong on the host by design may stay there.
    """
    if isinstance(value, torch.Tensor):
        if value.device.type != kind:
            raise CapabilityError(wrong_device(path, value.device, kind))
        return
    try:
        hosted = {id(tensor) for module in value.modules() for tensor in host_tensors(module)}
        state = (*value.named_parameters(), *value.named_buffers())
    except RecursionError:
        raise CapabilityError(f"{path} has modules nested too deeply to visit (RecursionError): use fewer levels") from None
    for name, tensor in state:
        if id(tensor) not in hosted:
            check_devices(tensor, f"{path}.{name}", kind)


def wrong_device(path: str, device: torch.device, kind: str) -> str:
    """Return the error text for memory on the wrong kind of device."""
    if device.type == "meta":
        return f"{path} is on the meta device, which has no memory: load the weights before sharing it"
    return (
        f"{path} is on {device}, but memory is shared on {kind!r} here: move it with .to({kind!r}), or choose another device "
        f"for the Provider (a tensor in a plain attribute does not follow module.to(); register it as a buffer)"
    )


def host_tensors(obj: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that such an object keeps on the host; none for any other object."""
    for (module, name), attributes in _CLASSES.items():
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(obj, kind):
            for value in tree_leaves([getattr(obj, attribute, None) for attribute in attributes] or vars(obj)):
                if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.layout is torch.strided:
                    yield value
