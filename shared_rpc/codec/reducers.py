"""Tensors that another process gets from the server: they are pickled by name, as plain data.

The pickle of a tensor in memory kept by a server names the server's socket, the object, and the place in its memory. The
receiver gets the memory from the server, with its own lease, which lasts as long as a tensor over it. So the sender may have
ended, and only bytes pass between the two processes: no descriptor, no ptrace(2), no common pid or ipc namespace.

torch's two functions that reduce tensors and storages check here first, for any caller: the pickler of :mod:`multiprocessing`
for queues, pipes and the arguments of processes, or a program that sends the result of ``reduce_tensor()`` by its own channel.
Other tensors use torch's method, including results in pools: they are their caller's own.
"""

from __future__ import annotations

import functools
import importlib
import os
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch.multiprocessing import reductions

from shared_rpc.codec.modes import without_modes
from shared_rpc.codec.recurrent import keep_in_place
from shared_rpc.errors import CapabilityError, HandleSuspended
from shared_rpc.forks import fork_safe_lock
from shared_rpc.memory.devices import torch_device
from shared_rpc.memory.mapping import MAPPINGS, Mapping


class StorageName(NamedTuple):
    """The place of a storage: ``nbytes`` bytes at ``offset`` of a segment of a server's object.

    ``object_id`` is ``""`` if only the server has it.
    """

    socket_path: str
    object_id: str
    segment: str
    offset: int
    nbytes: int


#: Storages by name, so that the receiver has one storage for all messages with it.
_storages: weakref.WeakValueDictionary[tuple[Any, ...], torch.UntypedStorage] = weakref.WeakValueDictionary()
_lock = fork_safe_lock()


def make_storage(mapping: Mapping, offset: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """Return a storage over mapped bytes, which must keep the mapping: see :meth:`MappingTable.keep_for`.

    :raises CodecError: if they are not within the segment.
    """
    address = mapping.address_of(offset, nbytes)
    return cast("torch.UntypedStorage", torch._C._construct_storage_from_data_pointer(address, device, nbytes))


def _find(storage: torch.UntypedStorage) -> tuple[Mapping, int] | None:
    """Return the mapping of a storage, and the offset in it."""
    if storage.device.type not in ("cpu", "cuda"):
        return None
    try:
        address, nbytes = storage.data_ptr(), storage.nbytes()
    except RuntimeError:
        return None  # a storage without memory, such as those of fake and functional tensors
    found = MAPPINGS.find(address) if nbytes else None
    return found if found is not None and found[1] + nbytes <= found[0].info.nbytes else None


# Sending.


def name_of(storage: torch.UntypedStorage) -> StorageName | None:
    """Return the name of a storage, None if no server keeps its memory. Work queued on it is complete then.

    :raises CapabilityError: if it is unknown which server does, or while a CUDA graph is being captured.
    :raises HandleSuspended: if its object is suspended.
    """
    found = _find(storage)
    if found is None or found[0].pooled:
        return None
    mapping, offset = found
    path = _server_of(mapping)
    if path is None:
        return None
    if not mapping.backend.synchronize():
        raise CapabilityError("a CUDA graph is being captured, and sending a tensor waits for the GPU: send it before or after")
    name = StorageName(path, MAPPINGS.object_of(storage), mapping.info.name, offset, storage.nbytes())
    with _lock:
        _storages.setdefault(name[1:], storage)
    return name


def _server_of(mapping: Mapping) -> str | None:
    """Return the socket of the server that keeps a mapping's memory."""
    if mapping.owner:
        return MAPPINGS.servers.get(mapping.owner)
    homes = tuple(MAPPINGS.homes) if mapping.made and not mapping.fresh else ()
    if len(homes) < 2:
        return homes[0] if homes else None
    raise CapabilityError(
        f"cannot send shared memory to another process: pid {os.getpid()} serves {len(homes)} sockets, and does not know "
        f"which of them keeps {mapping}: have the other process call the endpoint"
    )


def reduce_tensor(tensor: torch.Tensor) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]] | None:
    """Return the function and the arguments that rebuild a tensor in any process; None if no server keeps its memory.

    Argument number 6 is this process's number of the GPU, or ``"cpu"``. Programs replace it by their own number, and the
    receiver ignores it: it identifies the GPU by its UUID.

    :raises CapabilityError: while a CUDA graph is being captured.
    """
    # Sparse and nested tensors arrive here in parts. torch's reducer refuses tensors within an autograd graph.
    if tensor.layout is not torch.strided or tensor.is_nested or (tensor.requires_grad and not tensor.is_leaf):
        return None
    name = name_of(tensor.untyped_storage())
    if name is None:
        return None
    torch.utils.hooks.warn_if_has_hooks(tensor)
    kind = torch.nn.Parameter if isinstance(tensor, torch.nn.Parameter) else torch.Tensor
    device = tensor.device.index if tensor.is_cuda else "cpu"
    place = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
    return rebuild_tensor, (kind, *place, tensor.requires_grad, device, tensor.is_conj(), tensor.is_neg(), *name)


def reduce_storage(storage: torch.UntypedStorage) -> tuple[Callable[..., torch.UntypedStorage], tuple[Any, ...]] | None:
    """Return the function and the arguments that rebuild a storage, see :func:`reduce_tensor`."""
    name = name_of(storage)
    return (rebuild_storage, tuple(name)) if name is not None else None


# Receiving. Pickles name these functions: allow-lists of receivers must include this module.


@without_modes
def rebuild_tensor(
    kind: type[torch.Tensor],
    size: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    dtype: torch.dtype,
    requires_grad: bool,
    device: int | str,
    conj: bool,
    neg: bool,
    *name: Any,
) -> torch.Tensor:
    """Return a tensor over memory from its server.

    :param device: used only for a tensor without bytes; otherwise the memory determines it.
    :param name: a :class:`StorageName`; nothing for a tensor without bytes.
    :raises StaleHandleError: if the server no longer owns the object.
    :raises ConnectError: if there is no server at the socket.
    """
    storage = rebuild_storage(*name) if name else torch.UntypedStorage(0, device=device)
    tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)
    tensor = tensor.conj() if conj else tensor
    tensor = torch._neg_view(tensor) if neg else tensor
    if issubclass(kind, torch.nn.Parameter):
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def rebuild_storage(socket_path: str, object_id: str, segment: str, offset: int, nbytes: int) -> torch.UntypedStorage:
    """Return a storage over memory from its server: the same one for each of its names."""
    key = (object_id, segment, offset, nbytes)
    storage = _known(key)
    if storage is not None:
        return storage
    # By name: the client is in a layer above this one.
    hold, handle = importlib.import_module("shared_rpc.operations.tensors").taken_from(socket_path, object_id, segment)
    mapping: Mapping = hold.mapping
    with _lock:
        storage = _known(key)
        if storage is None:
            storage = make_storage(mapping, offset, nbytes, torch_device(mapping.info.device))
            MAPPINGS.keep_for([(mapping, storage)], handle.object_id)
            storage.__dict__["_shared_rpc_lease"] = handle
            _storages[key] = storage
    if MAPPINGS.has_unused:
        MAPPINGS.drain()  # a safe point: a process that only receives has no other one
    return storage


def _known(key: tuple[Any, ...]) -> torch.UntypedStorage | None:
    with _lock:
        storage = _storages.get(key)
        if storage is not None:
            # A weak reference may return a storage's object owned by tensors, which would end with them: torch's own remedy.
            storage._fix_weakref()  # type: ignore[attr-defined]
        return storage


# torch's functions.


#: The original code of torch's functions.
_torchs: dict[str, Callable[[Any], Any]] = {}


def tensor_reduced(tensor: torch.Tensor) -> Any:
    """Return the result of torch's patched ``reduce_tensor()``.

    :raises CapabilityError: for memory of a GPU that no other process can have.
    """
    reduced = reduce_tensor(tensor)
    plain = tensor.layout is torch.strided and (tensor.is_leaf or not tensor.requires_grad)
    if reduced is None and plain and tensor.is_cuda and _find(tensor.untyped_storage()) is not None:
        raise CapabilityError(
            f"a tensor of {tensor.nbytes} bytes on {tensor.device} lies in memory that no server keeps: it is the result of an "
            f"uncached call, whose memory is reused when it is released, or its server has ended. Send tensor.clone(), or let "
            f"the endpoint's result be cached or managed"
        )
    return reduced or _torchs["reduce_tensor"](tensor)


def storage_reduced(storage: torch.UntypedStorage) -> Any:
    """Return the result of torch's patched ``reduce_storage()``."""
    return reduce_storage(storage) or _torchs["reduce_storage"](storage)


# Their code becomes that of torch's functions, and uses the names of torch's module.


def _tensor(tensor: Any) -> Any:
    from shared_rpc.codec.reducers import tensor_reduced

    return tensor_reduced(tensor)


def _storage(storage: Any) -> Any:
    from shared_rpc.codec.reducers import storage_reduced

    return storage_reduced(storage)


def _replace_code(name: str, instead: Callable[[Any], Any]) -> None:
    """Replace the code of one of torch's functions; the function object stays the same.

    Programs import it by its name before this module is loaded, and the pickler of multiprocessing has it in its table.
    """
    function: types.FunctionType = getattr(reductions, name)
    _torchs[name] = types.FunctionType(function.__code__, function.__globals__, name, function.__defaults__)
    function.__code__ = cast("types.FunctionType", instead).__code__


def _is_kept(storage: torch.UntypedStorage) -> bool:
    """Return True if other processes have a storage's memory, except that of a pool, whose bytes are reused."""
    found = _find(storage)
    return found is not None and not found[0].pooled


def _install() -> None:
    """Make torch's reducers, ``share_memory_()`` and ``is_shared()`` aware of mapped memory.

    Storages are all of one class, and an attribute on each of ten thousand would slow every attach. So the class is
    patched: the two methods are public, and unchanged since torch 1.
    """
    _replace_code("reduce_tensor", _tensor)
    _replace_code("reduce_storage", _storage)
    storage: Any = torch.UntypedStorage
    share_memory, is_shared = storage.share_memory_, storage.is_shared

    @functools.wraps(share_memory)
    def share_memory_(self: torch.UntypedStorage, *args: Any) -> torch.UntypedStorage:
        return self if _is_kept(self) else share_memory(self, *args)

    @functools.wraps(is_shared)
    def is_shared_or_kept(self: torch.UntypedStorage) -> bool:
        try:
            return is_shared(self) or _is_kept(self)
        except HandleSuspended:
            return True  # the question is not about the bytes

    storage.share_memory_, storage.is_shared = share_memory_, is_shared_or_kept


# All must be in place before the first storage over a mapping, which is made in this module.
_install()
keep_in_place()
