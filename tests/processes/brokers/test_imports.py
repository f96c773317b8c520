"""Programs that start without torch: a broker, its monitoring clients, the command line."""

from __future__ import annotations

import pytest

from tests.kit.processes import python


def loaded_by(code: str) -> set[str]:
    """Return the modules of a process after ``code``."""
    child = python(f"{code}\nimport sys\nprint('loaded', *sys.modules)", fresh=True)
    loaded = set(child.expect("loaded").split())
    assert child.close() == (0, "")
    return loaded


@pytest.mark.parametrize(
    "code",
    [
        "import shared_rpc",
        "from shared_rpc import Client, Handle, Provider, Server, errors",
        "import shared_rpc.operations.client",
        "import shared_rpc.server.server",
        "import shared_rpc.provider.provider",
        "import shared_rpc.cli.app",
        "from shared_rpc import Provider; provider = Provider(execution_mode='local'); provider.share('f')(lambda x: x)",
        "import sys; from shared_rpc.cli.__main__ import main; sys.argv[1:] = ['ls']; sys.exit = print; main()",
    ],
)
def test_importing_loads_no_torch(code: str) -> None:
    """Sharing a function and connecting to a server start at once; torch takes seconds."""
    assert not {"torch", "shared_rpc.codec", "shared_rpc.memory.backends.vmm"} & loaded_by(code)


def test_a_blocking_client_loads_no_server_and_no_event_loop() -> None:
    """A process that only calls loads only the modules for that."""
    loaded = loaded_by("from shared_rpc import Client; Client().close()")
    rooms = {".".join(name.split(".")[:2]) for name in loaded if name.startswith("shared_rpc.")}
    assert not {f"shared_rpc.{room}" for room in ("server", "broker", "observability", "execution", "provider")} & rooms
    assert not {"anyio", "asyncio", "shared_rpc.operations.channels"} & loaded


def test_registering_modules_by_value_loads_no_torch() -> None:
    """An app being loaded is registered before its imports."""
    assert "torch" not in loaded_by("import shared_rpc.codec.by_value")


def test_importing_the_package_loads_no_submodules() -> None:
    """Every name is loaded on first use."""
    assert {name for name in loaded_by("import shared_rpc") if name.startswith("shared_rpc")} == {"shared_rpc"}
