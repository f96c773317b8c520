"""Shard rules: globs that assign parts of a state dict to the ranks of a tensor-parallel group.

::

    RULES = {
        "*.q_proj.weight": Shard(0, blocks=32),               # column-parallel, no attention head is cut
        "*.k_proj.weight": Shard(0, blocks=8, repeat=True),   # with more ranks than heads, several have the same head
        "*.o_proj.weight": Shard(1, blocks=32),               # row-parallel: the ranks' outputs are summed
        "*norm*": Replicate(),
    }
    mine = shard_state_dict(state, RULES, rank=1, world=4)
    whole = gather_state_dict([of_rank_0, of_rank_1, of_rank_2, of_rank_3], RULES)

A glob is matched against the whole name of a parameter, case-sensitively, and ``*`` matches dots (:func:`fnmatch.fnmatchcase`).
The first matching rule decides. Every name needs a rule and every rule a name, so that neither a new layer nor a typing error
goes unnoticed. No server is involved: these are functions of tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from shared_rpc.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

__all__ = ["Placement", "Replicate", "Rules", "Shard", "gather_state_dict", "part_of", "place", "shard_state_dict"]


@dataclass(frozen=True)
class Shard:
    """Placement of an equal, contiguous part of one dimension on each rank, in the order of the ranks.

    :param dim: the dimension; a negative one counts from the last. For a linear layer's weight, which is (out, in), 0 is
        column-parallel (ranks have some of the outputs) and 1 row-parallel (ranks' outputs are partial sums).
    :param blocks: number of equal blocks of the dimension that must not be cut: attention heads, for instance. Without it
        every index may be a border.
    :param repeat: with more ranks than ``blocks``, assign each block to ``world / blocks`` successive ranks, as for the key
        and value heads of grouped-query attention. Without it more ranks are an error.
    """

    dim: int
    blocks: int | None = None
    repeat: bool = False


@dataclass(frozen=True)
class Replicate:
    """Placement of the whole tensor on every rank."""


Placement = Shard | Replicate
Rules = Mapping[str, Placement]


def place(names: Iterable[str], rules: Rules) -> dict[str, Placement]:
    """Return the placement of each name.

    :raises ConfigurationError: with every name without a matching rule, or else every rule without effect; and for an invalid
        rule, such as ``Shard`` instead of ``Shard(0)``.
    """
    for glob, rule in rules.items():
        if not isinstance(rule, Shard | Replicate):
            raise ConfigurationError(f"the shard rule {glob!r} is {rule!r}: use Shard(dim) or Replicate(), with their brackets")
    decided: dict[str, Placement] = {}
    unmatched, used = [], set()
    for name in names:
        if matching := [glob for glob in rules if fnmatchcase(name, glob)]:
            used.add(matching[0])
            decided[name] = rules[matching[0]]
        else:
            unmatched.append(name)
    if unmatched:
        raise ConfigurationError(
            f"no shard rule matches {_listed(unmatched)}: add rules for them; a last rule {{'*': Replicate()}} matches the rest"
        )
    if idle := [glob for glob in rules if glob not in used]:
        raise ConfigurationError(
            f"the shard rules {_listed(idle)} have no effect: no name matches, or an earlier rule does; correct or remove them"
        )
    return decided


def part_of(name: str, shape: Sequence[int], placement: Placement, rank: int, world: int) -> tuple[slice, ...]:
    """Return the index of a rank's part in the whole tensor: one slice for every dimension.

    It reads no tensor, so it also works for files: ``safetensors``' ``get_slice(name)[part]``.

    :raises ConfigurationError: if there is no such rank or dimension, or the dimension is not divisible.
    """
    if not 0 <= rank < world:
        raise ConfigurationError(f"rank {rank} of {world}: ranks count from 0, and there must be one at least")
    index = [slice(None)] * len(shape)
    if isinstance(placement, Shard):
        dim = _dimension(name, len(shape), placement)
        blocks = shape[dim] if placement.blocks is None else placement.blocks
        if shape[dim] % blocks if blocks else shape[dim]:
            raise ConfigurationError(
                f"{name}: dimension {dim} has size {shape[dim]}, which is not a multiple of {blocks} blocks"
            )
        parts, part = _parts(name, blocks, placement, rank, world)
        size = shape[dim] // parts
        index[dim] = slice(part * size, (part + 1) * size)
    return tuple(index)


def shard_state_dict(
    state: Mapping[str, torch.Tensor], rules: Rules, rank: int, world: int, device: torch.device | str | None = None
) -> dict[str, torch.Tensor]:
    """Return one rank's part of a state dict.

    The parts are contiguous copies, including the replicated ones: they keep nothing of ``state`` alive, so publishing them
    publishes only the part. Names that share a tensor (tied weights) share its part if their placements are the same.

    :param device: the device of the parts, to which each is moved once it is cut; by default that of its tensor.
    :raises ConfigurationError: see :func:`place` and :func:`part_of`.
    """
    import torch

    ties: dict[object, torch.Tensor] = {}
    shard = {}
    for name, placement in place(state, rules).items():
        whole = state[name].detach()
        part = part_of(name, whole.shape, placement, rank, world)
        key = (whole.untyped_storage()._cdata, whole.dtype, whole.storage_offset(), whole.shape, whole.stride(), placement)
        if key not in ties:
            target = whole.device if device is None else device
            ties[key] = whole[part].to(target, copy=True, memory_format=torch.contiguous_format)
        shard[name] = ties[key]
    return shard


def gather_state_dict(
    shards: Sequence[Mapping[str, torch.Tensor]], rules: Rules, device: torch.device | str | None = None
) -> dict[str, torch.Tensor]:
    """Return the whole state dict, from the parts of all ranks in their order: the inverse of :func:`shard_state_dict`.

    The result is new memory. Parts repeated on several ranks are compared, byte by byte.

    :param device: the device of the result; by default that of rank 0's part. Parts may be on different devices.
    :raises ConfigurationError: if the ranks differ in names, shapes or dtypes, or in the bytes of a repeated part, because
        their servers were started with different rules, checkpoints or numbers of ranks.
    """
    import torch

    if not shards:
        raise ConfigurationError("no shards to gather: pass the parts of all ranks, in their order")
    for rank, shard in enumerate(shards):
        for name in shards[0].keys() | shard.keys():
            of_0, of_rank = (_described(one.get(name)) for one in (shards[0], shard))
            if of_0 != of_rank:
                raise ConfigurationError(
                    f"{name}: rank 0 has {of_0}, and rank {rank} {of_rank}, which is no part of the same tensor: start the "
                    f"servers with one checkpoint, one set of rules and one number of ranks"
                )
    whole = {}
    for name, placement in place(shards[0], rules).items():
        parts = [shard[name].detach() for shard in shards]
        target = parts[0].device if device is None else torch.device(device)
        distinct = _distinct(name, parts, placement, len(shards))
        if isinstance(placement, Shard):
            whole[name] = torch.cat([part.to(target) for part in distinct], _dimension(name, distinct[0].dim(), placement))
        else:
            whole[name] = distinct[0].to(target, copy=True)
    return whole


def _dimension(name: str, dims: int, placement: Shard) -> int:
    if not -dims <= placement.dim < dims:
        raise ConfigurationError(f"{name}: {placement} uses dimension {placement.dim} of a tensor that has {dims}")
    return placement.dim % dims


def _parts(name: str, blocks: int, placement: Shard, rank: int, world: int) -> tuple[int, int]:
    """Return the number of parts of a dimension, and the part of a rank."""
    if blocks % world == 0:
        return world, rank
    if placement.blocks and placement.repeat and world % blocks == 0:
        return blocks, rank * blocks // world
    what = f"dimension {placement.dim} of size {blocks}" if placement.blocks is None else f"{blocks} blocks"
    raise ConfigurationError(
        f"{name}: {what} cannot be divided among {world} ranks ({placement}); with blocks and repeat=True, a multiple of the "
        f"blocks can have them"
    )


def _distinct(name: str, parts: Sequence[torch.Tensor], placement: Placement, world: int) -> list[torch.Tensor]:
    """Return each part once, after a check that the ranks which repeat it have the same bytes."""
    if isinstance(placement, Replicate):
        of_rank = [0] * world
    elif placement.blocks is None:
        return list(parts)
    else:
        of_rank = [_parts(name, placement.blocks, placement, rank, world)[1] for rank in range(world)]
    import torch

    flat = [part.contiguous().reshape(-1).view(torch.uint8) for part in parts]  # as bytes NaN is equal to itself
    first: dict[int, int] = {}
    for rank, part in enumerate(of_rank):
        other = first.setdefault(part, rank)
        if other != rank and not torch.equal(flat[other], flat[rank].to(flat[other].device)):
            raise ConfigurationError(
                f"{name}: ranks {other} and {rank} must have the same values ({placement}) and have not: their servers loaded "
                f"different checkpoints, or a process has written to one of them"
            )
    return [parts[rank] for rank in first.values()]


def _described(tensor: torch.Tensor | None) -> str:
    return "nothing" if tensor is None else f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:5]))
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown
