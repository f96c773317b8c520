"""Skeletons: pickles in which tensors and storages are references into a table.

Plain strided tensors and parameters become one table entry each. All other objects with storages (subclasses, sparse,
quantised) are decomposed by torch's own reduction, and only their storages become entries.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Iterable
from typing import Any

import cloudpickle
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from shared_rpc.codec import by_value
from shared_rpc.codec.buffers import PickledBuffers
from shared_rpc.codec.by_value import reduce_remote_class
from shared_rpc.codec.devices import host_tensors, wrong_device
from shared_rpc.codec.modules import (
    next_hook,
    raise_next_hook,
    reduce_compiled,
    reduce_handle,
    reduce_module,
    reduce_parameter,
)
from shared_rpc.codec.paths import locate
from shared_rpc.codec.refusals import PickleRefused, reason_against, refuse_kind
from shared_rpc.codec.tensors import named
from shared_rpc.errors import CapabilityError
from shared_rpc.memory.devices import device_id, torch_device
from shared_rpc.protocol.records import TensorEntry

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_TENSOR_LIKE = (torch.Tensor, torch.UntypedStorage, torch.TypedStorage)


def dump_exception(error: Exception) -> bytes:
    """Pickle an exception, its class as code if a client could not import it, or only by running a script again."""
    with by_value.registered():
        return bytes(cloudpickle.dumps(error))


class Scan:
    """Tensors found by pickling so far, and their distinct storages.

    Several dumps may use one scan, so that common parts are shared once.

    :param kind: the required type of device of every tensor, ``"cpu"`` or ``"cuda"``.
    :param buffers: collects memory without tensors; None to pickle it.
    """

    def __init__(self, kind: str, buffers: PickledBuffers | None = None) -> None:
        self.kind = kind
        self.buffers = buffers
        #: True if a module was found; and True if a tensor with an autograd graph was found.
        self.module = False
        self.graph = False
        #: Storages, by address, for which each process makes its own memory, such as those of packed weights.
        self.repacked: set[int] = set()
        #: Storages that belong on the host by design, although memory is shared on a GPU.
        self.hosted: set[int] = set()
        self.storages: list[torch.UntypedStorage] = []
        self.entries: list[TensorEntry] = []
        #: Plain tensors, each one an entry.
        self.plain: list[torch.Tensor] = []
        #: Strided tensors, plain or not, with the number of their storage.
        self.strided: list[tuple[torch.Tensor, int]] = []
        #: Tensors that only torch can rebuild (sparse, quantised), each with its skeleton.
        self.composite: list[tuple[torch.Tensor, bytes]] = []
        #: Numbers of storages with references other than plain tensors.
        self.whole: set[int] = set()
        #: A number above the ids of all hooks of the visited modules.
        self.next_hook = 0
        self._storage_numbers: dict[int, int] = {}
        self._tensor_numbers: dict[int, int] = {}
        self._met: dict[int, torch.Tensor] = {}

    @property
    def found(self) -> bool:
        """True if there was a tensor, a module, or memory of torch's."""
        return bool(self.module or self.storages or self._met)

    @property
    def odd(self) -> Iterable[torch.Tensor]:
        """All tensors other than plain ones, see :meth:`tensor`."""
        return self._met.values()

    def number_of(self, storage: torch.UntypedStorage) -> int | None:
        """Return the number of a storage, None if pickling has not found it."""
        return self._storage_numbers.get(storage._cdata)

    def storage(self, storage: torch.UntypedStorage, *, whole: bool = True) -> int:
        """Return the number of a storage, a new one for a new storage."""
        number = self._storage_numbers.get(storage._cdata)
        if number is None:
            self._check_device(storage, storage.nbytes())
            number = self._storage_numbers[storage._cdata] = len(self.storages)
            self.storages.append(storage)
        if whole:
            self.whole.add(number)
        return number

    def tensor(self, tensor: torch.Tensor) -> int | None:
        """Return the table number of a plain tensor, None if torch must decompose it."""
        number = self._tensor_numbers.get(id(tensor))
        if number is not None:
            return number
        reason = reason_against(tensor)
        if reason is not None:
            raise PickleRefused(reason, tensor)
        self._check_device(tensor, tensor.numel())
        self.graph = self.graph or tensor.grad_fn is not None
        plain = type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_quantized and not named(tensor)
        if not plain or tensor.__dict__:
            self._meet(tensor)
            return None
        number = self._tensor_numbers[id(tensor)] = len(self.entries)
        storage = self.storage(tensor.untyped_storage(), whole=False)
        self.entries.append(
            TensorEntry(
                storage=storage,
                dtype=str(tensor.dtype).removeprefix("torch."),
                offset=int(tensor.storage_offset()),
                shape=tuple(tensor.shape),
                strides=tuple(tensor.stride()),
                parameter=type(tensor) is torch.nn.Parameter,
                # A computed tensor is shared as a value: its graph stays here.
                requires_grad=tensor.requires_grad and tensor.is_leaf,
                conj=tensor.is_conj(),
                neg=tensor.is_neg(),
            )
        )
        self.plain.append(tensor)
        self.strided.append((tensor, storage))
        return number

    def _meet(self, tensor: torch.Tensor) -> None:
        if id(tensor) in self._met:
            return
        self._met[id(tensor)] = tensor
        if wraps(tensor):
            return  # the pickler visits its inner tensors
        if tensor.layout is torch.strided and not tensor.is_quantized:
            self.strided.append((tensor, self.storage(tensor.untyped_storage())))
        else:
            buffer = io.BytesIO()
            _Pickler(buffer, self, opened=tensor).dump(tensor)
            self.composite.append((tensor, buffer.getvalue()))

    def _check_device(self, memory: torch.Tensor | torch.UntypedStorage, size: int) -> None:
        if memory.device.type == self.kind:
            return
        storage = memory.untyped_storage() if isinstance(memory, torch.Tensor) and memory.layout is torch.strided else memory
        hosted = isinstance(storage, torch.UntypedStorage) and storage._cdata in self.hosted
        # An empty tensor has no memory to share; a jagged tensor on a GPU keeps row lengths as shapes of empty host tensors.
        if memory.device.type != "cpu" or not (size == 0 or hosted):
            raise PickleRefused(wrong_device("", memory.device, self.kind).lstrip())

    def fresh(self) -> Scan:
        """Return an empty scan, for a part of the same value."""
        scan = Scan(self.kind, PickledBuffers())
        scan.hosted = self.hosted
        return scan


def wraps(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is of a subclass that keeps its memory in other tensors, which are among its attributes."""
    kind = type(tensor)
    if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return False
    # The address of a wrapper is 0, as for torch's own reduction; a wrapper that queries its class may have any address.
    return torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor) or tensor.data_ptr() == 0


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, scan: Scan, opened: torch.Tensor | None = None) -> None:
        take = scan.buffers.accept if scan.buffers is not None and opened is None else None
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=take)
        self._scan = scan
        self._opened = opened

    def persistent_id(self, obj: Any) -> Any:
        """Return a reference into the table for an object with memory; None leaves the object to pickle."""
        if not isinstance(obj, _TENSOR_LIKE) or obj is self._opened:
            return None
        if isinstance(obj, torch.Tensor):
            return self._scan.tensor(obj)
        if isinstance(obj, torch.UntypedStorage):
            return (self._scan.storage(obj), None)
        return (self._scan.storage(obj._untyped_storage), obj.dtype)

    def reducer_override(self, obj: Any) -> Any:
        """Reduce by this module's rules, then by cloudpickle's."""
        if self._scan.kind != "cpu":
            self._scan.hosted.update(tensor.untyped_storage()._cdata for tensor in host_tensors(obj))
        refuse_kind(obj)
        if isinstance(obj, torch.ScriptObject):
            return self._reduce_packed(obj)
        if isinstance(obj, torch.device):
            # An index means another GPU in a process with another CUDA_VISIBLE_DEVICES.
            return (torch_device, (device_id(str(obj)),)) if obj.index is not None and obj.type == "cuda" else NotImplemented
        if isinstance(obj, torch.Generator):
            return _make_generator, (obj.device, bytes(obj.get_state().tolist()))
        if type(obj) is torch.Tensor and obj.layout is torch.sparse_coo:
            # torch's own reduction keeps rebuilt tensors in a list for torch.load to validate: they would never be freed.
            return _make_coo, (obj._indices(), obj._values(), tuple(obj.shape), obj.is_coalesced())
        if isinstance(obj, torch.nn.Module):
            self._scan.module = True
            self._scan.next_hook = max(self._scan.next_hook, next_hook(obj))
            return reduce_module(obj)
        if issubclass(type(obj), torch.nn.Parameter) and not wraps(obj):
            return reduce_parameter(obj)
        if type(obj) is RemovableHandle:
            return reduce_handle(obj)
        reduced = super().reducer_override(obj)
        if type(obj) is types.FunctionType and reduced is not NotImplemented:
            return reduce_compiled(obj) or reduced
        if isinstance(obj, type) and reduced is not NotImplemented:
            return reduce_remote_class(obj, reduced)
        return reduced

    def _reduce_packed(self, packed: Any) -> Any:
        # TorchBind's own reduction, recorded for weights of torch.ao.nn.quantized: unpacked they are new tensors each time, and
        # packing makes memory in the layout of the processor's library, which cannot be shared.
        reduced = packed.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        for tensor in tree_leaves(reduced[2]):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                if tensor.device.type == "cpu" != self._scan.kind:
                    raise PickleRefused(
                        f"is packed for the CPU by the processor's library, but memory is shared on {self._scan.kind!r} here: "
                        f"choose device='cpu' for the Provider, or share the module before it is quantised",
                        packed,
                    )
                self._scan.repacked.update(part.untyped_storage()._cdata for part in parts_of(tensor))
        return reduced


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return a tensor, and its quantisation parameters if they are tensors."""
    if tensor.is_quantized and tensor.qscheme() in (torch.per_channel_affine, torch.per_channel_affine_float_qparams):
        return tensor, tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return (tensor,)


def _make_generator(device: torch.device, state: bytes) -> torch.Generator:
    # torch's own reduction has the state as a tensor, always on the host: memory that must not be shared.
    generator = torch.Generator(device)
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return generator


def _make_coo(indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], coalesced: bool) -> torch.Tensor:
    # The operator itself: the public function of torch 2.11 reads the setting of invariant checks, and warns the first time,
    # even if the argument is given. The checks are for makers of a sparse tensor; here an existing one is rebuilt.
    rebuilt: torch.Tensor = torch.ops.aten._sparse_coo_tensor_unsafe(indices, values, shape, is_coalesced=coalesced)
    return rebuilt


#: The pickle of a plain tensor: one reference (INT, BINPERSID, STOP). Pickling takes ten times as long.
_REFERENCE = b"I%d\nQ."


_TOO_DEEP = (
    "is nested deeper than pickle can follow (RecursionError; the limit is sys.getrecursionlimit()), or contains itself in a "
    "way that pickle cannot write: keep its parts in a flat list"
)


def _unpicklable(error: Exception) -> str:
    words = str(error).rstrip(".") or type(error).__name__
    return f"cannot be pickled: {words}; make it in each process, or leave it out in a __getstate__() of its owner"


def dump(value: Any, scan: Scan, path: str) -> bytes:
    """Return the skeleton of ``value``; its tensors are added to ``scan``.

    :param path: the name of the value in an error, ``"result"`` or ``"argument 'x'"``.
    :raises CapabilityError: if a part of it cannot be shared, naming the attribute path of that part.
    """
    try:
        if type(value) is torch.Tensor:
            number = scan.tensor(value)
            if number is not None:
                return _REFERENCE % number
        with by_value.registered():
            skeleton = _dump(value, scan)
    except Exception as error:
        with by_value.registered():
            fresh = scan.fresh
            where, cause = locate(value, path, lambda part: _dump(part, fresh()), error)
            del fresh
        if isinstance(cause, RecursionError):
            raise CapabilityError(f"{where} {_TOO_DEEP}") from None
        raise CapabilityError(f"{where} {cause if isinstance(cause, PickleRefused) else _unpicklable(cause)}") from error
    else:
        above = max(scan.next_hook, RemovableHandle.next_id)
        return _HOOKS_BELOW % above + skeleton if above else skeleton
    finally:
        # A retained error of the value's own code may keep this frame.
        del value, scan


#: The beginning of a skeleton: a reference to :func:`raise_next_hook`, before anything else is rebuilt (MARK, INT, TUPLE,
#: BINPERSID, POP). The counter is above the ids of all hooks registered in the process that made the skeleton, in modules,
#: optimisers or the user's objects; and above those of the visited modules, which another process may have registered.
_HOOKS_BELOW = b"(I%d\ntQ0"


class _GraphFound(PickleRefused):
    pass


class _Outside(_Pickler):
    """Pickler of objects outside modules, which stops at a tensor with an autograd graph."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.nn.Module):
            return -1
        if isinstance(obj, torch.Tensor) and obj.grad_fn is not None:
            raise _GraphFound(obj.grad_fn.name(), obj)
        return super().persistent_id(obj)


def graph_outside(value: Any, scan: Scan, path: str) -> tuple[str, str] | None:
    """Find a tensor with an autograd graph outside of modules; return its path, and the operation that computed it, or None.

    :param scan: the objects found by pickling the value.
    """

    def attempt(part: Any) -> None:
        try:
            _Outside(io.BytesIO(), scan.fresh()).dump(part)
        except Exception as error:
            # The value itself can be pickled, but perhaps not a part that its owner leaves out.
            if part is value or isinstance(error, _GraphFound):
                raise

    with by_value.registered():
        try:
            attempt(value)
        except _GraphFound as error:
            where, cause = locate(value, path, attempt, error)
            return where, str(cause)
    return None


def _dump(value: Any, scan: Scan) -> bytes:
    buffer = io.BytesIO()
    try:
        # Not cloudpickle's own method, whose frame would refer to the value; that method only rewords a RecursionError.
        pickle.Pickler.dump(_Pickler(buffer, scan), value)
    finally:
        del value, scan
    return buffer.getvalue()


def load(
    skeleton: bytes,
    tensors: list[torch.Tensor],
    storages: list[torch.UntypedStorage],
    buffers: Iterable[memoryview] = (),
) -> Any:
    """Rebuild a value from its skeleton, around existing tensors and storages, and buffers."""
    unpickler = _Unpickler(io.BytesIO(skeleton), buffers=buffers)
    unpickler.tensors, unpickler.storages = tensors, storages
    try:
        return unpickler.load()
    finally:
        # The unpickler refers to all rebuilt objects.
        del unpickler


class _Unpickler(pickle.Unpickler):
    # Without an __init__, which torch.compile cannot trace if the call is compiled (torch 2.13).
    tensors: list[torch.Tensor]
    storages: list[torch.UntypedStorage]

    def persistent_load(self, pid: Any) -> Any:
        """Return the tensor or storage of a reference; None for the first one, see :data:`_HOOKS_BELOW`."""
        if type(pid) is int:
            return self.tensors[pid]
        if len(pid) == 1:
            return raise_next_hook(pid[0])
        number, dtype = pid
        storage = self.storages[number]
        if dtype is None:
            return storage
        return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
