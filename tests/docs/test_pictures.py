"""The pictures of the command line in the documentation are up to date."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.pictures import __main__ as pictures

#: Those whose text depends neither on the machine, as the findings of ``doctor`` do, nor on measurements.
TAKEN = ("ls", "info", "objects", "devices", "top")


def words(svg: Path) -> set[str]:
    """Return a picture's words, except ids, numbers, units, and truncated words, which differ between runs."""
    texts = ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")
    # An id may be on two lines.
    written = re.sub(r"\b(?:[0-9a-f]*\d[0-9a-f]*|[a-f]{2})\b", " ", " ".join("".join(text.itertext()) for text in texts))
    found = re.findall(r"[^\W\d]{2,}+(?!…)", written)
    return set(found) - {"KiB", "MiB", "GiB", "TiB"}


@pytest.fixture(scope="module")
def anew(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with new pictures of a real server."""
    folder = tmp_path_factory.mktemp("pictures")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pictures, "FOLDER", folder)
        patched.setattr(sys, "argv", ["pictures", *TAKEN])
        pictures.main()
    return folder


@pytest.mark.deep
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", TAKEN)
def test_a_picture_shows_the_commands_output(name: str, anew: Path) -> None:
    """Titles, columns and rows: after a change, 'nox -s pictures' takes it again."""
    assert words(anew / f"{name}.svg") == words(pictures.HERE.parent / "_static" / "cli" / f"{name}.svg")


def test_every_picture_can_be_taken_again() -> None:
    """Each existing one is made by the program, and none is missing."""
    kept = (pictures.HERE.parent / "_static" / "cli").glob("*.svg")
    assert {path.stem for path in kept} == {picture.name for picture in pictures.PICTURES}
