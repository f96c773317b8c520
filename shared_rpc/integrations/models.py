"""Models as a server loads them, and what of them a process makes its own."""

from __future__ import annotations

from typing import Any

from torch import nn

from shared_rpc.errors import CapabilityError
from shared_rpc.integrations.devices import LoadDevice
from shared_rpc.integrations.keys import Checkpoint

__all__ = ["CLASS_OPTIONS", "load_model", "own_missing"]

#: Attributes of classes by which checkpoints are read, and which some libraries change while they load.
CLASS_OPTIONS = ("base_model_prefix",)


def load_model(
    cls: Any, checkpoint: Checkpoint, arguments: list[Any], options: dict[str, Any], device: str, given: dict[str, Any]
) -> dict[str, Any]:
    """Load in the server: ``{"model": …, "info": …}``, of which the second says what the checkpoint did not have.

    :param device: the id of the server's.
    :param given: the :data:`CLASS_OPTIONS` of the class in the process that asks.
    :raises CheckpointChanged: if the files are not those that were asked for, before or after.
    """
    if changed := [name for name, value in given.items() if getattr(cls, name, None) != value]:
        raise CapabilityError(f"{', '.join(changed)} of {cls.__name__} was changed by the process that asks for it")
    place = LoadDevice(device)
    checkpoint.check()
    model, info = cls.from_pretrained(checkpoint.name, *arguments, **options, **place.options, output_loading_info=True)
    checkpoint.check()
    # What is shared cannot be trained: without this an optimizer's step would end its process.
    return {"model": place.move(model).requires_grad_(False), "info": info}


def own_missing(model: nn.Module, info: dict[str, Any]) -> None:
    """Make the parameters that a checkpoint does not have, or has in another shape, this process's own, and trainable."""
    missing = {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    own = {
        id(shared): nn.Parameter(shared.detach().clone(), requires_grad=shared.is_floating_point())
        for shared in (parameters[name] for name in missing & parameters.keys())
    }
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if id(parameter) in own:
                module._parameters[name] = own[id(parameter)]
