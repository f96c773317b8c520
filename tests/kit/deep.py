"""What only ``nox -s deep`` tests."""

from __future__ import annotations

import os
from typing import Any

import pytest


def deep(*values: Any) -> list[Any]:
    """Mark each value: a rule is tested with others, and with these where there is time."""
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.deep) for value in values]


def repetitions(usual: int, deep: int) -> int:
    """How often a test repeats itself in this run: seconds in the usual one, minutes where somebody looks longer."""
    return deep if os.environ.get("HYPOTHESIS_PROFILE") == "deep" else usual
