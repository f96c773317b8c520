"""The tutorial, followed by real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.processes import ROOT
from tests.kit.walkthrough import Page, Walk


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "tutorial").glob("[!i]*.md")), ids=lambda path: path.stem)
def test_the_tutorial_can_be_followed(path: Path, tmp_path: Path) -> None:
    """Its files are written, and its commands print the documented output; a new machine needs nothing else."""
    page = Page(path)
    assert page.steps and not page.missing
    with Walk(page, tmp_path) as walk:
        walk.follow()
        assert len(walk.printed) == len(page.steps)
