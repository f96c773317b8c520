"""What torch makes of modules: scripts, graphs, exported programs, compiled modules."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from tests.compat.cases import Case
from tests.compat.libraries.torch import layers, ramp

TITLE = "torch: graphs and programs"
REQUIRES = ()


def _quietly(make: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated with Python 3.14
        return make()


def _scripted(device: str) -> Any:
    return _quietly(lambda: torch.jit.script(layers(device)))


def _partly_scripted(device: str) -> Any:
    return nn.ModuleDict({"encoder": _scripted(device), "head": nn.Linear(8, 2, device=device)})


def _graph_module(device: str) -> Any:
    return torch.fx.symbolic_trace(layers(device))


def _exported(device: str) -> Any:
    module = layers(device)
    return torch.export.export(module, (ramp(module, device, 2, 64),))


def _exported_module(device: str) -> Any:
    return _exported(device).module()


def _compiled_module(device: str) -> Any:
    module = layers(device)
    module.compile(backend="aot_eager")
    return module


def _compiled_wrapper(device: str) -> Any:
    return torch.compile(layers(device), backend="aot_eager")


class Doubling(nn.Module):
    """A module that calls a function in an attribute."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 8, device=device)
        self.function = torch.compile(_double, backend="aot_eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Project, and double."""
        return self.function(self.layer(x))


def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _captured(device: str) -> Any:
    module = layers(device)
    module.graph = torch.cuda.CUDAGraph()
    return module


def _run(module: Any, device: str) -> Any:
    return module(ramp(module, device, 2, 64))


CASES = {
    "torch.jit.script": Case(_scripted, refused="is TorchScript"),
    "a part that is scripted": Case(_partly_scripted, refused="result.encoder is TorchScript"),
    "torch.fx.GraphModule": Case(_graph_module, _run, as_pickled=True),
    "ExportedProgram": Case(_exported, refused="is an exported program"),
    "ExportedProgram.module()": Case(_exported_module, refused="belongs to an exported program"),
    "module.compile()": Case(
        _compiled_module, _run, as_pickled=True, note="comes uncompiled: compile it where it is used, as after pickle"
    ),
    # Below these is what the compiler remembers of its runs.
    "torch.compile(module)": Case(
        _compiled_wrapper,
        _run,
        as_pickled=True,
        ignored=r"\.(dynamo_ctx|forward)\.",
        note="each process compiles it when it is first called",
    ),
    "a compiled function": Case(
        Doubling, _run, ignored=r"\.function\b", note="each process compiles it when it is first called"
    ),
    "a CUDA graph in an attribute": Case(_captured, refused="is a CUDA graph", devices=("cuda",)),
}
