"""Tests that run only in ``nox -s deep``."""

from __future__ import annotations

import os
from typing import Any

import pytest


def deep(*values: Any) -> list[Any]:
    """Mark each value for ``nox -s deep``: other values test the rule in the usual run."""
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.deep) for value in values]


def repetitions(usual: int, deep: int) -> int:
    """Return the number of repetitions of a test: for seconds in the usual run, for minutes in ``nox -s deep``."""
    return deep if os.environ.get("HYPOTHESIS_PROFILE") == "deep" else usual
