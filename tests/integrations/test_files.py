"""What tells the files of a checkpoint from others."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shared_rpc.integrations.files import files_of
from shared_rpc.integrations.keys import Unshareable, source_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with a part in a folder of its own, as of sentence-transformers."""
    for name in ("config.json", "model.safetensors", "1_Dense/model.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    return tmp_path


def test_a_file_in_a_folder_of_the_checkpoint_counts(folder: Path) -> None:
    """A module reads weights from there; whoever loads after a change of them gets others."""
    before = source_of(folder, {}, "config.json")
    (folder / "1_Dense" / "model.safetensors").write_bytes(b"other")
    assert source_of(folder, {}, "config.json") != before


def test_a_link_that_leads_back_is_followed_once(folder: Path) -> None:
    """Two of them would double the paths at each of forty steps."""
    before = files_of(str(folder))
    for name in ("back", "again"):
        (folder / "1_Dense" / name).symlink_to(folder)
    assert files_of(str(folder)) == before


def test_it_is_plain_data(folder: Path) -> None:
    """It travels in requests, and is compared there."""
    found = files_of(str(folder))
    assert json.loads(json.dumps(found)) == found
    assert [name for name, *_ in found] == ["1_Dense/model.safetensors", "config.json", "model.safetensors"]


def test_what_is_not_there_has_no_key(folder: Path) -> None:
    """Neither has a file that is only a name."""
    with pytest.raises(Unshareable, match="its files cannot be told"):
        source_of(folder, {"subfolder": "missing"}, "config.json")
    os.symlink("nowhere", folder / "other.bin")
    with pytest.raises(Unshareable, match="its files cannot be told"):
        source_of(folder, {}, "config.json")
