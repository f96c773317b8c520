"""``shared-rpc serve``: the choice of the app, the address and the options."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from shared_rpc import Provider
from shared_rpc.cli.options import quotas_of
from shared_rpc.errors import ConfigurationError, ServerBusy
from shared_rpc.provider.app import load_providers
from tests.kit.commands import MODULE, cli, spawn
from tests.kit.processes import Child
from tests.kit.world import World

Write = Callable[..., Path]
Start = Callable[..., Child]


@pytest.fixture
def app(tmp_path: Path) -> Write:
    """``app(code, name)`` writes an app to the working directory of commands. Loaded as a module, it does not import torch."""

    def write(code: str = "", name: str = "app.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("from shared_rpc import Provider\n\nprovider = Provider(device='cpu')\n\n" + textwrap.dedent(code))
        return path

    return write


@pytest.fixture
def loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Allow imports from the working directory, and remove the modules at the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("app", "package", "none"):
            del sys.modules[name]


@pytest.mark.usefixtures("loading")
def test_the_providers_of_an_app_are_served(app: Write) -> None:
    """Those at the top level, each once; ``package.module:provider`` is one alone, found from the working directory."""
    app("other = Provider('/nowhere/s', device='cpu')\nalias = other", "package/models.py")
    assert [provider.base_path for provider in load_providers("package.models")] == [None, "/nowhere/s"]
    (provider,) = load_providers("package.models:other")
    assert isinstance(provider, Provider) and provider.base_path == "/nowhere/s"


@pytest.mark.usefixtures("loading")
@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        ("none.py", "no such file: none.py"),
        ("none", "no such module: 'none'; for a file write none.py"),
        ("app:none", "app has no Provider named 'none'"),
        ("json", "json has no Provider at its top level: add one, or name it with json:name"),
        ("./app", "'./app' is neither a file nor a module"),
    ],
)
def test_a_target_that_does_not_exist(app: Write, target: str, complaint: str) -> None:
    """The error says which part of the name is wrong."""
    app()
    with pytest.raises(ConfigurationError) as caught:
        load_providers(target)
    assert str(caught.value).startswith(complaint)


@pytest.mark.usefixtures("loading")
def test_a_module_that_the_app_lacks(app: Write) -> None:
    """It is not mistaken for the app itself."""
    app("import no_such_library", "package/models.py")
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_library'"):
        load_providers("package.models")


@pytest.mark.parametrize(
    ("code", "options", "error"),
    [
        ("raise LookupError('no such checkpoint')", (), "LookupError: no such checkpoint"),
        ("other = Provider()", ("--socket", "one.sock"), "shared-rpc: app has 2 providers for one --socket: name one"),
        ("", ("--quota", "GPU-1=5"), "shared-rpc: quota GPU-1=5: use a device of this server: cpu"),
    ],
    ids=["the app raises", "one socket", "no such device"],
)
def test_an_app_that_cannot_be_served(
    app: Write, base_path: str, tmp_path: Path, code: str, options: tuple[str, ...], error: str
) -> None:
    """An error of the app itself has a traceback. No provider is served, not even one that was created before."""
    app(code)
    ran = spawn("serve", "app", *options, cwd=tmp_path)
    assert (ran.code, ran.output) == (1, "")
    lines = ran.errors.splitlines()
    assert lines[-1].startswith(error) and ("app.py" in ran.errors) == (len(lines) > 1)
    assert not list(tmp_path.glob("*.sock*"))


def test_classes_of_a_served_file_travel_as_code(app: Write, start: Start, world: World, tmp_path: Path) -> None:
    """A client that cannot import the file gets its classes; its directory is on the path, and its role is the server."""
    (tmp_path / "factors.py").write_text("DOUBLE = 2.0")
    path = app("""
        import factors, torch

        print('loaded', factors.DOUBLE, provider.execution_mode, flush=True)

        class Scale(torch.nn.Module):
            def forward(self, x):
                return 2 * x

        @provider.share(managed=True)
        def load():
            return Scale()
    """)
    server = start("serve", str(path), cwd=Path("/"), environ={"SHARED_TENSOR_ENABLED": "0", "SHARED_TENSOR_ROLE": "client"})
    assert server.expect("loaded") == "loaded 2.0 server"
    client = world.client()
    assert server.expect("serving") == f"serving load at {client.socket_path}"
    module = client.call("load").value
    assert torch.equal(module(torch.ones(2)), torch.full((2,), 2.0))
    assert type(module).__name__ == "Scale" and "app" not in sys.modules


def test_a_module_that_calls_its_own_endpoints_while_it_is_loaded(app: Write, start: Start, world: World) -> None:
    """The thread that pickles the result imports the module that waits for it; clients get the object."""
    app(
        """
        import torch

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(3))

        @provider.share
        def model():
            return Model()

        warm = model()
        """,
        "modelling.py",
    )
    start("serve", "modelling").expect("serving")
    info = world.client().get_server_info()
    assert (info["objects"], info["builds"]) == (1, 1)


def test_serving_with_closed_standard_streams(app: Write, world: World, tmp_path: Path) -> None:
    """As after ``>&-``: no other file gets their numbers, or their output."""
    app("print('said', flush=True)\nprovider.share('endpoint')(lambda: 0)")
    code = "import os, sys; os.closerange(0, 3); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    child = world.start("-c", code, *MODULE, "serve", "app.py", cwd=tmp_path, fresh=True)
    pid = world.client(connect_timeout=40.0).get_server_info()["pid"]
    assert [os.readlink(f"/proc/{pid}/fd/{number}") for number in range(3)] == [os.devnull] * 3
    assert child.close(signal.SIGTERM)[0] == 0


def test_options_reach_the_server(app: Write, start: Start, world: World, tmp_path: Path) -> None:
    """Each of them has an effect; the path of a socket is relative to the working directory."""
    app("""
        import anyio, torch

        @provider.share
        def ones(size):
            return torch.ones(size)

        @provider.share(cache=False)
        async def forever():
            await anyio.sleep_forever()
    """)
    limits = ("--max-bytes", "9KiB", "--quota", "cpu=16KiB", "--when-full", "evict", "--host-quota", "0.5", "--max-tasks", "1")
    served = start("serve", "app", *limits, "--result-ttl", "0", "--socket", "mine.sock").expect("serving")
    assert served.endswith(f" {tmp_path}/mine.sock")
    client = world.client(socket_path=tmp_path / "mine.sock", timeout=1.0)
    for size in (1, 2, 3):
        client.call("ones", size)
    info = client.get_server_info()
    assert (info["objects"], info["nbytes"]) == (2, 8192)  # whole pages
    with client.create_buffer(16 << 10) as buffer, pytest.raises(ServerBusy, match=f"wait for .*buffer {buffer.object_id}"):
        client.create_buffer(1)
    task = client.submit("forever")
    assert "1 tasks are pending or running" in cli("call", "forever").complaint
    client.cancel_task(task)
    assert "has expired: a finished task is remembered for 0 s" in cli("tasks", "wait", task).complaint


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--base-path", os.fsdecode(b"caf\xe9")], "the socket path b'caf\\xe9' is not UTF-8"),
        (["--device", "tpu"], "device='tpu': use 'auto', 'cpu', 'cuda', 'cuda:<index>'"),
        (["--max-bytes", "lots"], "--max-bytes lots: use a number of bytes, or one with K, M, G or T"),
        (["--quota", "cpu"], "--quota cpu: write device=amount, as in cuda:0=0.8 or cpu=8GiB"),
        (["--quota", "cpu=1M", "--quota", "cpu=2M"], "--quota cpu=2M: cpu has a quota already"),
        (["--quota", "cpu=1.5"], "--quota cpu=1.5: a fraction is more than 0 and at most 1.0; bytes are whole, or have a unit"),
        (["--when-full", "evict"], "when_full='evict' needs a quota: without one no device is full"),
    ],
    ids=" ".join,
)
def test_unusable_options_are_misuse(app: Write, base_path: str, tmp_path: Path, options: list[str], complaint: str) -> None:
    """One line with the option and its value; nothing is served."""
    app()
    assert cli("serve", "app", *options, cwd=tmp_path).misuse.startswith(complaint)
    assert not list(tmp_path.glob("*.sock"))


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["cuda:0=0.8", "cpu = 1.5 M"], {"cuda:0": 0.8, "cpu": 3 << 19}),
        (["cpu=1"], {"cpu": 1}),
    ],
)
def test_quotas(texts: list[str], expected: dict[str, int | float]) -> None:
    """A number with a point and no unit is a fraction; any other is a size."""
    found = quotas_of(texts)
    assert found == expected
    assert [type(amount) for amount in found.values()] == [type(amount) for amount in expected.values()]
