"""How often a test repeats itself: seconds in the usual run, minutes where somebody looks longer (``nox -s deep``)."""

from __future__ import annotations

import os

__all__ = ["repetitions"]


def repetitions(usual: int, deep: int) -> int:
    """How many there are in this run."""
    return deep if os.environ.get("HYPOTHESIS_PROFILE") == "deep" else usual
