"""``{commands}``: every command of the command line with its arguments and options, from the program itself."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from enum import Enum
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from shared_rpc.cli.app import app as program
from shared_rpc_ray.cli import app as clusters


class Commands(SphinxDirective):
    """A section for each command."""

    def run(self) -> list[nodes.Node]:
        """See :class:`docutils.parsers.rst.Directive`."""
        group: Any = typer.main.get_command(program)
        found = [*_commands(group), *_commands(typer.main.get_command(clusters), "cluster ")]
        return [_section(name, command) for name, command in sorted(found)]


def _commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


def _section(name: str, command: Any) -> nodes.section:
    section = nodes.section(ids=[f"shared-rpc-{name.replace(' ', '-')}"])
    section += nodes.title("", "", nodes.literal(name, name))
    section += [_text(" ".join(part.split())) for part in inspect.cleandoc(command.help or "").split("\n\n")]
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option"]
    types = get_type_hints(inspect.unwrap(command.callback))
    names = {one.name: _named(one, types.get(one.name)) for one in command.params}
    usage = " ".join(["shared-rpc", name, *(names[one.name] for one in arguments)] + (["[OPTIONS]"] if options else []))
    section += nodes.literal_block(usage, usage, language="text")
    explained = [one for one in [*arguments, *options] if one.help]
    for panel in dict.fromkeys(one.rich_help_panel for one in explained):
        if panel:
            section += nodes.rubric("", panel)
        entries = [_entry(one, names[one.name]) for one in explained if one.rich_help_panel == panel]
        section += nodes.definition_list("", *entries, classes=["options"])
    return section


def _entry(one: Any, name: str) -> nodes.definition_list_item:
    text = one.help
    if one.default not in (None, False, ()) and not one.required:
        text += f" Default: {one.default:g}." if isinstance(one.default, float) else f" Default: {one.default}."
    term = nodes.term("", "", nodes.literal("", name))
    return nodes.definition_list_item("", term, nodes.definition("", _text(text)))


def _text(text: str) -> nodes.paragraph:
    """Return a paragraph in which options and settings are code, so that their hyphens and quotes stay as they are."""
    pieces = re.split(r"((?<!\S)--[\w-]+|[\w-]+ = [^\s,]+)", text)
    return nodes.paragraph(
        "", "", *(nodes.literal("", piece) if at % 2 else nodes.Text(piece) for at, piece in enumerate(pieces))
    )


def _choices(kind: Any) -> list[str]:
    """Return the values of a type that has a few, or may also be None."""
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    if inspect.isclass(kind) and issubclass(kind, Enum):
        return [str(member.value) for member in kind]
    return [value for part in get_args(kind) for value in _choices(part)]


def _named(one: Any, kind: Any) -> str:
    value = one.metavar or "|".join(_choices(kind)) or one.name.upper().replace("_", "-")
    if one.param_type_name == "option":
        return ", ".join(one.opts) + ("" if one.is_flag else f" {value}")
    shown = f"{value}..." if one.nargs == -1 else value
    return shown if one.required else f"[{shown}]"


def setup(app: Sphinx) -> dict[str, bool]:
    """See :mod:`sphinx.ext`."""
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
