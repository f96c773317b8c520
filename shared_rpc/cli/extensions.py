"""Commands of other distributions: entry points of the group ``shared_rpc.cli``, each a typer application."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import typer
from typer.core import TyperGroup

from shared_rpc.errors import ConfigurationError

__all__ = ["Commands"]

_GROUP = "shared_rpc.cli"
#: Commands that a known distribution has, and how to install that.
_KNOWN = {"cluster": "pip install 'shared-rpc[ray]'"}


class Commands(TyperGroup):
    """The commands of this package, and those of other distributions, which are imported when they are used."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands that are installed."""
        return [*super().list_commands(ctx), *sorted(importlib.metadata.entry_points(group=_GROUP).names)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, None if there is none of that name.

        :raises ConfigurationError: for one whose distribution is not installed.
        """
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        for found in importlib.metadata.entry_points(group=_GROUP, name=cmd_name):
            command: Any = typer.main.get_command(found.load())
            command.name = cmd_name
            return command
        if cmd_name in _KNOWN:
            raise ConfigurationError(f"the command {cmd_name!r} is not installed: {_KNOWN[cmd_name]}")
        return None
