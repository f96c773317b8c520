"""Options of ``serve`` in a file: the table ``tool.shared-rpc`` of a ``pyproject.toml``, or a file given by ``--config``."""

from __future__ import annotations

import inspect
import os
import stat
import tomllib
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import typer

from shared_rpc.cli.options import Misuse
from shared_rpc.cli.rendering import complain
from shared_rpc.protocol.peers import is_own_or_root, named

_PROJECT = "pyproject.toml"


def read_options(context: typer.Context, file: str | None) -> str | None:
    """Use a file's values as the defaults of a command's options: a callback of its option ``--config``.

    The option is declared before all others, so that their defaults are read after it, and after the argument ``target``.

    :raises Misuse: if the file cannot be read, has a key that is not a long option's name, or a value of the wrong type.
    """
    path = Path(file) if file is not None else _project_of(context.params.get("target"))
    if path is None or context.resilient_parsing:  # as for the completion in a shell
        return file
    try:
        with path.open("rb") as opened:
            reason = _reason_not_to_use(path, os.fstat(opened.fileno())) if file is None else ""
            if reason:
                complain(f"{path} is not used: {reason}. To use it, add --config {path}")
            else:
                context.default_map = _options(path, tomllib.load(opened), context)
    except OSError as error:
        raise Misuse(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise Misuse(f"{path} is not TOML: {error}") from None
    return file


def _project_of(target: str | None) -> Path | None:
    """Return the nearest ``pyproject.toml`` above an app given as a file."""
    place = (target or "").partition(":")[0]
    folders = Path(place).resolve().parents if place.endswith(".py") else ()
    return next((folder / _PROJECT for folder in folders if (folder / _PROJECT).is_file()), None)


def _reason_not_to_use(path: Path, found: os.stat_result) -> str:
    """Return the reason why a file may be another user's, who must not control this user's processes; ``""`` if it is not."""
    # A link may be another user's too, and lead to a file of this user that is not meant for this app.
    for uid in (path.lstat().st_uid, found.st_uid):
        if not is_own_or_root(uid):
            return f"it belongs to {named(uid)}"
    return "every user can write to it" if found.st_mode & stat.S_IWOTH else ""


def _options(path: Path, table: Any, context: typer.Context) -> dict[str, Any]:
    """Return the values in a file by the names of the parameters."""
    if path.name == _PROJECT:
        for name in ("tool", "shared-rpc"):
            table = table.get(name, {})
            if not isinstance(table, dict):
                raise Misuse(f"{path}: {name} is not a table: write [tool.shared-rpc]")
    options = {name.removeprefix("--"): one for one in context.command.params for name in one.opts if name.startswith("--")}
    del options["config"]
    types = get_type_hints(inspect.unwrap(context.command.callback or read_options))
    for key, value in table.items():
        if key not in options:
            raise Misuse(f"{path}: {key!r} is no option of 'shared-rpc {context.info_name}': use {', '.join(sorted(options))}")
        try:
            msgspec.convert(value, types[options[key].name or ""])
            options[key].process_value(context, value)  # its limits
        except (msgspec.ValidationError, typer.BadParameter) as error:
            # The allowed None is left out, since a file cannot contain it.
            raise Misuse(f"{path}: {key} = {value!r}: {str(error).replace(' | null', '')}") from None
    return {options[key].name or "": value for key, value in table.items()}
