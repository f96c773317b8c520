"""Lazy objects and modules in an app: none of them is evaluated to load or to serve it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest

from shared_rpc.provider import app
from shared_rpc.provider.provider import Provider
from shared_rpc.provider.spawn.target import target_of
from shared_rpc.worker.beginning import Beginning
from shared_rpc.zygote.imports import Files, shadowed


class Lazy:
    """A proxy as Django's ``settings`` before ``configure()``: reading anything through it evaluates it, which fails."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"evaluated for {name}")

    __class__ = property(lambda self: self.anything)  # type: ignore[assignment]


class LazyModule(ModuleType):
    """A module that is imported when an attribute of it is read, as ``importlib.util.LazyLoader`` makes them."""

    def __getattribute__(self, name: str) -> Any:
        raise ImportError(f"imported for {name}")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the person's, with a file, a provider and lazy globals."""
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
def test_the_imports_of_an_app() -> None:
    """They are reported: the person's own modules, and installed ones."""
    imports = Beginning().imports()
    assert "lazy_app" in imports.own
    assert "numpy" in imports.installed


def test_looking_for_an_apps_providers(own: ModuleType) -> None:
    """Only providers are."""
    assert app.load_providers("lazy_app") == [vars(own)["provider"]]


def test_looking_for_the_module_of_a_provider(own: ModuleType) -> None:
    """It is found by the identity of its global names."""
    assert target_of(vars(own)["provider"]) == "lazy_app:provider"


@pytest.mark.usefixtures("own")
def test_the_files_of_imports(tmp_path: Path) -> None:
    """A zygote looks at those of modules that are loaded."""
    (tmp_path / "later.py").write_text("")
    assert not Files().changed()
    assert shadowed([str(tmp_path)]) == str(tmp_path / "later.py")
