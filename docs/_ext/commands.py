"""``{commands}``: every command of the command line with its arguments and options, from the program itself."""

from __future__ import annotations

import inspect
from typing import Any

import typer
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from shared_rpc.cli.app import app as program


class Commands(SphinxDirective):
    """A section for each command."""

    def run(self) -> list[nodes.Node]:
        """See :class:`docutils.parsers.rst.Directive`."""
        group: Any = typer.main.get_command(program)
        return [_section(name, command) for name, command in sorted(group.commands.items())]


def _section(name: str, command: Any) -> nodes.section:
    section = nodes.section(ids=[f"shared-rpc-{name}"])
    section += nodes.title("", "", nodes.literal(name, name))
    section += [nodes.paragraph("", " ".join(part.split())) for part in inspect.cleandoc(command.help or "").split("\n\n")]
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option"]
    usage = " ".join(["shared-rpc", name, *map(_named, arguments)] + (["[OPTIONS]"] if options else []))
    section += nodes.literal_block(usage, usage, language="text")
    explained = [one for one in [*arguments, *options] if one.help]
    if explained:
        section += nodes.definition_list("", *map(_entry, explained), classes=["options"])
    return section


def _entry(one: Any) -> nodes.definition_list_item:
    text = one.help
    if one.default not in (None, False, ()) and not one.required:
        text += f" Default: {one.default:g}." if isinstance(one.default, float) else f" Default: {one.default}."
    term = nodes.term("", "", nodes.literal("", _named(one)))
    return nodes.definition_list_item("", term, nodes.definition("", nodes.paragraph("", text)))


def _named(one: Any) -> str:
    value = one.metavar or one.name.upper().replace("_", "-")
    if one.param_type_name == "option":
        return ", ".join(one.opts) + ("" if one.is_flag else f" {value}")
    shown = f"{value}..." if one.nargs == -1 else value
    return shown if one.required else f"[{shown}]"


def setup(app: Sphinx) -> dict[str, bool]:
    """See :mod:`sphinx.ext`."""
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
