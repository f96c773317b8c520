"""The error of weights that cannot be shared."""

from __future__ import annotations


class NotShareable(RuntimeError):
    """The weights cannot be shared because of a model or an option of an engine, which the message names."""
