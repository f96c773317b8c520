"""``{drawing} name``: a figure that is drawn by code, in the colours of the page, light or dark."""

from __future__ import annotations

from docutils import nodes
from figures import FIGURES
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class DrawingDirective(SphinxDirective):
    """A figure with a caption: the content of the directive."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """See :class:`docutils.parsers.rst.Directive`."""
        name = self.arguments[0]
        if name not in FIGURES:
            raise self.error(f"there is no drawing {name!r}; there are {', '.join(FIGURES)}")
        figure = nodes.figure("", nodes.raw("", FIGURES[name]().svg(), format="html"), classes=["drawing"])
        if self.content:
            self.state.nested_parse(self.content, self.content_offset, caption := nodes.container())
            figure += nodes.caption("", "", *caption.children[0].children)
        return [figure]


def setup(app: Sphinx) -> dict[str, bool]:
    """See :mod:`sphinx.ext`."""
    app.add_directive("drawing", DrawingDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
