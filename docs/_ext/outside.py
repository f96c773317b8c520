"""Links out of the documentation, to folders of the repository: here they are the path. (Links to files are downloads.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform


class Outside(SphinxPostTransform):
    """Replaces links to folders that exist outside of the documentation."""

    default_priority = 5  # before MyST says that there is no such page

    def run(self, **options: Any) -> None:
        """See :class:`docutils.transforms.Transform`."""
        root = Path(self.app.srcdir).parent
        for node in list(self.document.findall(pending_xref)):
            if node.get("reftype") != "myst":
                continue
            folder = (Path(self.app.srcdir, self.env.docname).parent / node["reftarget"]).resolve()
            if folder.with_suffix(".md").exists():
                continue  # a page of that name
            if folder.is_dir() and folder.is_relative_to(root):
                path = f"{folder.relative_to(root)}/"
                shown = node.astext()
                text = nodes.Text("" if shown.rstrip("/") == path.rstrip("/") else f"{shown} in ")
                node.replace_self([text, nodes.literal(path, path)])


def setup(app: Sphinx) -> dict[str, bool]:
    """See :mod:`sphinx.ext`."""
    app.add_post_transform(Outside)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
