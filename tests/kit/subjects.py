"""Values of kinds that other programs share, each with a use that shows whether it works.

Importable by every process of a test: values made by one are attached and compared by another.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.kit.comparing import differences
from tests.kit.models import Everything, Marked, Scaled


class Subject(NamedTuple):
    """A kind of value.

    :param make: makes one on a device.
    :param use: returns a tensor that depends on all of it, given the value and the device; None if it is only compared.
    :param copies: True if torch itself can copy and pickle it in the process that made it.
    :param on: the kinds of device that support such values.
    :param ignored: see :func:`tests.kit.comparing.differences`: what each process compiles.
    """

    make: Callable[[str], Any]
    use: Callable[[Any, str], torch.Tensor] | None = None
    copies: bool = True
    on: tuple[str, ...] = ("cpu", "cuda")
    ignored: str | None = None

    def differences(self, value: Any, device: str) -> list[str]:
        """Return where a value differs from one of this process, which is as torch's own pickling leaves it."""
        with quietly():
            own = self.make(device)
            return differences(pickle.loads(pickle.dumps(own)) if self.copies else own, value, self.ignored)


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress torch's warnings about deprecated and new features."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _forward(*shape: int) -> Callable[[Any, str], torch.Tensor]:
    """Call a module with numbers of that shape, and return the first tensor of the result."""

    def use(module: Any, device: str) -> torch.Tensor:
        data = torch.linspace(-1, 1, torch.Size(shape).numel(), device=device).reshape(shape)
        with torch.no_grad():
            result = module(data)
        return result[0] if isinstance(result, tuple) else result

    return use


def _linear(device: str) -> nn.Linear:
    layer = nn.Linear(4, 4, device=device)
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            parameter.copy_(torch.linspace(-1, 1 + number, parameter.numel(), device=device).view_as(parameter))
    return layer


def _holding(device: str, **attributes: Any) -> nn.Module:
    module = _linear(device)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


# Hooks.


def doubled(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    """A forward hook."""
    return output * 2


def one_more(module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> torch.Tensor:
    """A forward hook that takes keyword arguments."""
    return output + 1


def same_state(module: nn.Module, *args: Any) -> None:
    """A hook of any kind, which does nothing."""


def _hooked(device: str) -> nn.Module:
    layer = _linear(device)
    layer.handles = [
        layer.register_forward_hook(doubled),
        layer.register_forward_hook(one_more, with_kwargs=True, always_call=True),
        layer.register_forward_hook(doubled, prepend=True),
        layer.register_forward_pre_hook(same_state),
        layer.register_full_backward_hook(same_state),
        layer.register_full_backward_pre_hook(same_state),
        layer.register_state_dict_post_hook(same_state),
        layer.register_state_dict_pre_hook(same_state),
        layer.register_load_state_dict_pre_hook(same_state),
        layer.register_load_state_dict_post_hook(same_state),
    ]
    return layer


def _traced_and_hooked(device: str) -> nn.Module:
    graph = torch.fx.symbolic_trace(nn.Sequential(_linear(device), nn.ReLU()))
    graph.register_forward_hook(one_more, with_kwargs=True)
    graph.get_submodule("0").register_forward_hook(doubled)
    return graph.eval()


# Compiled.


def plus_one(x: torch.Tensor) -> torch.Tensor:
    """A function to compile."""
    return x + 1


def _compiled(device: str) -> nn.Module:
    model = nn.Sequential(_linear(device), _linear(device)).eval()
    model.compile(backend="eager")
    model[1].compile(backend="eager")
    _forward(2, 4)(model, device)
    return model


def _holding_compiled_functions(device: str) -> nn.Module:
    bias = torch.ones(1, device=device)
    module = _holding(device)
    module.plus_one = torch.compile(plus_one, backend="eager")
    module.biased = torch.compile(lambda x: x + bias, backend="eager", dynamic=True)
    module.method = torch.compile(module.forward, backend="eager")
    module.eager = torch.compiler.disable(lambda x: x * 2)
    _use_compiled_functions(module, device)
    return module


def _use_compiled_functions(module: Any, device: str) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = module.eager(module.biased(module.plus_one(module.method(torch.ones(2, 4, device=device)))))
    return result


# Modules.


class Slotted(nn.Linear):
    """A module with slots, one of which holds a tensor."""

    __slots__ = ("__secret", "scale", "unset")

    def __init__(self, device: str) -> None:
        super().__init__(4, 4, bias=False, device=device)
        nn.init.constant_(self.weight, 0.5)
        self.scale = torch.full((1,), 3.0, device=device)
        self.__secret = "kept"

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, scaled."""
        return super().forward(data) * self.scale * len(self.__secret)


class Delegating(nn.Module):
    """A module that delegates missing attributes to another one, without further checks."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.inner = _linear(device)
        self.gain = nn.Parameter(torch.ones(4, 4, device=device))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        """Return the inner layer's output, with a weight of its own."""
        return self.inner(data) @ self.gain * self.in_features


def _weight_normed(device: str) -> nn.Module:
    torch.manual_seed(0)
    module = nn.LSTM(4, 4, 2, device=device)
    for name in ("weight_hh_l0", "weight_ih_l1"):
        parametrizations.weight_norm(module, name)
    # It caches its last result, and computes it again when it is used, or pickled.
    _forward(2, 3, 4)(module, device)
    return module.eval()


# Tensors.


def _noted(device: str) -> nn.Module:
    layer = _linear(device)
    layer.frozen = nn.Parameter(torch.ones(1, device=device), requires_grad=False)
    layer.weight.note = {"sharded": False}
    layer.box = torch.ones(2, device=device).as_subclass(Marked)
    layer.box.label = "box"
    return layer


def _jagged(device: str) -> nn.Module:
    rows = [torch.ones(2, device=device), torch.ones(3, device=device)]
    with quietly():
        return _holding(device, rows=torch.nested.nested_tensor(rows, layout=torch.jagged))


def _stepped(device: str) -> nn.Module:
    """Return a model with the optimiser that trains it."""
    model = _linear(device)
    optimiser = torch.optim.Adam(model.parameters())
    _forward(2, 4)(model, device)
    model(torch.ones(1, 4, device=device)).sum().backward()
    optimiser.step()
    model.zero_grad()
    holder = nn.Module()
    holder.model, holder.optimiser = model, optimiser
    return holder


def _converted(device: str) -> nn.Module:
    """Quantise with torch.ao, which packs the weights of several kinds of layers."""
    quantization = torch.ao.quantization
    torch.manual_seed(0)
    with quietly():
        layers = (nn.Conv2d(2, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
        model = nn.Sequential(quantization.QuantStub(), *layers, quantization.DeQuantStub()).eval()
        model.qconfig = quantization.get_default_qconfig(torch.backends.quantized.engine)
        prepared = quantization.prepare(quantization.fuse_modules(model, [["1", "2"]]))
        _forward(1, 2, 2, 2)(prepared, device)
        return quantization.convert(prepared)


SUBJECTS: dict[str, Subject] = {
    "hooked": Subject(_hooked, _forward(2, 4)),
    "traced": Subject(_traced_and_hooked, _forward(2, 4), copies=False),
    "compiled in place": Subject(_compiled, _forward(2, 4)),
    "compiled": Subject(
        lambda device: torch.compile(_linear(device), backend="eager"), _forward(2, 4), ignored=r"\.(dynamo_ctx|forward)\."
    ),
    "compiled functions": Subject(
        _holding_compiled_functions, _use_compiled_functions, copies=False, ignored=r"\.(plus_one|biased|method|eager)\b"
    ),
    "weight_norm of an LSTM": Subject(_weight_normed, _forward(2, 3, 4), copies=False),
    "slots": Subject(Slotted, _forward(2, 4), copies=False),
    "weight_norm of slots": Subject(lambda device: parametrizations.weight_norm(Slotted(device)), _forward(2, 4), copies=False),
    "delegating": Subject(Delegating, _forward(2, 4)),
    "everything": Subject(Everything),
    "noted": Subject(_noted, _forward(2, 4), copies=False),
    "jagged tensor": Subject(_jagged, lambda value, device: value.rows.values()),
    "scaled tensor": Subject(
        lambda device: _holding(device, scaled=Scaled(torch.arange(3, device=device), torch.tensor(0.5, device=device))),
        lambda value, device: value.scaled + 1,
        copies=False,
    ),
    "quantised": Subject(_converted, _forward(1, 2, 2, 2), copies=False, on=("cpu",)),
    "optimiser": Subject(_stepped, lambda value, device: value.optimiser.state[value.model.weight]["exp_avg"]),
}
