"""The tensor transport ``SHARED_RPC`` for Ray: tensors of actors are in the server of their host, once for all its processes.

After :func:`register`, ``@ray.method(tensor_transport="SHARED_RPC")`` and ``ray.put(…, _tensor_transport="SHARED_RPC")`` keep
tensors in the server (broker) of the node. Processes of that node get the same memory without a copy, and the maker may exit:
see :mod:`shared_rpc_ray.tensors`. A process of another node gets a copy through Ray's object store, read by a task on the
tensors' node.
"""

from __future__ import annotations

import importlib.metadata
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from shared_rpc.codec.reducers import rebuild_tensor
from shared_rpc.errors import BufferNotFound, ConfigurationError, SharedRPCError
from shared_rpc_ray.tensors import LINGER, HeldTensors, client_of, let_go

try:
    import ray

    from shared_rpc_ray.membership import alive_nodes
    from shared_rpc_ray.transfer import part_nbytes
except ImportError as error:
    raise ConfigurationError(
        "the tensor transport SHARED_RPC needs Ray, which is not installed: pip install 'shared-rpc[ray]'"
    ) from error
try:
    from ray.exceptions import RayDirectTransportError
    from ray.experimental import (
        CommunicatorMetadata,
        TensorTransportManager,
        TensorTransportMetadata,
        register_tensor_transport,
    )
    from ray.experimental.rdt.util import transport_manager_info
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    raise ConfigurationError(
        f"Ray {importlib.metadata.version('ray')} has no tensor transports for other libraries (ray.experimental."
        f"register_tensor_transport): use a later one, such as 2.60"
    ) from error

__all__ = ["NAME", "SharedRpcTransport", "register"]

NAME = "SHARED_RPC"

#: Parts that the task on the tensors' node may store before the receiver reads them.
_PARTS_AHEAD = 2


def register() -> None:
    """Register the transport with Ray, in the process that creates the actors, before their classes are defined.

    Ray registers it in the actors itself. Further calls have no effect.

    :raises ConfigurationError: if another transport has its name.
    """
    known = transport_manager_info.get(NAME)
    if known is None:
        register_tensor_transport(NAME, ["cpu", "cuda"], SharedRpcTransport, torch.Tensor)
    elif known.transport_manager_class is not SharedRpcTransport:
        raise ConfigurationError(f"another tensor transport of this process is called {NAME}: {known.transport_manager_class}")


@dataclass
class HeldMetadata(TensorTransportMetadata):  # type: ignore[misc]  # Ray's classes have no annotations where it is not installed
    """The place of the tensors of a Ray object: the node's server, and the arguments of ``rebuild_tensor()``."""

    node_id: str = ""
    socket_path: str = ""
    names: list[tuple[Any, ...]] = field(default_factory=list)
    pid: int = 0


class SharedRpcTransport(TensorTransportManager):  # type: ignore[misc]
    """The transport, called by Ray in the maker's process and in receivers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Held lists of this process, by the ids of Ray's objects, until Ray frees them.
        self._made: dict[str, tuple[HeldTensors, HeldMetadata]] = {}

    def tensor_transport_backend(self) -> str:
        """Return the transport's name."""
        return NAME

    @staticmethod
    def is_one_sided() -> bool:
        """Return True: the receiver does not need the maker."""
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        """Return True: no process waits for another."""
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        """Return True: a server is started if none listens."""
        return True

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[torch.Tensor]) -> HeldMetadata:
        """Keep the tensors in the node's server; return the metadata for receivers.

        :raises CapabilityError: for tensors that cannot be shared, see :meth:`TensorClient.hold`.
        :raises ConnectError: if no server can be reached or started.
        """
        with self._lock:
            made = self._made.get(obj_id)  # of an earlier attempt of the same task
        if made is not None:
            return made[1]
        metadata = HeldMetadata(
            tensor_meta=[(tensor.shape, tensor.dtype) for tensor in rdt_object],
            tensor_device=rdt_object[0].device.type if rdt_object else None,
            node_id=_node(),
            pid=os.getpid(),
        )
        if rdt_object:
            client = client_of(_device_of(rdt_object[0]))
            held = client.hold(rdt_object)
            metadata.socket_path, metadata.names = client.socket_path, held.names
            with self._lock:
                self._made[obj_id] = held, metadata
        return metadata

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: str | None = None) -> CommunicatorMetadata:
        """Return empty metadata: the processes do not communicate."""
        return CommunicatorMetadata()

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: HeldMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """Return the tensors: over the same memory on their own node, as copies on another one.

        :param target_buffers: targets of ``set_target_for_ref``, to which the tensors are copied instead.
        :raises RayDirectTransportError: if the tensors are not available, with both nodes and the reason.
        """
        metadata = tensor_transport_metadata
        if metadata.node_id == _node():
            try:
                tensors = _attached(metadata)
            except SharedRPCError as error:
                raise _lost(obj_id, metadata, error) from error
            if target_buffers:
                with torch.no_grad():
                    for target, tensor in zip(target_buffers, tensors, strict=True):
                        target.copy_(tensor)
                return target_buffers
            return tensors
        try:
            return _fetched(metadata, target_buffers)
        except (ray.exceptions.RayError, SharedRPCError) as error:
            raise _lost(obj_id, metadata, error) from error

    def send_multiple_tensors(self, *_: Any) -> None:
        """Raise: Ray does not call this method of a one-sided transport."""
        raise NotImplementedError(f"{NAME} is one-sided: receivers attach to memory")

    def garbage_collect(self, obj_id: str, tensor_transport_meta: HeldMetadata, tensors: list[torch.Tensor]) -> None:
        """Drop the held list: the memory is freed with the last receiver's tensors. Does not wait for the server."""
        with self._lock:
            made = self._made.pop(obj_id, None)
        if made is not None:
            let_go(made[0])

    def abort_transport(self, obj_id: str, communicator_metadata: CommunicatorMetadata) -> None:
        """Do nothing: attaching completes by itself."""


def _node() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _device_of(tensor: torch.Tensor) -> str:
    return "cpu" if tensor.device.type == "cpu" else str(tensor.device)


def _attached(metadata: HeldMetadata) -> list[torch.Tensor]:
    """Return the tensors over the memory of this node's server."""
    return [rebuild_tensor(*name) for name in metadata.names]


def _lost(obj_id: str, metadata: HeldMetadata, error: Exception) -> Exception:
    here = _node()
    where = "this node" if metadata.node_id == here else f"node {metadata.node_id}, and this is node {here}"
    advice = ""
    if isinstance(error, BufferNotFound) or isinstance(getattr(error, "cause", None), BufferNotFound):
        advice = (
            f". They are kept while their maker (pid {metadata.pid} of that node) runs and Ray has a reference, and for "
            f"{LINGER:g} s after the maker has ended"
        )
    found: Exception = RayDirectTransportError(
        f"{NAME}: cannot get the tensors of object {obj_id}, which lie in the server at {metadata.socket_path} on {where}: "
        f"{type(error).__name__}: {error}{advice}"
    )
    return found


# Another node.


def _fetched(metadata: HeldMetadata, targets: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
    """Return copies of the tensors, read by a task on their node and transferred in parts through the object store.

    Each of the two stores holds at most :data:`_PARTS_AHEAD` parts in addition to the one that is being written; their size
    follows from the smaller store.
    """
    device = torch.device(metadata.tensor_device or "cpu")
    tensors = list(targets) if targets else _empty(metadata.names, device)
    strategy = NodeAffinitySchedulingStrategy(metadata.node_id, soft=False)
    read = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=strategy)(_read)
    stores = [node.store_nbytes for node in alive_nodes().values() if node.id in (metadata.node_id, _node())]
    streaming = {"num_returns": "streaming", "_generator_backpressure_num_objects": _PARTS_AHEAD}
    parts = read.options(**streaming).remote(metadata, part_nbytes(min(stores, default=0)))
    writer = _Writer(tensors)
    for reference in parts:
        writer.write(ray.get(reference))
        del reference  # before waiting for the next one, because the stores hold few parts
    writer.finish()
    if not targets:
        for tensor, (_, _, _, _, _, requires_grad, *_) in zip(tensors, metadata.names, strict=True):
            tensor.requires_grad_(requires_grad)
    return tensors


def _empty(names: Sequence[tuple[Any, ...]], device: torch.device) -> list[torch.Tensor]:
    return [torch.empty(size, dtype=dtype, device=device) for _, size, _, _, dtype, *_ in names]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _read(metadata: HeldMetadata, nbytes: int) -> Iterator[Any]:
    """Yield the concatenated bytes of all tensors in parts. Runs as a task on the tensors' node."""
    part, filled = np.empty(nbytes, np.uint8), 0
    for tensor in _attached(metadata):
        source = _flat(tensor.contiguous())
        for start in range(0, source.numel(), nbytes):
            rest = source[start : start + nbytes].cpu().numpy()
            while len(rest):
                taken = min(len(rest), nbytes - filled)
                part[filled : filled + taken] = rest[:taken]
                rest, filled = rest[taken:], filled + taken
                if filled == nbytes:
                    yield part
                    # A new array, because Ray may not have stored the yielded one yet.
                    part, filled = np.empty(nbytes, np.uint8), 0
    if filled:
        yield part[:filled]


class _Writer:
    """The receiving end of :func:`_read`: fills tensors in order."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._targets = [_flat(tensor) for tensor in tensors if tensor.numel()]
        self._missing = sum(target.numel() for target in self._targets)

    def write(self, part: Any) -> None:
        """Write the next bytes."""
        if len(part) > self._missing:
            raise ConfigurationError(
                f"received {len(part)} bytes, but only {self._missing} are missing: use one release on all nodes"
            )
        self._missing -= len(part)
        while len(part):
            target = self._targets[0]
            count = min(len(part), target.numel())
            if target.is_cuda:
                target[:count].copy_(torch.from_numpy(part[:count].copy()))
            else:
                target.numpy()[:count] = part[:count]
            part, self._targets[0] = part[count:], target[count:]
            if not self._targets[0].numel():
                del self._targets[0]

    def finish(self) -> None:
        """Check that all bytes were received."""
        if self._missing:
            raise ConfigurationError(f"{self._missing} bytes are missing: use one release on all nodes")
