"""Reasons for which some objects cannot be shared, and the remedies. Pickle's own reasons are not listed here."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn.parameter import is_lazy


class PickleRefused(TypeError):
    """A refusal inside the pickler; the attribute path is added later. ``subject`` is refused whatever it contains."""

    def __init__(self, reason: str, subject: object = None) -> None:
        super().__init__(reason)
        self.subject = subject


_FILE = "is an open file of this process: keep its path, and open the file where it is read"
_SCRIPT = (
    "is TorchScript, which has no Python skeleton: share the original module or function, or keep the path of a file made by "
    "torch.jit.save()"
)
_EXPORTED = "belongs to an exported program: share the original module"
_OPERATOR = "is an operator of torch: keep its name, and look it up in torch.ops in each process"
_FSDP = "is sharded by FSDP, and belongs to its process group: share the module before it is sharded"
_TRACED = "is a functional tensor, which exists only during tracing: share the original tensor"
_ELSEWHERE = "belongs to this process: make one in each process"

#: Reasons by names of classes, or of the modules that define them, so that no module is imported. They apply to subclasses.
_KINDS = {
    # cloudpickle would read a file or view, and clients would get a copy of its contents.
    "_io.TextIOWrapper": _FILE,
    "_io.BufferedReader": _FILE,
    "_io.BufferedWriter": _FILE,
    "_io.BufferedRandom": _FILE,
    "_io.FileIO": _FILE,
    "tempfile._TemporaryFileWrapper": _FILE,
    "tempfile.SpooledTemporaryFile": _FILE,
    "builtins.memoryview": "is a memoryview, which clients would get as a copy: keep bytes, or a tensor (torch.frombuffer)",
    "mmap.mmap": "is a mapping of this process: keep a tensor over it (torch.frombuffer), which is shared",
    "_socket.socket": "is a socket of this process: keep its address, and connect in each process",
    "sqlite3.Connection": "is a connection of this process: keep its address or path, and connect in each process",
    "torch.utils.mkldnn": "was converted by torch.utils.mkldnn, whose layout cannot be shared: share the module "
    "before the conversion",
    "torch.jit._script.ScriptModule": _SCRIPT,
    "torch.jit.torch.jit.ScriptFunction": _SCRIPT,
    "torch.export.exported_program.ExportedProgram": "is an exported program: share the original module, or keep the "
    "path of a file made by torch.export.save()",
    "torch.export._unlift.GuardsFn": _EXPORTED,
    "torch.export.unflatten": _EXPORTED,
    "torch._ops.OpOverload": _OPERATOR,
    "torch._ops.OpOverloadPacket": _OPERATOR,
    "torch.nn.parallel.distributed.DistributedDataParallel": "belongs to its process group: share its .module",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": _FSDP,
    "torch.distributed.fsdp.FSDPModule": _FSDP,
    "torch.distributed.tensor.DTensor": "is a DTensor, which belongs to its process group: share its local shard, "
    "tensor.to_local()",
    "torch._subclasses.fake_tensor.FakeTensor": "is a fake tensor, which has no memory: make it outside FakeTensorMode",
    "torch._subclasses.functional_tensor.FunctionalTensor": _TRACED,
    "torch.distributed.distributed_c10d.ProcessGroup": "is a process group of this process: make one in each process",
    "torch.Stream": f"is a stream, which {_ELSEWHERE}",
    "torch.Event": f"is an event, which {_ELSEWHERE}",
    "torch.cuda.streams.Stream": f"is a CUDA stream, which {_ELSEWHERE}",
    "torch.cuda.streams.Event": f"is a CUDA event, which {_ELSEWHERE}",
    "torch.cuda.graphs.CUDAGraph": f"is a CUDA graph, which {_ELSEWHERE}",
}


def refuse_kind(value: Any) -> None:
    """Refuse an object of a class that cannot be shared.

    :raises PickleRefused: with the reason.
    """
    reason = _of_kind(type(value))
    if reason is not None and value is not sys.stdout and value is not sys.stderr:
        raise PickleRefused(reason, value)


def _of_kind(kind: type) -> str | None:
    for base in kind.__mro__:
        reason = _KINDS.get(f"{base.__module__}.{base.__qualname__}") or _KINDS.get(base.__module__)
        if reason is not None:
            return reason
    return None


#: Without compressed sparse tensors: torch cannot bind one to other memory in place.
_LAYOUTS = {torch.strided, torch.sparse_coo, torch.jagged}


def reason_against(tensor: torch.Tensor) -> str | None:
    """Return the reason why a tensor cannot be shared; None if it can."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        if is_lazy(tensor):
            return "is a lazy parameter without a shape: run the module once before sharing it"
        reason = _of_kind(type(tensor))
        if reason is not None:
            return reason
    if torch._is_functional_tensor(tensor):
        return _TRACED
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "belongs to a transform of torch.func: share the result of the transform"
    if tensor.layout not in _LAYOUTS:
        instead = "tensor.to_dense()" if tensor.is_mkldnn else "tensor.to_sparse_coo() or tensor.to_dense()"
        return f"has the layout {tensor.layout}, which cannot be bound to shared memory: share {instead}"
    if tensor.is_nested and tensor.layout is torch.strided:
        return "is a nested tensor of the strided layout: use layout=torch.jagged, or share its rows"
    return None
