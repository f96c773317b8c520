"""torch's own modules, what people do to them, and optimizers."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import nn

from tests.compat.cases import Case
from tests.kit.comparing import strided_tensors

TITLE = "torch: modules"
REQUIRES = ("numpy",)


def ramp(module: nn.Module, device: str, *shape: int) -> torch.Tensor:
    """Something to give a module: numbers from -1 to 1, in its dtype."""
    size = torch.Size(shape).numel()
    return torch.linspace(-1, 1, size, device=device).reshape(shape).to(next(module.parameters()).dtype)


def _transformer(device: str) -> Any:
    return nn.Transformer(16, 2, 1, 1, 32, batch_first=True, device=device).eval()


def _lstm(device: str) -> Any:
    return nn.LSTM(8, 16, num_layers=2, batch_first=True, bidirectional=True).to(device).eval()


def _parametrized(device: str) -> Any:
    first = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    second = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))
    return nn.Sequential(first, second, nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))).to(device).eval()


def _pruned(device: str) -> Any:
    from torch.nn.utils import prune

    # Made on the device: the pruned weight is a plain attribute, which does not follow .to().
    layer = nn.Linear(8, 8, device=device)
    prune.l1_unstructured(layer, "weight", amount=0.5)
    return nn.Sequential(layer, nn.ReLU()).eval()


def _attention(device: str) -> Any:
    return nn.MultiheadAttention(16, 2, batch_first=True, device=device).eval()


def _run_attention(module: Any, device: str) -> Any:
    x = ramp(module, device, 2, 3, 16)
    return module(x, x, x)


def _batch_norm(device: str) -> Any:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)).to(device)


def _channels_last(device: str) -> Any:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)).to(device, memory_format=torch.channels_last).eval()


def layers(device: str) -> Any:
    """Two linear layers."""
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).to(device).eval()


def _averaged(device: str) -> Any:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    return AveragedModel(nn.Linear(8, 8).to(device), multi_avg_fn=get_ema_multi_avg_fn(0.9)).eval()


class WithArrays(nn.Module):
    """A module with weights and numpy arrays."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, device=device)
        self.mean = numpy.linspace(0, 1, 4, dtype=numpy.float32)
        self.table = numpy.asfortranarray(numpy.arange(12.0).reshape(3, 4))
        self.names = numpy.array(["a", "bb"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Centre and project."""
        return self.layer(x - torch.from_numpy(self.mean).to(x))


def _optimizer(kind: str) -> Any:
    def build(device: str) -> Any:
        module = layers(device)
        optimizer = getattr(torch.optim, kind)(module.parameters(), lr=0.01)
        module(ramp(module, device, 2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return {"model": module, "optimizer": optimizer}

    return build


def _step(attached: Any, own: Any, device: str) -> None:
    """A step of the optimizer that came along changes the weights that came along, as one's own does."""
    # The optimizer's own are shared as well.
    before = [(tensor, tensor.detach().clone()) for _, tensor in strided_tensors(attached) if tensor.dtype is torch.float32]
    for both in (attached, own):
        both["model"](ramp(both["model"], device, 2, 64)).square().sum().backward()
        both["optimizer"].step()
        both["optimizer"].zero_grad(set_to_none=True)
    try:
        for one, other in zip(attached["model"].parameters(), own["model"].parameters(), strict=True):
            assert torch.equal(one, other)
        assert not all(torch.equal(*pair) for pair in before)
    finally:
        for tensor, old in before:
            tensor.data.copy_(old)


def _lazy(device: str) -> Any:
    return nn.Sequential(nn.LazyLinear(4, device=device))


def _generator(device: str) -> Any:
    module = layers(device)
    module.generator = torch.Generator().manual_seed(3)
    return module


def _data_parallel(device: str) -> Any:
    return nn.DataParallel(layers(device))


def _on_meta(device: str) -> Any:
    return nn.Sequential(nn.Linear(4, 4, device=device), nn.Linear(4, 4, device="meta"))


class Keeping(nn.Module):
    """A module with weights and other state."""

    def __init__(self, device: str, kept: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, device=device)
        self.kept = kept


def _large_array(device: str) -> Any:
    return Keeping(device, numpy.linspace(0, 1, 1 << 12))


def alone() -> torch.distributed.device_mesh.DeviceMesh:
    """Make a mesh of this process alone. It is of the host: what needs one is refused for its class, wherever it is."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return torch.distributed.device_mesh.init_device_mesh("cpu", (1,))


def _data_parallel_of_processes(device: str) -> Any:
    alone()
    return nn.parallel.DistributedDataParallel(nn.Linear(4, 4))


def _fully_sharded(device: str) -> Any:
    from torch.distributed.fsdp import fully_shard

    return nn.Sequential(fully_shard(nn.Linear(4, 4), mesh=alone()))


#: What a module computed of its parameters, and keeps until the next call recomputes it, is shared as a value: autograd's
#: graph stays where it was recorded. So it wants no gradient; all else of it is compared.
_VALUE = r"\((requires_grad|is_leaf)\)$"
_COMPUTED = rf"\['0'\]\.weight {_VALUE}"
CASES = {
    "Sequential": Case(layers, lambda m, d: m(ramp(m, d, 2, 64)), compiled=("aot_eager", "inductor")),
    "Transformer": Case(_transformer, lambda m, d: m(ramp(m, d, 2, 3, 16), ramp(m, d, 2, 3, 16))),
    "LSTM": Case(_lstm, lambda m, d: m(ramp(m, d, 2, 3, 8))[0]),
    "parametrizations": Case(_parametrized, lambda m, d: m(ramp(m, d, 2, 8))),
    "pruned": Case(_pruned, lambda m, d: m(ramp(m, d, 2, 8)), ignored=_COMPUTED),
    "MultiheadAttention": Case(_attention, _run_attention),
    "BatchNorm, training": Case(_batch_norm),
    "channels_last": Case(_channels_last, lambda m, d: m(ramp(m, d, 2, 3, 4, 4))),
    "AveragedModel": Case(_averaged, lambda m, d: m(ramp(m, d, 2, 8))),
    "numpy in attributes": Case(WithArrays, lambda m, d: m(ramp(m, d, 2, 4))),
    "a large numpy array in an attribute": Case(_large_array),
    "model and Adam": Case(_optimizer("AdamW"), as_pickled=True, besides={"a step": _step}),
    "model and SGD": Case(_optimizer("SGD"), as_pickled=True, besides={"a step": _step}),
    "generator in an attribute": Case(_generator, lambda m, d: m(ramp(m, d, 2, 64))),
    "DataParallel": Case(_data_parallel, lambda m, d: m.module(ramp(m, d, 2, 64))),
    "DistributedDataParallel": Case(_data_parallel_of_processes, refused="belongs to its process group"),
    "FSDP, fully_shard": Case(_fully_sharded, refused="is sharded by FSDP"),
    "lazy": Case(_lazy, refused="lazy parameter"),
    "on the meta device": Case(_on_meta, refused="is on the meta device"),
}
