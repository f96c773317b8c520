"""Tables generated from the code: the messages of the protocol, the codes of errors."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import msgspec
from docutils import nodes
from docutils.frontend import get_default_settings
from docutils.parsers.rst import Parser
from docutils.utils import new_document
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective, sphinx_domains

from shared_rpc import errors
from shared_rpc.protocol import catalogue
from shared_rpc.protocol import worker as worker_messages
from shared_rpc.protocol.messages import Message


class _Made(SphinxDirective):
    """A directive for tables with cells in reStructuredText, like docstrings."""

    def _table(self, widths: Sequence[int], head: Sequence[str], rows: Iterator[Sequence[str]]) -> nodes.table:
        group = nodes.tgroup("", *(nodes.colspec(colwidth=width) for width in widths), cols=len(widths))
        group += nodes.thead("", self._row(head))
        group += nodes.tbody("", *(self._row(row) for row in rows))
        return nodes.table("", group, classes=["made", "colwidths-given"])

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


class WireMessages(_Made):
    """The messages on one kind of socket: ``client`` or ``worker``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """See :class:`docutils.parsers.rst.Directive`."""
        side = self.arguments[0]
        of_workers = side == "worker"
        kinds = [
            (number, kind)
            for number, kind in catalogue._KINDS.items()
            if (kind.__module__ == worker_messages.__name__) == of_workers
        ]
        rows = ((f"{number}", f"``{kind.__name__}``", _fields(kind), inspect.getdoc(kind) or "") for number, kind in kinds)
        return [self._table([1, 3, 7, 8], ["kind", "message", "body", "purpose"], rows)]


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


class ErrorCodes(_Made):
    """The classes of ``shared_rpc.errors`` with their codes and fields."""

    def run(self) -> list[nodes.Node]:
        """See :class:`docutils.parsers.rst.Directive`."""
        return [self._table([4, 3, 4], ["code", "error", "detail"], self._rows())]

    def _rows(self) -> Iterator[Sequence[str]]:
        for code, kind in errors._BY_CODE.items():
            name = f"shared_rpc.errors.{kind.__name__}" if issubclass(kind, errors.SharedRPCError) else kind.__name__
            role = f":class:`~{name}`" if "." in name else f"``{name}``"
            detail = sorted(kind.restore("", {}).detail()) if issubclass(kind, errors.SharedRPCError) else []
            yield f"``{code}``", role, ", ".join(f"``{name}``" for name in detail) or "none"


def setup(app: Sphinx) -> dict[str, bool]:
    """See :mod:`sphinx.ext`."""
    app.add_directive("wire-messages", WireMessages)
    app.add_directive("error-codes", ErrorCodes)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
