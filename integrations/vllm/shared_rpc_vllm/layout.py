"""The parallel groups of a rank: read in an engine, and imitated in the server, which runs alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from vllm.distributed import parallel_state
from vllm.distributed.parallel_state import GroupCoordinator

#: Groups that models use in any engine.
_ALWAYS = ("_WORLD", "_TP", "_PP", "_DP", "_EP", "_DCP", "_PCP")


def layout_of_this_process() -> dict[str, tuple[int, int]]:
    """Return rank and size of each of vLLM's groups with more than one process."""
    groups = {name: group for name, group in vars(parallel_state).items() if isinstance(group, GroupCoordinator)}
    return {name: (group.rank_in_group, group.world_size) for name, group in groups.items() if group.world_size > 1}


@contextmanager
def seated(layout: Mapping[str, tuple[int, int]], device: torch.device) -> Iterator[None]:
    """Make this process one rank of a layout, without the others, while it loads that rank's part of a model.

    This works because vLLM's models and loaders use only rank and size of a group. Communication with another rank fails.
    """
    names = [name for name in {*_ALWAYS, *layout} if hasattr(parallel_state, name)]
    seats = {name: _seat(name, *layout.get(name, (0, 1)), device) for name in names}
    before = {name: getattr(parallel_state, name) for name in seats}
    vars(parallel_state).update(seats)
    try:
        yield
    finally:
        vars(parallel_state).update(before)


def _seat(name: str, rank: int, size: int, device: torch.device) -> Any:
    """Return a group without processes."""
    group = object.__new__(GroupCoordinator)
    process_group: Any = torch.distributed.ProcessGroup
    alone = process_group(rank, size)  # without a backend
    vars(group).update(
        unique_name=f"shared_rpc:{name}",
        rank=rank,
        rank_in_group=rank,
        local_rank=rank,
        world_size=size,
        ranks=list(range(size)),
        group_ranks=[list(range(size))],
        device=device,
        device_group=alone,
        cpu_group=alone,
        use_device_communicator=False,
        device_communicator=None,
        mq_broadcaster=None,
    )
    return group
