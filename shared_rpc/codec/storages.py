"""Storages over mapped memory, and how :mod:`torch.multiprocessing` sends them: as the segment that they lie in.

torch pickles a tensor for a queue, a pipe or the arguments of a process by moving the sender's own storage to a file in
/dev/shm. A storage over a mapping goes as the segment's descriptor instead: the sender's stays where it is, and the receiver
maps the same memory with the same access. Everything else is left to whatever pickled it before, chunks of pools included: a
result that was copied for one caller is that caller's own, and torch may move it.

The receiver has a mapping, and no lease. As with torch's own descriptors, a sender must live until its message was received.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from multiprocessing import context, resource_sharer
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any, cast

import msgspec
import torch
import torch.multiprocessing  # registers torch's own reducers, which the reducers here precede
from torch.multiprocessing import reductions

from shared_rpc.codec.recurrent import keep_in_place
from shared_rpc.errors import CapabilityError, HandleSuspended
from shared_rpc.forks import fork_safe_lock
from shared_rpc.memory.devices import torch_device
from shared_rpc.memory.mapping import KEPT_SHARE, MAPPINGS, Mapping, MappingHold
from shared_rpc.memory.segments import Backend, Segment
from shared_rpc.protocol.records import SegmentInfo

#: The most descriptors that a new child inherits: a fork server takes fewer than 256, with torch's own. The child fetches the
#: others from its parent.
_INHERITED = 128

#: Bytes that one thread copies as fast as several.
_SMALL = 1 << 20

#: Storages by their place in a mapping, so that one storage stays one in the receiver, whichever messages it comes in.
_storages: weakref.WeakValueDictionary[tuple[Mapping, int, int], torch.UntypedStorage] = weakref.WeakValueDictionary()
_lock = fork_safe_lock()


def bytes_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Return ``nbytes`` bytes of memory as a uint8 tensor that owns nothing."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))


def make_storage(mapping: Mapping, offset: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """Return a storage over mapped bytes, which is to keep the mapping: see :meth:`MappingTable.keep_for`."""
    return cast("torch.UntypedStorage", torch._C._construct_storage_from_data_pointer(mapping.address + offset, device, nbytes))


def whole_tensor(mapping: Mapping, nbytes: int) -> torch.Tensor:
    """Return the first bytes of a mapping as a flat uint8 tensor, which keeps the mapping."""
    storage = make_storage(mapping, 0, nbytes, torch_device(mapping.info.device))
    MAPPINGS.keep_for([(mapping, storage)])
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (nbytes,), (1,))


def copy_bytes(backend: Backend, target: int, source: int, nbytes: int, device: torch.device) -> None:
    """Copy bytes between two addresses of a device, on its current stream."""
    if device.type == "cuda" or nbytes <= _SMALL:
        backend.copy(target, source, nbytes, current_stream(device))
        return
    with torch.inference_mode(False), torch.no_grad():
        bytes_at(target, nbytes, device).copy_(bytes_at(source, nbytes, device))


def view_storage(whole: torch.UntypedStorage, offset: int, nbytes: int) -> torch.UntypedStorage:
    """Return a storage over a part of another one, which it keeps."""
    part = torch._C._construct_storage_from_data_pointer(whole.data_ptr() + offset, whole.device, nbytes)
    part.__dict__["_shared_rpc_whole"] = whole
    return cast("torch.UntypedStorage", part)


def current_stream(device: torch.device) -> int:
    """Return the handle of a device's current stream, 0 for the host."""
    return int(torch._C._cuda_getCurrentRawStream(device.index)) if device.type == "cuda" else 0


def _find(storage: torch.UntypedStorage) -> tuple[Mapping, int] | None:
    """Return the mapping that a storage lies in, and the offset in it."""
    if storage.device.type not in ("cpu", "cuda"):
        return None
    try:
        address, nbytes = storage.data_ptr(), storage.nbytes()
    except RuntimeError:
        return None  # a storage without memory, as those of fake and functional tensors
    found = MAPPINGS.find(address) if nbytes else None
    return found if found is not None and found[1] + nbytes <= found[0].info.nbytes else None


def _shared(storage: torch.UntypedStorage) -> tuple[Mapping, int] | None:
    """Find a storage's mapping, except a pool's, whose bytes are reused: no other process may learn of them."""
    found = _find(storage)
    return found if found is not None and not found[0].pooled else None


# Sending. Pickle calls a type's reducer once for each object in a message. Storages refer to one common mapping, which sends
# its descriptor once.


def _reduce_storage(before: Callable[[Any], Any], storage: torch.UntypedStorage) -> Any:
    found = _shared(storage)
    if found is None:
        return before(storage)
    mapping, offset = found
    nbytes = storage.nbytes()
    with _lock:
        _storages.setdefault((mapping, offset, nbytes), storage)
    return _rebuild_storage, (mapping, offset, nbytes)


def _reduce_tensor(before: Callable[[Any], Any], tensor: torch.Tensor) -> Any:
    # For a GPU, torch's reducer of tensors does not call that of storages. Sparse and nested tensors come here in parts.
    if not tensor.is_cuda or tensor.layout is not torch.strided or tensor.is_nested:
        return before(tensor)
    found = _find(tensor.untyped_storage())
    if found is None or (tensor.requires_grad and not tensor.is_leaf):  # torch's reducer refuses it
        return before(tensor)
    if found[0].pooled:
        raise CapabilityError(
            f"a tensor of {tensor.nbytes} bytes on {tensor.device} is the result of an uncached call, whose memory is reused "
            f"when it is released: send tensor.clone(), or let the endpoint's result be cached or managed"
        )
    torch.utils.hooks.warn_if_has_hooks(tensor)
    metadata = (tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.requires_grad)
    return reductions.rebuild_tensor, (type(tensor), tensor._typed_storage(), metadata)


def _reduce_mapping(mapping: Mapping) -> Any:
    if mapping.descriptor is None:
        raise CapabilityError(
            f"cannot send shared memory to another process: pid {os.getpid()} has no descriptor of segment "
            f"{mapping.info.id} on {mapping.info.device}, because mappings keep at most 1/{KEPT_SHARE} of the process's "
            f"descriptors (ulimit -n): raise the limit, or have the other process call the endpoint"
        )
    # GPU work in the queue must be complete before another process reads.
    if not mapping.backend.synchronize():
        raise CapabilityError("a CUDA graph is being captured, and sending a tensor waits for the GPU: send it before or after")
    info = msgspec.structs.replace(mapping.info, access="read" if mapping.sealed else mapping.info.access)
    return _receive, (info, mapping.owner, _enclosed(mapping.descriptor.fileno()))


def _enclosed(fd: int) -> Any:
    """Return a message's part of a descriptor; its ``detach()`` gives the receiver one of its own."""
    # A new process inherits each descriptor once: two messages in its arguments may name the same one.
    inherited = getattr(context.get_spawning_popen(), "_fds", ())
    if fd in inherited or len(inherited) >= _INHERITED:
        return resource_sharer.DupFd(fd)
    return DupFd(fd)


# Receiving.


def _receive(info: SegmentInfo, owner: str, enclosed: Any) -> MappingHold:
    try:
        fd = enclosed.detach()
    except (OSError, EOFError) as error:
        error.add_note(f"the process that sends memory of segment {info.id} must live until the receiver has mapped it")
        raise
    with Segment.owning(info, fd) as segment:
        hold = MAPPINGS.receive(segment, owner)
    if MAPPINGS.has_unused:
        MAPPINGS.drain()  # a safe point: a process that only receives has no other one
    return hold


def _rebuild_storage(hold: MappingHold, offset: int, nbytes: int) -> torch.UntypedStorage:
    mapping = hold.mapping
    with _lock:
        storage = _storages.get((mapping, offset, nbytes))
        if storage is not None:
            # A weak reference may return a storage's object owned by tensors, which would end with them: torch's own remedy.
            storage._fix_weakref()  # type: ignore[attr-defined]
            return storage
        storage = make_storage(mapping, offset, nbytes, torch_device(mapping.info.device))
        MAPPINGS.keep_for([(mapping, storage)])
        _storages[mapping, offset, nbytes] = storage
        return storage


# torch's own names for these functions.


def _share_memory(before: Callable[..., torch.UntypedStorage], storage: torch.UntypedStorage, *args: Any) -> Any:
    return storage if _shared(storage) is not None else before(storage, *args)


def _is_shared(before: Callable[[torch.UntypedStorage], bool], storage: torch.UntypedStorage) -> bool:
    try:
        return before(storage) or _shared(storage) is not None
    except HandleSuspended:
        return True  # the question is not about the bytes


def _install() -> None:
    """Tell torch.multiprocessing, ``share_memory_()`` and ``is_shared()`` what lies in mappings.

    Storages are all of one class, and an attribute on each of ten thousand would be paid for by every attach. So the class is
    told, and asks before it does what it did; the two methods are public, and have been the same since torch 1.
    """
    pickler: Any = ForkingPickler
    by_type: dict[type, Any] = pickler._extra_reducers  # private: a dict since Python 3.3
    reduce_storage = functools.partial(_reduce_storage, by_type[torch.UntypedStorage])
    ForkingPickler.register(torch.UntypedStorage, reduce_storage)
    for kind in (torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, functools.partial(_reduce_tensor, by_type[kind]))
    ForkingPickler.register(Mapping, _reduce_mapping)
    # torch finds the functions by these names, for parts of sparse and nested tensors, and when a library registers all again.
    reductions.reduce_storage = reduce_storage
    reductions.reduce_tensor = functools.partial(_reduce_tensor, reductions.reduce_tensor)
    for name, instead in (("share_memory_", _share_memory), ("is_shared", _is_shared)):
        setattr(torch.UntypedStorage, name, _asking(instead, getattr(torch.UntypedStorage, name)))


def _asking(instead: Callable[..., Any], before: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(before)
    def method(storage: torch.UntypedStorage, *args: Any) -> Any:
        return instead(before, storage, *args)

    return method


# The reducers must be in place before the first storage over a mapping, which is made in this module.
_install()
keep_in_place()
