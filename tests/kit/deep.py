"""Parameters of tests that only ``nox -s deep`` runs."""

from __future__ import annotations

from typing import Any

import pytest

__all__ = ["deep"]


def deep(*values: Any) -> list[Any]:
    """Mark each value: a rule is tested with others, and with these where there is time."""
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.deep) for value in values]
