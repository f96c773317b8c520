"""Module hooks on the other side: none replaces another one, and handles that were sent still remove theirs."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.hooks import RemovableHandle

from shared_rpc.codec.arguments import decode_arguments, encode_arguments
from shared_rpc.codec.results import decode_result
from shared_rpc.memory.records import Record
from tests.kit.comparing import differences
from tests.kit.subjects import doubled, same_state

Rebuilt = Callable[..., Any]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """``counted(n)`` makes this process one that has registered ``n`` hooks so far."""
    return lambda number: monkeypatch.setattr(RemovableHandle, "next_id", number)


class Keeping:
    """An object with custom hooks, as some libraries have besides torch's."""

    def __init__(self) -> None:
        self.listeners: OrderedDict[int, Any] = OrderedDict()

    def listen(self, hook: Any) -> RemovableHandle:
        """Add a hook."""
        handle = RemovableHandle(self.listeners)
        self.listeners[handle.id] = hook
        return handle


def _listening() -> nn.Module:
    module = nn.Linear(2, 2)
    module.keeping = Keeping()
    module.keeping.listen(same_state)
    return module


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], RemovableHandle], Callable[[Any], dict[int, Any]]]] = {
    "forward": (nn.Identity, nn.Module.register_forward_hook, lambda value: value._forward_hooks),
    "backward": (nn.Identity, nn.Module.register_full_backward_hook, lambda value: value._backward_hooks),
    "state_dict": (nn.Identity, nn.Module.register_state_dict_post_hook, lambda value: value._state_dict_hooks),
    "own pickling": (lambda: nn.LSTM(2, 2), nn.Module.register_forward_hook, lambda value: value._forward_hooks),
    "parametrised": (
        lambda: parametrizations.weight_norm(nn.LSTM(2, 2), "weight_hh_l0"),
        nn.Module.register_forward_hook,
        lambda value: value._forward_hooks,
    ),
    "a library's own": (
        _listening,
        lambda value, hook: value.keeping.listen(hook),
        lambda value: value.keeping.listeners,
    ),
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


def test_hooks_of_an_argument_arrive(device: str, no_leaks: None, counted: Callable[[int], None]) -> None:
    """In the server, which does not reuse their ids."""
    counted(0)
    module = nn.Linear(2, 2, device=device)
    handle = module.register_forward_hook(doubled)
    with closing(encode_arguments([module], {}, device)) as arguments:
        counted(0)
        [received], _ = decode_arguments(arguments)
    received.register_forward_hook(same_state)
    assert list(received._forward_hooks.values()) == [doubled, same_state]
    assert next(iter(received._forward_hooks)) == handle.id


# Handles.


@pytest.mark.parametrize("how", ["deepcopy", "again"])
def test_models_that_keep_a_handle_can_be_copied(rebuilt_module: Rebuilt, device: str, how: str) -> None:
    """Empty dicts referenced by a handle are those of the module, in attached ones too."""
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 2))
    model.handle = model[0].register_forward_hook(doubled)
    result = rebuilt_module(model)
    copied = copy.deepcopy(result) if how == "deepcopy" else rebuilt_module(result)
    assert differences(result, copied) == []
    copied.handle.remove()
    assert (len(copied[0]._forward_hooks), len(result[0]._forward_hooks)) == (0, 1)


def test_received_handles_remove_their_hooks(rebuilt_module: Rebuilt, device: str) -> None:
    """With torch's further entries, such as the flag for keyword arguments."""
    module = nn.Identity()
    module.handle = module.register_forward_hook(lambda module, args, kwargs, output: output + 1, with_kwargs=True)
    module.register_forward_hook(doubled)
    result = rebuilt_module(module)
    one = torch.ones(1, device=device)
    assert result(one).tolist() == [4]
    result.handle.remove()
    assert result(one).tolist() == [2]
    assert result._forward_hooks_with_kwargs == {}
    assert module(one).tolist() == [4]


def test_shallow_copies_share_their_hooks(rebuilt_module: Rebuilt, device: str) -> None:
    """Containers shared by two modules are shared even if they are empty."""
    module = nn.Linear(2, 2)
    one, other = rebuilt_module(nn.ModuleList([module, copy.copy(module)]))
    one.register_forward_hook(doubled)
    one.register_buffer("scale", torch.ones(1, device=device))
    assert list(other._forward_hooks.values()) == [doubled]
    assert other.scale is one.scale
