"""The rule of what is installed, and so does not change under a zygote."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shared_rpc.zygote import imports
from shared_rpc.zygote.imports import is_installed


@pytest.mark.parametrize(
    "path",
    [json.__file__, torch.__file__, sysconfig.get_path("stdlib"), "/opt/app/dist-packages", "/env/lib/site-packages/a/b.py"],
    ids=["standard library", "package", "its directory", "of Debian", "of another environment"],
)
def test_code_of_packages_and_of_the_interpreter_is_installed(path: str) -> None:
    """Files and directories alike."""
    assert is_installed(path)


@pytest.fixture
def folders() -> Iterator[None]:
    """What the rule has found in ``sys.path`` is found again, before the test and after it."""
    imports._folders.cache_clear()
    yield
    imports._folders.cache_clear()


@pytest.mark.parametrize("metadata", [True, False], ids=["pip's --target", "a person's"])
def test_a_directory_with_the_metadata_of_distributions_is_one_of_packages(
    folders: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metadata: bool
) -> None:
    """Whatever its name is, if ``sys.path`` leads to it."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / ("package-1.0.dist-info" if metadata else "package")).mkdir()
    assert is_installed(str(tmp_path / "package" / "module.py")) is metadata


def test_an_installed_path_may_be_named_through_a_link(folders: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of packages that is a link is one by both of its names."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "site-packages").symlink_to(tmp_path / "elsewhere")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    assert is_installed(str(tmp_path / "elsewhere" / "module.py"))


@pytest.mark.parametrize("path", ["", "app.py", "/home/me/my-site-packages/app.py", "<frozen importlib._bootstrap>"])
def test_code_of_a_person_is_not_installed(path: str) -> None:
    """Nor is what has no file."""
    assert not is_installed(path)
