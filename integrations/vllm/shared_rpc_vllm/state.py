"""What processing leaves outside tensors: the server records it while it processes weights, and engines are given it.

An engine whose weights are processed already has vLLM skip that. Methods of vLLM 0.32 then skip too what their kernels note
about the weights, as the width of an output before it was padded (``CutlassFP8ScaledMMLinearKernel.logical_output_size``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from shared_rpc_vllm.errors import NotShareable

#: By part and attribute, the value before the processing and after it: each in a tuple, which is empty where there is no value,
#: or one that cannot be passed to another process.
State = dict[str, dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]]]


def _parts_of(model: nn.Module) -> dict[str, Any]:
    """Return the layers that have a method, the methods, and the kernels of these, by path."""
    parts: dict[str, Any] = {}
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            path = f"{name}.quant_method".removeprefix(".")
            kernels = {at: value for at, value in vars(method).items() if hasattr(value, "process_weights_after_loading")}
            parts |= {name: layer, path: method} | {f"{path}.{at}": kernel for at, kernel in kernels.items()}
    return parts


def _plain(values: dict[str, Any], attribute: str) -> tuple[Any, ...]:
    value = values.get(attribute, values)
    return (value,) if value is None or isinstance(value, bool | int | float | str) else ()


@contextmanager
def recorded(model: nn.Module) -> Iterator[State]:
    """Record the attributes that are set in the meantime; the yielded dict has them at the end.

    Plain values count, tensors, and whatever else a method or a kernel has. Other objects of a layer are for vLLM's warm-up.
    """
    before = [(path, part, dict(vars(part))) for path, part in _parts_of(model).items()]
    state: State = {}
    yield state
    for path, part, earlier in before:
        for attribute, value in vars(part).items():
            was, now = _plain(earlier, attribute), _plain(vars(part), attribute)
            changed = was != now if now else value is not earlier.get(attribute)
            if changed and (now or isinstance(value, torch.Tensor) or not isinstance(part, nn.Module)):
                state.setdefault(path, {})[attribute] = was, now


def restore(model: nn.Module, state: State) -> None:
    """Set the recorded attributes in an engine's model, where its own processing has not set them.

    :raises NotShareable: for what cannot be passed from the server, and is not there.
    """
    parts = _parts_of(model)
    for path, attributes in state.items():
        values = vars(parts[path]) if path in parts else {}
        for attribute, (was, now) in attributes.items():
            present = _plain(values, attribute)
            if now and present == was and (present or attribute not in values):
                setattr(parts[path], attribute, now[0])
            elif not now and values.get(attribute) is None:
                raise NotShareable(
                    f"{path}.{attribute} is made while weights are processed, and vLLM makes none for weights that are "
                    f"processed already"
                )
