"""The table of the protocol's messages, generated from the code."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any, get_args

import msgspec
from docutils import nodes
from docutils.frontend import get_default_settings
from docutils.parsers.rst import Parser
from docutils.utils import new_document
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective, sphinx_domains

from shared_rpc.protocol import catalogue, worker
from shared_rpc.protocol.messages import Message


class WireMessages(SphinxDirective):
    """The messages between clients and servers. Cells are in reStructuredText, like docstrings."""

    def run(self) -> list[nodes.Node]:
        """See :class:`docutils.parsers.rst.Directive`."""
        kinds = [entry for entry in catalogue._KINDS.items() if entry[1].__module__ != worker.__name__]
        group = nodes.tgroup("", *(nodes.colspec(colwidth=width) for width in (1, 3, 7, 8)), cols=4)
        group += nodes.thead("", self._row(["kind", "message", "body", "purpose"]))
        rows = ([f"{number}", f"``{kind.__name__}``", _fields(kind), inspect.getdoc(kind) or ""] for number, kind in kinds)
        group += nodes.tbody("", *map(self._row, rows))
        return [nodes.table("", group, classes=["made", "colwidths-given"])]

    def _row(self, cells: Sequence[str]) -> nodes.row:
        return nodes.row("", *(nodes.entry("", *self._parsed(cell)) for cell in cells))

    def _parsed(self, text: str) -> list[nodes.Node]:
        settings = get_default_settings(Parser)
        settings.env = self.env
        document = new_document("a docstring", settings)
        document.reporter = self.state.document.reporter
        with sphinx_domains(self.env):
            Parser().parse(text, document)
        return document.children


def _fields(kind: type[Message]) -> str:
    inherited = {field.name for base in kind.__bases__ for field in msgspec.structs.fields(base)}
    own = [field for field in msgspec.structs.fields(kind) if field.name not in inherited]
    lines = [f"as ``{kind.__bases__[0].__name__}``"] if inherited else []
    for field in own:
        default = "" if field.required else f" = {_default(field)}"
        lines.append(f"``{field.name}: {shown(field.type)}{default}``")
    return "\n\n".join(["| " + "\n| ".join(lines)]) if lines else "nothing"


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is not msgspec.NODEFAULT:
        return "an empty table" if isinstance(field.default, msgspec.Raw) else repr(field.default)
    return {list: "[]", dict: "{}"}.get(field.default_factory, "…")


def shown(annotation: Any) -> str:
    """Return a type as source code without module names."""
    if get_args(annotation):
        return re.sub(r"\b[a-z_]+(?:\.[a-z_]+)*\.(?=[A-Z])", "", str(annotation)).replace("typing.", "")
    return "None" if annotation is type(None) else getattr(annotation, "__name__", str(annotation))


def setup(app: Sphinx) -> dict[str, bool]:
    """See :mod:`sphinx.ext`."""
    app.add_directive("wire-messages", WireMessages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
