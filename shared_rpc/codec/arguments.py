"""Arguments of calls: lowered by the caller, lifted in the process of the endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from shared_rpc.codec.blocks import spans
from shared_rpc.codec.devices import check_devices
from shared_rpc.codec.modes import keep_untraced, without_modes
from shared_rpc.codec.placement import copy
from shared_rpc.codec.single import copy_single, rebuild_single
from shared_rpc.codec.skeleton import Scan, dump, load
from shared_rpc.codec.tensors import read_table, tensors_of
from shared_rpc.errors import CodecError
from shared_rpc.memory.chunk_references import ChunkReferences
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.pool import Pool
from shared_rpc.memory.records import Arguments
from shared_rpc.protocol.records import EMPTY_TABLE, NO_KWARGS
from shared_rpc.protocol.values import DtypeRef, SkeletonRef, TensorRef, decode_call, encode_call, lift, lower_call, refuse


@without_modes
def encode_arguments(
    args: Sequence[Any],
    kwargs: dict[str, Any],
    kind: str,
    server: str = "",
    pool: Pool | None = None,
    *,
    bare: bool = False,
) -> Arguments:
    """Lower a call's arguments, and copy unshared memory once its writers on the current streams are done.

    :param kind: ``"cpu"`` or ``"cuda"``, the type of device of the server.
    :param server: the server's id: its own memory is named instead of sent. ``""`` to send all.
    :param pool: the target of copies, see :func:`~shared_rpc.codec.placement.copy`.
    :param bare: leave the memory out, because only the parts of a cache key are needed.
    :raises CapabilityError: for an argument that cannot be sent, naming it.
    """
    if pool is not None:
        single = _encode_single(args, kwargs, kind, pool)
        if single is not None:
            return single
    scan = Scan(kind)
    skeletons: list[bytes] = []

    def leaf(value: Any, path: str) -> Any:
        if type(value) is torch.Tensor:
            # A dump reports the path of a refused tensor, and distinguishes plain tensors from others.
            dump(value, scan, path)
            number = scan.tensor(value)
            if number is not None:
                return TensorRef(number)
        if isinstance(value, (torch.Tensor, torch.nn.Module)):
            skeletons.append(dump(value, scan, path))
            return SkeletonRef(len(skeletons) - 1)
        return _plain(value, path)

    lowered = lower_call(args, kwargs, leaf)
    if bare or (not scan.storages and not skeletons):
        return Arguments(*encode_call(*lowered))
    placed = copy(scan, spans(scan, exact=True), pool, server)
    return Arguments(
        *encode_call(*lowered),
        placed.table(),
        skeletons,
        placed.segments,
        placed.chunks,
    )


#: The arguments of a call with one tensor only.
_ALONE = encode_call([TensorRef(0)], {})

_SCALARS = (int, float, bool, str, bytes, complex, type(None))


def _encode_single(args: Sequence[Any], kwargs: dict[str, Any], kind: str, pool: Pool) -> Arguments | None:
    """Encode one plain tensor, alone or with scalars; return None for anything else."""
    rest = [value for value in (*args, *kwargs.values()) if type(value) not in _SCALARS]
    if len(rest) != 1 or type(rest[0]) is not torch.Tensor:
        return None
    alone = len(args) == 1 and not kwargs
    written = _ALONE if alone else encode_call(*lower_call(args, kwargs, lambda value, path: TensorRef(0)))
    copied = copy_single(rest[0], kind, pool)
    if copied is None:
        return None
    copied.wait()
    return Arguments(*written, copied.table, [], [copied.segment], (copied.chunk.number,))


def lower_arguments(args: Sequence[Any], kwargs: dict[str, Any], kind: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call within this process as plain data; tensors and modules are unchanged.

    :param kind: ``"cpu"`` or ``"cuda"``, the type of device of shared memory.
    :raises CapabilityError: for an argument that could not be sent, so that a call fails in every role or in none.
    """

    def leaf(value: Any, path: str) -> Any:
        if isinstance(value, (torch.Tensor, torch.nn.Module)):
            check_devices(value, path, kind)
            return value
        return _plain(value, path)

    return lower_call(args, kwargs, leaf)


def _plain(value: Any, path: str) -> DtypeRef:
    if isinstance(value, torch.dtype):
        return DtypeRef(str(value).removeprefix("torch."))
    refuse(value, path)


@without_modes
def decode_arguments(arguments: Arguments) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments for the endpoint; tensors lie in the caller's segments.

    :raises CodecError: if a skeleton cannot be rebuilt here.
    """
    if arguments.table == EMPTY_TABLE:
        return _lifted(arguments, [], [])
    if len(arguments.pooled) == 1 and not arguments.skeletons:
        single = rebuild_single(arguments.table, arguments.segments, cast("dict[int, ChunkReferences]", arguments.pooled))
        if single is not None and arguments.args == _ALONE[0] and arguments.kwargs == NO_KWARGS:
            return [single], {}
        if single is not None:
            return _lifted(arguments, [single], [])
    with MAPPINGS.attach(arguments.segments, keep=True) as mappings:
        tensors = tensors_of(
            read_table(arguments.table), mappings, cast("dict[int, ChunkReferences]", arguments.detach_pooled())
        )
        return _lifted(arguments, *tensors)


def _lifted(
    arguments: Arguments, tensors: list[torch.Tensor], storages: list[torch.UntypedStorage]
) -> tuple[list[Any], dict[str, Any]]:
    args, kwargs = decode_call(arguments.args, arguments.kwargs)

    def leaf(reference: Any) -> Any:
        if isinstance(reference, TensorRef):
            return tensors[reference.number]
        if isinstance(reference, DtypeRef):
            return _dtype(reference.name)
        return load(arguments.skeletons[reference.number], tensors, storages)

    try:
        return [lift(value, leaf) for value in args], {name: lift(value, leaf) for name, value in kwargs.items()}
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise CodecError(
            f"the server cannot rebuild an argument ({type(error).__name__}: {error}): it must be able to import the modules "
            f"of the argument's classes"
        ) from error
    finally:
        # A retained error of an argument's own code may keep this frame.
        tensors.clear()
        storages.clear()


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch.{name} is no dtype")
    return found


keep_untraced()
