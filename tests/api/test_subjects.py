"""Values of popular libraries, attached by another process: bit for bit the same, and as usable as the original."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.interpreter import Interpreter
from tests.kit.processes import Child
from tests.kit.subjects import SUBJECTS

APP = """
    from shared_rpc import Provider
    from tests.kit.subjects import SUBJECTS, quietly

    provider = Provider(device={device!r})


    @provider.share
    def subject(name):
        with quietly():
            value = SUBJECTS[name].make({device!r})
            if SUBJECTS[name].use:
                SUBJECTS[name].use(value, {device!r})
        return value
    """


class Served:
    """The app in a worker, and a process that attaches its objects."""

    def __init__(self, device: str, directory: Path) -> None:
        directory.chmod(0o700)
        path = directory / "app.py"
        path.write_text(textwrap.dedent(APP).format(device=device))
        self.names = {"base_path": str(directory / "s"), "device": device}
        environ = {"SHARED_TENSOR_BASE_PATH": self.names["base_path"]}
        self.client = Interpreter()
        self.server = Child("-m", "shared_rpc.cli", "serve", str(path), cwd=directory, environ=environ, has_workers=True)
        self.client.run(
            """
            from shared_rpc import Client
            with Client(path, device=device, connect_timeout=50) as client:
                client.get_server_info()
            """,
            path=self.names["base_path"],
            device=device,
        )

    def attach(self, code: str, **names: Any) -> Any:
        """Run code in the other process, which has the attached ``value`` of the :class:`Subject` of a ``name``."""
        return self.client.run(PRELUDE + textwrap.dedent(code), **self.names, **names)

    def close(self) -> None:
        """End both."""
        self.client.kill()
        self.server.process.terminate()
        self.server.close()


#: The beginning of every piece of a client.
PRELUDE = """
import copy, io, pickle
from tests.kit.comparing import differences
from tests.kit.subjects import SUBJECTS, quietly
subject, value = SUBJECTS[name], client.call("subject", name)
"""


@pytest.fixture(scope="module")
def apps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Served]]:
    """``apps(device)`` is the app, started once."""
    started: dict[str, Served] = {}

    def start(device: str) -> Served:
        if device not in started:
            started[device] = Served(device, tmp_path_factory.mktemp("subjects"))
        return started[device]

    yield start
    for served in started.values():
        served.close()


@pytest.fixture
def served(apps: Callable[[str], Served], device: str) -> Served:
    """The app on a kind of device."""
    return apps(device)


@pytest.fixture
def name(request: pytest.FixtureRequest, device: str) -> str:
    """The name of a subject; only torch's own packed weights are restricted to one kind of device."""
    found: str = request.param
    if device not in SUBJECTS[found].on:
        pytest.skip(f"there is none on {device}")
    return found


@pytest.mark.parametrize("name", SUBJECTS, indirect=True)
def test_values_round_trip(served: Served, name: str) -> None:
    """Class, attributes, strides, ties, flags, hooks and state dict are the same, as are computed results."""
    found, result = served.attach(
        """
        found = subject.differences(value, device)
        with quietly():
            own = subject.make(device)
            answer = [found, differences(subject.use(own, device), subject.use(value, device)) if subject.use else []]
        """,
        name=name,
    )
    assert found == []
    assert result == []


@pytest.mark.parametrize("name", [name for name, subject in SUBJECTS.items() if subject.copies], indirect=True)
def test_attached_values_can_be_copied(served: Served, name: str) -> None:
    """``copy.deepcopy``, ``pickle`` and ``torch.save`` give equal ones."""
    found = served.attach(
        """
        def pickled(value):
            return pickle.loads(pickle.dumps(value))

        def saved(value):
            buffer = io.BytesIO()
            torch.save(value, buffer)
            buffer.seek(0)
            return torch.load(buffer, weights_only=False)

        with quietly():
            answer = {how.__name__: differences(value, how(value), subject.ignored) for how in (copy.deepcopy, pickled, saved)}
        """,
        name=name,
    )
    assert {how: lines for how, lines in found.items() if lines} == {}
