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
        return [self._section(name, command) for name, command in sorted(group.commands.items())]

    def _section(self, name: str, command: Any) -> nodes.section:
        section = nodes.section(ids=[f"shared-rpc-{name}"])
        section += nodes.title("", "", nodes.literal(name, name))
        doc = inspect.cleandoc(command.help or "")
        section += [nodes.paragraph("", " ".join(part.split())) for part in doc.split("\n\n")]
        arguments = [one for one in command.params if one.param_type_name == "argument"]
        options = [one for one in command.params if one.param_type_name == "option" and one.name != "help"]
        usage = " ".join(["shared-rpc", name, *(one.make_metavar(self._context(command)) for one in arguments)])
        section += nodes.literal_block(usage, usage + (" [OPTIONS]" if options else ""), language="text")
        if options or any(one.help for one in arguments):
            listing = nodes.definition_list(classes=["options"])
            for one in [*(one for one in arguments if one.help), *options]:
                listing += self._entry(one, command)
            section += listing
        return section

    def _entry(self, one: Any, command: Any) -> nodes.definition_list_item:
        context = self._context(command)
        value = "" if one.param_type_name == "argument" or one.is_flag else f" {one.make_metavar(context)}"
        names = one.make_metavar(context) if one.param_type_name == "argument" else ", ".join(one.opts)
        term = nodes.term("", "", nodes.literal("", f"{names}{value}"))
        text = one.help or ""
        if one.default not in (None, False, ()) and not one.required:
            text += f" Default: {one.default:g}." if isinstance(one.default, float) else f" Default: {one.default}."
        return nodes.definition_list_item("", term, nodes.definition("", nodes.paragraph("", text)))

    @staticmethod
    def _context(command: Any) -> Any:
        return command.make_context(command.name, [], resilient_parsing=True)


def setup(app: Sphinx) -> dict[str, bool]:
    """See :mod:`sphinx.ext`."""
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
