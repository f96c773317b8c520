"""Pickles in which tensors in shared memory are named, for unrelated processes."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from shared_rpc.codec.reducers import reduce_storage, reduce_tensor

__all__ = ["dumps"]


class _Pickler(pickle.Pickler):
    """Pickler that names tensors and storages kept by a server."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            return reduce_tensor(value) or NotImplemented
        if type(value) is torch.UntypedStorage:
            return reduce_storage(value) or NotImplemented
        return NotImplemented


def dumps(value: Any, protocol: int | None = None) -> bytes:
    """Pickle a value; its tensors in memory kept by a server are named, and all others are pickled by value, as usual.

    ``pickle.loads()`` rebuilds it in any process of the user on this host that has the socket at the same path: the named
    tensors are the same memory there, with their own lease. Waits for GPU work queued in this process. Until the pickle is
    loaded, a process must hold each named object, or the server must cache it; a buffer can have a ``ttl`` or be kept.

    :raises CapabilityError: while a CUDA graph is being captured.
    :raises HandleSuspended: for tensors of a suspended object.
    """
    file = io.BytesIO()
    _Pickler(file, protocol).dump(value)
    return file.getvalue()
