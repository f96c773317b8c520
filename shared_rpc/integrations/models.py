"""Requests for models, and the parts of an attached model that each process owns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from shared_rpc.errors import CapabilityError
from shared_rpc.integrations.devices import LoadDevice, check_device_map
from shared_rpc.integrations.keys import Checkpoint, Unshareable, source_of
from shared_rpc.memory.devices import torch_device

#: Class attributes that determine how checkpoints are read, and which some libraries change while they load.
CLASS_OPTIONS = ("base_model_prefix",)
#: Options of every ``from_pretrained`` about the access to files and memory rather than their content.
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "token", "revision", "subfolder")
MEMORY_OPTIONS = ("disable_mmap", "low_cpu_mem_usage", "max_memory", "offload_state_dict")


class PretrainedCall(NamedTuple):
    """A call of ``from_pretrained`` that a server can execute, with the options common to all libraries."""

    name: Any
    arguments: list[Any]
    checkpoint: Checkpoint
    options: dict[str, Any]
    device_map: Any
    wants_info: bool


def call_of(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: str, refused: Mapping[str, str]) -> PretrainedCall:
    """Parse the arguments of ``from_pretrained``.

    :param refused: options that make a model specific to one process, and why.
    :raises Unshareable: if the result cannot be shared.
    """
    name, *arguments = args if args else (kwargs.pop("pretrained_model_name_or_path", None),)
    for option, reason in refused.items():
        if kwargs.get(option) not in (None, False):
            raise Unshareable(f"{option}={kwargs[option]!r:.200}: {reason}")
    if cls.__module__ == "__main__":
        raise Unshareable(f"its class is of the script, and the server has no such module: put {cls.__name__} into a file")
    device_map = kwargs.pop("device_map", None)
    check_device_map(device_map, device)
    options = {option: value for option, value in kwargs.items() if value is not None}
    wants_info = options.pop("output_loading_info", False)
    checkpoint = source_of(name, options, "config.json")
    if not checkpoint.is_local:
        options["revision"] = checkpoint.content
    return PretrainedCall(name, arguments, checkpoint, options, device_map, wants_info)


class ModelRequest(NamedTuple):
    """A call of ``from_pretrained`` for the server, which computes its key again.

    :param key_of: a function of the library's module, which returns the key of a build and the versions of libraries.
    :param device: the id of the server's device.
    :param given: the :data:`CLASS_OPTIONS` of the class in the requesting process.
    """

    key_of: Callable[[ModelRequest, dict[str, str]], str]
    cls: Any
    checkpoint: Checkpoint
    arguments: list[Any]
    options: dict[str, Any]
    device: str
    given: dict[str, Any]

    def key(self, versions: dict[str, str]) -> str:
        """Return the key, a text that is equal for equal results."""
        return self.key_of(self, versions)

    def __call__(self) -> dict[str, Any]:
        """Load in the server; return ``{"model": …, "info": …}``, where ``info`` lists weights missing in the checkpoint.

        :raises CheckpointChanged: if the files are not the requested ones, before or after.
        """
        cls = self.cls
        if changed := [name for name, value in self.given.items() if getattr(cls, name, None) != value]:
            raise CapabilityError(f"{', '.join(changed)} of {cls.__name__} was changed by the requesting process")
        place = LoadDevice(self.device)
        self.checkpoint.check()
        options = {**self.options, **place.options, "output_loading_info": True}
        model, info = cls.from_pretrained(self.checkpoint.name, *self.arguments, **options)
        self.checkpoint.check()
        # Shared weights cannot be trained: without this an optimizer's step would end its process.
        return {"model": place.move(model).requires_grad_(False), "info": info}


def own_model(parts: dict[str, Any], device_map: Any, device: str) -> tuple[Any, dict[str, Any]]:
    """Return the model of a :class:`ModelRequest` for use in this process, and the report on its checkpoint.

    Parameters missing in the checkpoint, or with another shape there, belong to this process only and can be trained.

    :param device_map: the one given in this process. The server may have used another one for itself.
    """
    model, info = parts["model"], parts["info"]
    vars(model).pop("hf_device_map", None)
    if device_map is not None:
        model.hf_device_map = {"": torch_device(device)}
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
    return model, info
