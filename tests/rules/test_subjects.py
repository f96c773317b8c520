"""Values of kinds that other programs share: bit for bit the same when attached, and as usable as the original."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kit.comparing import differences
from tests.kit.subjects import SUBJECTS, quietly


@pytest.fixture
def attached(rebuilt: Callable[..., Any], device: str) -> Callable[[str], Any]:
    """``attached(name)`` is the value of that name as a client gets it, used once before it is published."""

    def attach(name: str) -> Any:
        subject = SUBJECTS[name]
        if device not in subject.on:
            pytest.skip(f"there is none on {device}")
        with quietly():
            value = subject.make(device)
            if subject.use:
                subject.use(value, device)
            return rebuilt(value)

    return attach


@pytest.mark.parametrize("name", SUBJECTS)
def test_values_round_trip(attached: Callable[[str], Any], device: str, name: str) -> None:
    """Class, attributes, strides, ties, flags, hooks and state dict are the same, as are computed results."""
    subject, value = SUBJECTS[name], attached(name)
    assert subject.differences(value, device) == []
    if subject.use:
        with quietly():
            assert differences(subject.use(subject.make(device), device), subject.use(value, device)) == []


@pytest.mark.parametrize("name", [name for name, subject in SUBJECTS.items() if subject.copies])
def test_attached_values_can_be_copied(attached: Callable[[str], Any], name: str) -> None:
    """``copy.deepcopy``, ``pickle`` and ``torch.save`` give equal ones."""

    def saved(value: Any) -> Any:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=False)

    value = attached(name)
    with quietly():
        for copied in (copy.deepcopy(value), pickle.loads(pickle.dumps(value)), saved(value)):
            assert differences(value, copied, SUBJECTS[name].ignored) == []
