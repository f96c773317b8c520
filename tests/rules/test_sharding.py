"""Shard rules: gathered parts equal the original, and parts that cannot be cut or joined are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared_rpc.errors import ConfigurationError
from shared_rpc.extras.sharding import Placement, Replicate, Shard, gather_state_dict, part_of, place, shard_state_dict
from tests.kit.interpreter import bits

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]


def shards_of(state: dict[str, Any], rules: dict[str, Placement], world: int) -> list[dict[str, torch.Tensor]]:
    """Return the parts of all ranks."""
    return [shard_state_dict(state, rules, rank, world) for rank in range(world)]


@st.composite
def cuts(draw: st.DrawFn) -> tuple[torch.Tensor, Placement, int]:
    """Generate a tensor, possibly strided, its placement, and a number of ranks that divides it."""
    world = draw(st.integers(1, 6))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    placement: Placement = Replicate()
    if shape and draw(st.booleans()):
        dim = draw(st.integers(0, len(shape) - 1))
        blocks = draw(
            st.sampled_from([None, *(number for number in range(1, world + 1) if world % number == 0), world, 2 * world])
        )
        shape[dim] *= world if blocks is None else blocks
        dim -= draw(st.sampled_from([0, len(shape)]))
        placement = Shard(dim, blocks=blocks, repeat=blocks is not None and blocks < world)
    dtype = draw(st.sampled_from(DTYPES))
    numbers = torch.arange(torch.Size(shape).numel()).remainder(7).sub(3).reshape(shape)
    tensor = numbers.to(torch.float32 if dtype == torch.float8_e4m3fn else dtype).to(dtype)
    if len(shape) > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, 1).contiguous().transpose(0, 1)
    return tensor, placement, world


@given(cuts())
def test_gathering_undoes_sharding(cut: tuple[torch.Tensor, Placement, int]) -> None:
    """For every number of ranks, dimension, dtype, layout and placement, bit for bit."""
    tensor, placement, world = cut

    whole = gather_state_dict(shards_of({"x": tensor}, {"x": placement}, world), {"x": placement})["x"]

    assert bits(whole) == bits(tensor)


@given(cuts())
def test_parts_are_equal_and_cover_the_tensor(cut: tuple[torch.Tensor, Placement, int]) -> None:
    """Ranks have equal amounts, and each index is on one rank, unless it is repeated."""
    tensor, placement, world = cut
    count = torch.zeros(tensor.shape, dtype=torch.int64)

    for rank in range(world):
        count[part_of("x", tensor.shape, placement, rank, world)] += 1

    assert count.unique().numel() <= 1
    if isinstance(placement, Shard) and not placement.repeat:
        assert count.eq(1).all()
    assert len({part["x"].shape for part in shards_of({"x": tensor}, {"x": placement}, world)}) == 1


def test_more_ranks_than_heads_need_repeat() -> None:
    """Neighbours have the same head then; without it the error suggests it."""
    state = {"k": torch.arange(4)}

    parts = shards_of(state, {"k": Shard(0, blocks=2, repeat=True)}, 4)

    assert [part["k"].tolist() for part in parts] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    with pytest.raises(ConfigurationError, match="repeat=True"):
        shards_of(state, {"k": Shard(0, blocks=2)}, 4)
    with pytest.raises(ConfigurationError, match="3 blocks cannot be divided among 2 ranks"):
        shards_of({"k": torch.arange(6)}, {"k": Shard(0, blocks=3)}, 2)
    with pytest.raises(ConfigurationError, match="2 blocks cannot be divided among 3 ranks"):
        shards_of(state, {"k": Shard(0, blocks=2, repeat=True)}, 3)


def test_a_part_owns_its_memory() -> None:
    """Nothing of the whole is kept alive or written to: publishing a part publishes only that."""
    state = {"x": torch.zeros(8, 4), "norm": torch.zeros(4)}

    part = shard_state_dict(state, {"x": Shard(0), "norm": Replicate()}, 1, 4)
    for tensor in part.values():
        tensor.fill_(1)

    assert part["x"].untyped_storage().nbytes() == 2 * 4 * 4
    assert not any(tensor.any() for tensor in state.values())


def test_tied_weights_stay_tied() -> None:
    """One part for both names if both have the same placement; else each has its own."""
    weight = torch.randn(4, 4)
    state = {"embed": weight, "head": weight.detach(), "rows": weight.T}

    part = shard_state_dict(state, {"rows": Shard(1), "*": Shard(0)}, 1, 2)

    assert part["embed"] is part["head"]
    assert torch.equal(part["rows"], weight[2:].T) and part["rows"].data_ptr() != part["head"].data_ptr()
    assert shard_state_dict(state, {"head": Replicate(), "*": Shard(0)}, 0, 2)["head"].shape == (4, 4)


# Rules.


def test_the_first_matching_rule_decides() -> None:
    """Globs match whole names, ``*`` matches dots, and case counts."""
    rules = {"layers.0.*": Replicate(), "*.weight": Shard(0), "*": Shard(1)}

    decided = place(["layers.0.q.weight", "layers.1.q.weight", "layers.1.q.Weight"], rules)

    assert list(decided.values()) == [Replicate(), Shard(0), Shard(1)]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"*.weight": Shard(0)}, r"^no shard rule matches 'a\.bias', 'b\.bias': add rules"),
        ({"*": Replicate(), "*.wieght": Shard(0)}, r"'\*\.wieght' have no effect: no name matches"),
        ({"*": Replicate(), "a.*": Shard(0)}, r"'a\.\*' have no effect: no name matches, or an earlier rule does"),
    ],
    ids=["no rule", "matches nothing", "shadowed"],
)
def test_unmatched_rules_and_names_are_refused(rules: dict[str, Placement], message: str) -> None:
    """A name without a rule, or a rule without a name, is usually a typing error."""
    with pytest.raises(ConfigurationError, match=message):
        place(["a.weight", "a.bias", "b.weight", "b.bias"], rules)


@pytest.mark.parametrize(
    ("placement", "rank", "world", "message"),
    [
        (Shard(0), 0, 3, r"^x: dimension 0 of size 4 cannot be divided among 3 ranks"),
        (Shard(2), 0, 2, "uses dimension 2 of a tensor that has 2"),
        (Shard(1, blocks=4), 0, 2, "dimension 1 has size 6, which is not a multiple of 4 blocks"),
        (Shard(0), 2, 2, "rank 2 of 2"),
    ],
)
def test_impossible_cuts_are_refused(placement: Placement, rank: int, world: int, message: str) -> None:
    """The error names the tensor, the dimension and the number of ranks."""
    with pytest.raises(ConfigurationError, match=message):
        shard_state_dict({"x": torch.zeros(4, 6)}, {"x": placement}, rank, world)


# Ranks that disagree.


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (torch.zeros(3, 2), r"rank 0 has \(2, 2\) of float32, and rank 1 \(3, 2\) of float32"),
        (torch.zeros(2, 2, dtype=torch.float16), r"rank 0 has \(2, 2\) of float32, and rank 1 \(2, 2\) of float16"),
    ],
)
def test_ranks_with_different_shapes_are_refused(other: torch.Tensor, message: str) -> None:
    """For example after starts with different numbers of ranks or dtypes."""
    with pytest.raises(ConfigurationError, match=message):
        gather_state_dict([{"x": torch.zeros(2, 2)}, {"x": other}], {"x": Shard(0)})


def test_ranks_with_different_values_are_refused() -> None:
    """Different repeated parts show that two servers have different checkpoints."""
    nan = torch.full((2,), torch.nan)
    rules = {"norm": Replicate(), "k": Shard(0, blocks=2, repeat=True)}
    parts = [{"norm": nan.clone(), "k": torch.full((2,), float(rank // 2))} for rank in range(4)]

    assert gather_state_dict(parts, rules)["k"].tolist() == [0, 0, 1, 1]

    parts[3]["k"][1] = 9
    with pytest.raises(ConfigurationError, match=r"^k: ranks 2 and 3 must have the same values"):
        gather_state_dict(parts, rules)
    parts[1]["norm"][0] = 0
    with pytest.raises(ConfigurationError, match=r"^norm: ranks 0 and 1 must have the same values"):
        gather_state_dict(parts, rules)


@pytest.mark.parametrize("rule", [Shard, Replicate, 0, None, "0"], ids=str)
def test_invalid_rules_are_refused(rule: Any) -> None:
    """By name: treated as a Replicate, one would go unnoticed until memory is full."""
    with pytest.raises(ConfigurationError, match=r"the shard rule 'b' is .*: use Shard\(dim\) or Replicate\(\)"):
        shard_state_dict({"a": torch.ones(2), "b": torch.ones(2)}, {"a": Shard(0), "b": rule}, 0, 2)


@pytest.mark.parametrize("rule", [Shard(0, repeat=True), Shard(0, blocks=0)])
def test_rules_that_divide_nothing_are_refused(rule: Shard) -> None:
    """``repeat`` without blocks, and no blocks."""
    with pytest.raises(ConfigurationError):
        shards_of({"x": torch.arange(7)}, {"x": rule}, 14 if rule.repeat else 2)
