"""``{drawing} name``: a figure of ``docs/drawings``, put into the page so that it has its colours, light or dark."""

from __future__ import annotations

from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

_FOLDER = Path(__file__).parent.parent / "drawings"


class DrawingDirective(SphinxDirective):
    """A figure with a caption: the content of the directive."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """See :class:`docutils.parsers.rst.Directive`."""
        file = _FOLDER / f"{self.arguments[0]}.svg"
        self.env.note_dependency(str(file))
        figure = nodes.figure("", nodes.raw("", file.read_text(), format="html"), classes=["drawing"])
        if self.content:
            self.state.nested_parse(self.content, self.content_offset, caption := nodes.container())
            figure += nodes.caption("", "", *caption.children[0].children)
        return [figure]


def setup(app: Sphinx) -> dict[str, bool]:
    """See :mod:`sphinx.ext`."""
    app.add_directive("drawing", DrawingDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
