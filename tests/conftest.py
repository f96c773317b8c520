"""Hooks of all tests. Their fixtures are in :mod:`tests.kit.fixtures`."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.kit.conformance")


def pytest_configure(config: pytest.Config) -> None:
    """Load the fixtures where tests run: the distributing process (``-n``) does not import torch, which takes 2 s."""
    distributes = config.getoption("dist", "no") != "no" and config.getoption("tx")
    if not distributes or config.getoption("collectonly"):
        config.pluginmanager.import_plugin("tests.kit.fixtures")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests that need a whole GPU last: parallel test processes wait for each of them."""
    items.sort(key=lambda item: item.get_closest_marker("whole_gpu") is not None)
