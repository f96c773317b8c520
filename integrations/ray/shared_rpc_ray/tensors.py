"""Tensors that a process keeps in its host's server for other processes of the host.

A :class:`TensorClient` keeps a list of tensors: tensors in memory of the server are referred to by name, and the others are
copied once, into one buffer. The result is a *held list*: one object of the server, which outlives its maker by :data:`LINGER`,
and the names of the tensors, from which any process rebuilds them over the same memory: see :mod:`shared_rpc.codec.reducers`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from shared_rpc.client.starting import ServerStarter
from shared_rpc.client.steps import Operation, Request
from shared_rpc.codec.modes import without_modes
from shared_rpc.codec.reducers import StorageName
from shared_rpc.errors import CapabilityError, SegmentNotFound, SharedRPCError
from shared_rpc.forks import fork_safe_lock
from shared_rpc.lifecycle.finalizer import FINALIZER
from shared_rpc.memory.layout import aligned
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.operations.binding import Leased, Steps, bound, take_result
from shared_rpc.operations.client import Client
from shared_rpc.operations.handles import Handle, lending
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.options import ServeOptions
from shared_rpc.protocol.records import SegmentInfo

__all__ = ["LINGER", "HeldTensors", "TensorClient", "client_of", "let_go"]

_log = logging.getLogger("shared_rpc_ray")

#: Seconds for which a held list stays available after its last holder, such as a killed maker, has ended.
LINGER = 300.0
#: Seconds without use after which a server started here exits.
_IDLE_EXIT = 3600.0
#: Alignment in bytes; a multiple of all element sizes.
_GRAIN = 16
#: A tensor whose elements are spread over more than this multiple of their bytes is made contiguous first.
_SPARSE = 2


@dataclass
class HeldTensors:
    """A held list: the handle of its object, None if no tensor has bytes, and the arguments of ``rebuild_tensor()``."""

    client: TensorClient
    handle: Handle[Any] | None
    names: list[tuple[Any, ...]]


@bound
class TensorClient(Client):
    """A client that keeps tensors of its process in the server, and starts a server if none listens.

    :param device: of the tensors; it selects the server of the base path, as for every client.
    """

    def __init__(self, device: str) -> None:
        super().__init__(device=device, connect_timeout=30.0)
        # By name, because the server's workers import it.
        options = ServeOptions(devices=(device,), idle_exit=_IDLE_EXIT)
        self._summon = ServerStarter(lambda: "shared_rpc.provider.empty:provider", options)

    @lending
    def keep_segments(ctx: Any, segment_ids: Sequence[str], linger: float) -> Steps[Leased[list[torch.Tensor]]]:
        """Create an object of existing segments of the server; the handle's value is a list with a flat tensor of each.

        :param segment_ids: of server memory that this process has mapped.
        :param linger: seconds for which :meth:`get_buffer` finds the object after its last holder has ended.
        :raises SegmentNotFound: if the server no longer has one of them.
        """
        handle: Leased[list[torch.Tensor]] = yield from _kept(ctx, segment_ids, linger)
        return handle

    @without_modes
    def hold(self, tensors: Sequence[torch.Tensor]) -> HeldTensors:
        """Keep a list of tensors in the server. Tensors in its memory are referred to, the others are copied once.

        Copied tensors keep their strides, and those of one storage share memory again, unless their elements are spread over
        much more memory than they occupy. All work of this process on the device is complete when this returns.

        :raises CapabilityError: for a tensor that is not strided, carries an autograd graph, or is on another device.
        """
        _check(tensors)
        if tensors and tensors[0].is_cuda:
            torch.cuda.synchronize(tensors[0].device)
        try:
            return self._hold(tensors, named=True)
        except SegmentNotFound:
            # The server has restarted, or has dropped memory that is still mapped here.
            return self._hold(tensors, named=False)

    def _hold(self, tensors: Sequence[torch.Tensor], *, named: bool) -> HeldTensors:
        server_id = self.ping_server() if named else ""
        spans = _Spans()
        places = [_place(tensor, spans, server_id) for tensor in tensors]
        copied: Handle[torch.Tensor] | None = None
        nbytes = spans.packed()
        if nbytes:
            copied = self.create_buffer(nbytes, device=str(tensors[0].device))
            target = copied.value
            with torch.no_grad():
                for span in spans.all():
                    target[span.offset : span.offset + span.nbytes].copy_(span.bytes())
            if target.is_cuda:
                torch.cuda.synchronize(target.device)
            found = MAPPINGS.find(target.data_ptr())
            assert found is not None, "a buffer is mapped"
            places = [place.copied_to(found[0].info) for place in places]
        try:
            segments = list(dict.fromkeys(place.segment.id for place in places if place.segment is not None))
            handle = self.keep_segments(segments, LINGER) if segments else None
            object_id = handle.object_id if handle is not None else ""
            names = [place.name(tensor, self.socket_path, object_id) for tensor, place in zip(tensors, places, strict=True)]
            return HeldTensors(self, handle, names)
        finally:
            if copied is not None:
                copied.release()

    def ping_server(self) -> str:
        """Connect to the server, and return its id."""
        self.ping()
        return str(self._run(self._reached()).server_id)


def _kept(ctx: Any, segment_ids: Sequence[str], linger: float) -> Operation[Any]:
    what = f"keep_segments({', '.join(segment_ids)[:200]})"
    return (yield from take_result(ctx, what, (yield Request(m.KeepSegments(list(segment_ids), linger), what))))


_clients: dict[str, TensorClient] = {}
_lock = fork_safe_lock()


def client_of(device: str) -> TensorClient:
    """Return this process's client of a device's server."""
    with _lock:
        if device not in _clients:
            _clients[device] = TensorClient(device)
        return _clients[device]


def let_go(held: HeldTensors) -> None:
    """Unlist a held list and release this process's lease, in the background; other holders keep it. Thread-safe."""
    handle, held.handle = held.handle, None
    if handle is not None:
        FINALIZER.submit(functools.partial(_freed, handle, held.client))


def _freed(handle: Handle[Any], client: TensorClient) -> None:
    try:
        client.free_buffer(handle)
    except SharedRPCError as error:  # without its server there is nothing left to free
        _log.info("could not free object %s at %s: %s", handle.object_id, client.socket_path, error)
    finally:
        handle.release()


def _check(tensors: Sequence[torch.Tensor]) -> None:
    for number, tensor in enumerate(tensors):
        what = f"tensor {number} of {len(tensors)} ({tensor.dtype}, shape {tuple(tensor.shape)}, on {tensor.device})"
        if tensor.device.type not in ("cpu", "cuda"):
            raise CapabilityError(f"{what} is on no device whose memory is shared: use tensors on the host or on an NVIDIA GPU")
        if tensor.device != tensors[0].device:
            raise CapabilityError(
                f"{what} is on another device than the first, which is on {tensors[0].device}: send tensors of one device "
                f"at a time"
            )
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            raise CapabilityError(f"{what} is not a plain strided tensor: send its parts, or a dense tensor")
        if tensor.grad_fn is not None:
            raise CapabilityError(
                f"{what} carries an autograd graph ({tensor.grad_fn.name()}), which cannot leave the process: send "
                f"tensor.detach(), or compute under torch.no_grad()"
            )


class _Span:
    """A range of bytes of one storage to copy, and its offset in the copy."""

    def __init__(self, storage: torch.UntypedStorage, start: int, end: int) -> None:
        self.storage, self.start, self.end, self.offset = storage, start, end, 0

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.end - self.start

    def bytes(self) -> torch.Tensor:
        flat = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return flat.set_(self.storage, self.start, (self.nbytes,), (1,))


class _Spans:
    """The range of each storage to copy, from the first to the last byte used by a tensor."""

    def __init__(self) -> None:
        self._by_storage: dict[int, _Span] = {}

    def add(self, storage: torch.UntypedStorage, start: int, end: int) -> _Span:
        start -= start % _GRAIN
        span = self._by_storage.setdefault(storage._cdata, _Span(storage, start, end))
        span.start, span.end = min(span.start, start), max(span.end, end)
        return span

    def packed(self) -> int:
        """Assign offsets to all spans; return the total number of bytes."""
        end = 0
        for span in self._by_storage.values():
            span.offset = end
            end += aligned(span.nbytes)
        return end

    def all(self) -> Iterable[_Span]:
        return self._by_storage.values()


class _Place(NamedTuple):
    """The place of a tensor's first element: an offset in a segment of the server, or in a span to copy."""

    tensor: torch.Tensor
    segment: SegmentInfo | None
    offset: int
    span: _Span | None

    def copied_to(self, segment: SegmentInfo) -> _Place:
        """Return the place in the segment of the copy."""
        if self.span is None:
            return self
        return self._replace(segment=segment, offset=self.span.offset + self.offset - self.span.start)

    def name(self, original: torch.Tensor, socket_path: str, object_id: str) -> tuple[Any, ...]:
        """Return the arguments of ``rebuild_tensor()``. Tensors of a segment share one storage over all of it."""
        kind = torch.nn.Parameter if isinstance(original, torch.nn.Parameter) else torch.Tensor
        tensor, segment = self.tensor, self.segment
        view = (tuple(tensor.shape), tensor.stride(), self.offset // tensor.dtype.itemsize, tensor.dtype)
        storage = StorageName(socket_path, object_id, segment.name, 0, segment.nbytes) if segment is not None else ()
        return kind, *view, original.requires_grad, tensor.device.type, False, False, *storage


def _place(tensor: torch.Tensor, spans: _Spans, server_id: str) -> _Place:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.numel() == 0:
        return _Place(tensor, None, 0, None)
    storage, item = tensor.untyped_storage(), tensor.dtype.itemsize
    start = int(tensor.storage_offset()) * item
    found = MAPPINGS.find(storage.data_ptr())
    if server_id and found is not None:
        mapping, offset = found
        shared = mapping.owner == server_id and not mapping.pooled and offset + storage.nbytes() <= mapping.info.nbytes
        # A storage may start at any byte, but the offset of a tensor is counted in elements.
        if shared and (offset + start) % item == 0:
            return _Place(tensor, mapping.info, offset + start, None)
    used = (sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1) * item
    if used > _SPARSE * max(tensor.nbytes, _GRAIN):
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        storage, start, used = tensor.untyped_storage(), 0, tensor.nbytes
    return _Place(tensor, None, start, spans.add(storage, start, start + used))
