"""Long-running commands, and scripts that ``shared-rpc run`` starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kit.commands import MODULE
from tests.kit.processes import Child
from tests.kit.scripts import Place
from tests.kit.world import World


@pytest.fixture(scope="session")
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One directory for the zygotes of all tests: they start as slowly as a script without one."""
    path = tmp_path_factory.mktemp("z")
    path.chmod(0o700)
    yield path
    Place(path, path).close()


@pytest.fixture
def place(tmp_path: Path, sockets: Path) -> Place:
    """A separate directory for the scripts of a test."""
    return Place(tmp_path, sockets)


@pytest.fixture
def start(world: World, tmp_path: Path) -> Callable[..., Child]:
    """``start(*arguments)`` starts a long-running ``shared-rpc``."""
    return lambda *words, cwd=None, environ=None: world.start(*MODULE, *words, cwd=cwd or tmp_path, environ=environ)
