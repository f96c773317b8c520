"""What endpoints may return: any object that reaches memory, in every role, the same bit for bit in another process."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from shared_rpc import CapabilityError, Client, Handle, Provider, Server, Ticket, materialize
from tests import library_app
from tests.apps import App
from tests.brokers import BrokerApp, another_worker, worker_pids
from tests.interpreter import Interpreter
from tests.models import Slotted, State
from tests.processes import ROOT, Child

LIBRARY_APP = ROOT / "tests" / "library_app.py"


# Libraries.


class Served:
    """The app of :mod:`tests.library_app` in a server, and a process that is its client."""

    def __init__(self, folder: Path, how: str, device: str) -> None:
        folder.chmod(0o700)
        self.base_path, self.device = str(folder / "s"), device
        environ = {"SHARED_TENSOR_BASE_PATH": self.base_path, "LIBRARY_APP_DEVICE": device, "HF_HUB_OFFLINE": "1"}
        if how == "python app.py":
            self.server = Child(str(LIBRARY_APP), environ=environ | {"SHARED_TENSOR_ROLE": "server"})
        else:
            self.server = Child("-m", "shared_rpc.cli", "serve", str(LIBRARY_APP), environ=environ)
        self.client = Interpreter(environ)
        with Client(self.base_path, device=device, connect_timeout=60) as client:
            client.ping()

    def ask(self, code: str, **names: Any) -> Any:
        """See :meth:`Interpreter.run`."""
        return self.client.run(code, base_path=self.base_path, device=self.device, **names)

    def close(self) -> None:
        """End both."""
        for child in (self.client, self.server):
            child.process.kill()
            child.process.communicate()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("python app.py", "cpu"), id="role-cpu"),
        pytest.param(("shared-rpc serve app.py", "cpu"), id="serve-cpu"),
        pytest.param(("python app.py", "cuda"), id="role-cuda", marks=pytest.mark.gpu),
        pytest.param(("shared-rpc serve app.py", "cuda"), id="serve-cuda", marks=pytest.mark.gpu),
    ],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The app, served in each way."""
    served = Served(tmp_path_factory.mktemp("library"), *request.param)
    yield served
    served.close()


@pytest.fixture
def here(served: Served, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """``here(name)`` is what the object of an endpoint is to be like."""
    monkeypatch.setattr(library_app, "DEVICE", served.device)

    def describe(name: str) -> Any:
        make: Any = getattr(library_app, name)
        return library_app.described(name, make.__wrapped__())

    return describe


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", library_app.LOOK)
def test_objects_of_libraries(served: Served, here: Callable[[str], Any], name: str) -> None:
    """An object comes back whole: its class, every bit of its tensors, and what it does with them."""
    library = library_app.NEEDS.get(name, "torch")
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    seen = served.ask(
        """
        import warnings
        from tests import library_app
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            answer = library_app.described(name, client.call(name))
        """,
        name=name,
    )
    assert seen == _as_json(here(name))


def _as_json(value: Any) -> Any:
    return [_as_json(item) for item in value] if isinstance(value, (list, tuple)) else value
