"""State outside tensors that the processing of weights creates: recorded in the server, and restored in engines.

vLLM skips the processing in an engine whose weights are processed already. Methods of vLLM 0.32 then also skip values that
their kernels derive, such as the width of an output before padding (``CutlassFP8ScaledMMLinearKernel.logical_output_size``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from shared_rpc_vllm import NotShareable

#: By part and attribute, the value before and after the processing, each in a tuple, which is empty without a value or if the
#: value cannot be passed to another process.
State = dict[str, dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]]]


def _parts_of(model: nn.Module) -> dict[str, Any]:
    """Return the layers with a method, their methods, and the kernels of these, by path."""
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
    """Record attributes that the block sets, in the yielded dict at its end.

    These are plain values, tensors, and any objects of methods and kernels. Other objects of a layer are for vLLM's warm-up.
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
    """Set the recorded attributes in an engine's model, unless its own processing has set them.

    :raises NotShareable: for a missing attribute that could not be passed from the server.
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
