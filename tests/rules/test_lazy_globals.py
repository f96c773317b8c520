"""Lazy objects and modules in an app: loading or serving it evaluates none of them."""

from __future__ import annotations

import importlib.util
import json
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any
from zipfile import ZipFile

import numpy
import pytest
import torch

from shared_rpc.provider import app
from shared_rpc.provider.provider import Provider
from shared_rpc.provider.spawn import target_of
from shared_rpc.zygote import imports
from shared_rpc.zygote.imports import Files, is_installed, shadowed


class Lazy:
    """A proxy like Django's ``settings`` before ``configure()``: reading any attribute evaluates it, which fails."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"evaluated for {name}")

    __class__ = property(lambda self: self.anything)  # type: ignore[assignment]


class LazyModule(ModuleType):
    """A module that is imported on the first read of an attribute, like those of ``importlib.util.LazyLoader``."""

    def __getattribute__(self, name: str) -> Any:
        raise ImportError(f"imported for {name}")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A user's module with a file, a provider and lazy globals."""
    path = tmp_path / "lazy_app.py"
    path.write_text("")
    spec = importlib.util.spec_from_file_location("lazy_app", path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    vars(module).update(settings=Lazy(), later=LazyModule("later"), zeros=numpy.zeros, provider=Provider())
    monkeypatch.setitem(sys.modules, "lazy_app", module)
    monkeypatch.setitem(sys.modules, "later", vars(module)["later"])
    monkeypatch.setitem(sys.modules, "settings", vars(module)["settings"])
    return module


@pytest.mark.usefixtures("own")
def test_imports_of_an_app_are_reported() -> None:
    """The user's own modules, and installed ones."""
    installed, own = imports.imported()
    assert "lazy_app" in own
    assert "numpy" in installed


def test_only_providers_are_found(own: ModuleType) -> None:
    """Among an app's lazy globals."""
    assert app.load_providers("lazy_app") == [vars(own)["provider"]]


def test_modules_of_a_provider_are_found_by_identity(own: ModuleType) -> None:
    """Of their global names."""
    assert target_of(vars(own)["provider"]) == "lazy_app:provider"


@pytest.mark.usefixtures("own")
def test_files_of_imports_are_those_of_loaded_modules(tmp_path: Path) -> None:
    """As a zygote checks them, in directories and archives."""
    (tmp_path / "later.py").write_text("")
    assert not Files().changed()
    assert shadowed([str(tmp_path)]) == str(tmp_path / "later.py")
    with ZipFile(tmp_path / "app.pyz", "w") as archive:
        archive.writestr("later/__init__.py", "")
    assert shadowed([str(tmp_path / "app.pyz")]) == str(tmp_path / "app.pyz" / "later.py")


# Installed code.


@pytest.mark.parametrize(
    "path",
    [json.__file__, torch.__file__, sysconfig.get_path("stdlib"), "/opt/app/dist-packages", "/env/lib/site-packages/a/b.py"],
    ids=["standard library", "package", "its directory", "of Debian", "of another environment"],
)
def test_code_of_packages_and_of_the_interpreter_is_installed(path: str) -> None:
    """Files and directories alike."""
    assert is_installed(path)


@pytest.mark.parametrize("path", ["", "app.py", "/home/me/my-site-packages/app.py", "<frozen importlib._bootstrap>"])
def test_other_code_is_not_installed(path: str) -> None:
    """Nor is code without a file."""
    assert not is_installed(path)


@pytest.mark.parametrize("metadata", [True, False], ids=["pip's --target", "a person's"])
def test_directories_with_metadata_contain_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metadata: bool) -> None:
    """Of distributions, with any name, if they are on ``sys.path``."""
    monkeypatch.setattr(imports, "_folders", imports._folders.__wrapped__)  # without its cache
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / ("package-1.0.dist-info" if metadata else "package")).mkdir()
    assert is_installed(str(tmp_path / "package" / "module.py")) is metadata
