"""The error of weights that cannot be shared."""

from __future__ import annotations


class NotShareable(RuntimeError):
    """A model, or an engine's option, with which the weights cannot be one copy for several engines. The message names it."""
