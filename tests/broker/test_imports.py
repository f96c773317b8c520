"""What starts without torch: a broker, whoever asks it, the command line."""

from __future__ import annotations

import textwrap

import pytest

from tests.kit.processes import Child, python


def loaded_by(code: str) -> set[str]:
    """The modules that a process has after ``code``."""
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
    ],
)
def test_importing_loads_no_torch(code: str) -> None:
    """Sharing a function and asking a server start at once; torch takes seconds."""
    assert not {"torch", "shared_rpc.codec", "shared_rpc.memory.backends.vmm"} & loaded_by(code)


def test_a_blocking_client_loads_no_server_and_no_event_loop() -> None:
    """A process that only calls has what a call needs."""
    loaded = loaded_by("from shared_rpc import Client; Client().close()")
    rooms = {".".join(name.split(".")[:2]) for name in loaded if name.startswith("shared_rpc.")}
    assert not {f"shared_rpc.{room}" for room in ("server", "broker", "observability", "execution", "provider")} & rooms
    assert not {"anyio", "asyncio", "shared_rpc.operations.channels"} & loaded


def test_naming_modules_that_travel_as_code_loads_no_torch() -> None:
    """An app that is loaded is named so before it has imported anything."""
    assert "torch" not in loaded_by("import shared_rpc.codec.by_value")


def test_importing_the_package_loads_nothing_of_it() -> None:
    """Every name comes when it is used."""
    assert {name for name in loaded_by("import shared_rpc") if name.startswith("shared_rpc")} == {"shared_rpc"}


#: A server whose records come from elsewhere, as those of a worker process do.
BROKER = """
    import os, sys
    from contextlib import nullcontext
    from shared_rpc.execution.endpoints import Registry, describe
    from shared_rpc.memory.backends.host import HOST
    from shared_rpc.memory.records import Record
    from shared_rpc.protocol.records import EMPTY_TABLE
    from shared_rpc.server.acceptor import Acceptor
    from shared_rpc.server.core import Core
    from shared_rpc.execution.transfer import transfers_of
    from shared_rpc.server.engine import Engine
    from shared_rpc.protocol.values import decode_call
    from shared_rpc.execution.outcomes import Completed

    class Elsewhere:
        busy = 0
        transfers = transfers_of()

        def start(self, run, owner):
            owner.began(run)
            args, kwargs = decode_call(run.arguments.args, run.arguments.kwargs)
            run.arguments.close()
            segment = HOST.create(4096)
            os.pwrite(segment.fileno(), f"built from {args} {kwargs}".encode(), 0)
            owner.ended(run, Completed(Record(b"skeleton", EMPTY_TABLE, [segment], 4096), None))

        def withdraw(self, run):
            pass

        async def finish(self):
            pass

        def cancel(self, run):
            pass

        def info(self):
            return {"workers": []}

        def reclaim(self):
            pass

        def close(self):
            pass

    def model(hidden_size, layers=2): ...
    def load(hidden_size, layers=2): ...

    path = sys.argv[1]
    elsewhere = Elsewhere()
    core = Core(
        Registry([describe(model), describe(load, managed=True)]), elsewhere, "cpu", socket_path=path
    )
    acceptor = Acceptor(core, path, 10)
    engine = Engine(core, elsewhere, "the broker", acceptor.serve)
    engine.start()
    print("serving", flush=True)
    sys.stdin.readline()
    print("holds", len(core.objects), "objects,", core.objects.nbytes, "bytes,", len(core.leases), "leases")
    print("loaded", *sys.modules)
    sys.stdin.readline()
    acceptor.remove_socket()
    engine.stop()
"""

#: A client that takes records and rebuilds nothing.
FETCHER = """
    import os, sys
    from shared_rpc import Client, errors
    from shared_rpc.operations.calls import fetch

    with Client(socket_path=sys.argv[1], connect_timeout=0) as client:
        first = client._run(fetch("model", (8,), {}, "cpu"))
        again = client._run(fetch("model", (), {"hidden_size": 8, "layers": 2}, "cpu"))
        held = client._run(fetch("load", ([1, (2.5, b"x")],), {"layers": 1 << 70}, "cpu"))
        for result in (first, again, held):
            memory = os.pread(result.segments[0].fileno(), 64, 0).rstrip(bytes(1))
            print("record", result.message.managed, bytes(result.skeleton), memory)
            result.close()
        print("same", first.message.segments == again.message.segments)
        try:
            client._run(fetch("model", (), {}, "cpu"))
        except TypeError as error:
            print("refused", error)
        print("info", client.get_object_info(held.message.object_id)["cache_key"])
        print("endpoints", *client.list_endpoints())
        print("attached", *sys.modules)
        sys.stdin.readline()
"""


@pytest.fixture
def broker(base_path: str, children: list[Child]) -> tuple[Child, str]:
    """A process that serves records, and its socket."""
    path = f"{base_path}-cpu.sock"
    child = Child("-c", textwrap.dedent(BROKER), path, fresh=True)
    children.append(child)
    child.expect("serving")
    return child, path


def test_a_broker_and_a_client_need_no_torch(broker: tuple[Child, str], children: list[Child]) -> None:
    """Building, caching, leasing and handing out memory, and asking for it, is done with plain data and descriptors."""
    server, path = broker
    client = Child("-c", textwrap.dedent(FETCHER), path, fresh=True)
    children.append(client)
    assert client.expect("record") == "record False b'skeleton' b'built from [8] {}'"
    assert client.expect("record") == "record False b'skeleton' b'built from [8] {}'"
    assert client.expect("record") == (
        "record True b'skeleton' b\"built from [[1, (2.5, b'x')]] {'layers': 1180591620717411303424}\""
    )
    assert client.expect("same") == "same True"
    assert client.expect("refused") == "refused model(): missing a required argument: 'hidden_size'"
    assert client.expect("info") == "info load(hidden_size=[1, (2.5, b'x',)], layers=1180591620717411303424)"
    assert client.expect("endpoints") == "endpoints model load"
    server.tell("report")
    assert server.expect("holds") == "holds 2 objects, 8192 bytes, 1 leases"
    for child, word in ((server, "loaded"), (client, "attached")):
        loaded = set(child.expect(word).split())
        assert "shared_rpc.protocol.frames" in loaded
        assert not {"torch", "numpy", "shared_rpc.codec", "cuda.bindings"} & loaded
    client.tell("enough")
    assert client.close() == (0, "")
    server.tell("enough")
    assert server.close() == (0, "")


def test_a_command_that_asks_loads_no_torch(broker: tuple[Child, str]) -> None:
    """``shared-rpc ls`` finds the server, prints it and ends, all without it."""
    _, path = broker
    code = """
        import sys
        from shared_rpc.cli.__main__ import main
        sys.argv[1:] = ["ls", "--json"]
        try:
            main()
        except SystemExit:
            pass
        print("torch is", "there" if "torch" in sys.modules else "not there")
    """
    child = python(code, fresh=True)
    assert path in child.expect("socket_path")
    assert child.expect("torch is") == "torch is not there"
    assert child.close() == (0, "")
