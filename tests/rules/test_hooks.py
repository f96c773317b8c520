"""Module hooks on the other side: none replaces another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torch.utils.hooks import RemovableHandle

from shared_rpc.codec.results import decode_result
from shared_rpc.memory.records import Record
from tests.kit.subjects import doubled, same_state

Rebuilt = Callable[..., Any]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """``counted(n)`` makes this process one that has registered ``n`` hooks so far."""
    return lambda number: monkeypatch.setattr(RemovableHandle, "next_id", number)


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], RemovableHandle], Callable[[Any], dict[int, Any]]]] = {
    "forward": (nn.Identity, nn.Module.register_forward_hook, lambda value: value._forward_hooks),
    "backward": (nn.Identity, nn.Module.register_full_backward_hook, lambda value: value._backward_hooks),
    "state_dict": (nn.Identity, nn.Module.register_state_dict_post_hook, lambda value: value._state_dict_hooks),
    "own pickling": (lambda: nn.LSTM(2, 2), nn.Module.register_forward_hook, lambda value: value._forward_hooks),
}


@pytest.fixture
def rebuilt_module(published: Callable[..., Record], device: str, counted: Callable[[int], None]) -> Rebuilt:
    """A module as rebuilt in a process that has registered no hook."""

    def rebuild(value: nn.Module) -> Any:
        record = published(value.to(device))
        counted(0)
        return decode_result(record.skeleton, record.table, record.segments)

    return rebuild


@pytest.mark.parametrize("case", CASES)
def test_received_ids_are_not_reused(rebuilt_module: Rebuilt, counted: Callable[[int], None], case: str) -> None:
    """A process with fewer registered hooks than the server registers its own next to the received ones."""
    make, register, hooks = CASES[case]
    counted(0)
    value = make()
    register(value, same_state)
    before = list(hooks(value).values())
    result = rebuilt_module(value)
    assert len(hooks(result)) == len(before)
    ids = list(hooks(result))
    register(result, doubled)
    assert list(hooks(result))[:-1] == ids
