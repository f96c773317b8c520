"""The command line, as a user's shell runs it: real processes, their output and their exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from typer.testing import CliRunner

from shared_rpc import Client, ClusterStatus, Provider, Server, __version__
from shared_rpc.cli.app import app as program
from shared_rpc.cli.doctor import examine
from shared_rpc.cli.options import in_bytes
from shared_rpc.errors import ConfigurationError
from tests.kit.commands import MODULE, Ran, cli
from tests.kit.forks import run
from tests.kit.processes import PYTHONPATH, ROOT, Child, sigstop


class Net(torch.nn.Linear):
    """Something to share."""


@pytest.fixture
def served(provider: Provider, serve: Callable[..., Server]) -> Server:
    """A server in this process, with two endpoints and nothing in its cache."""

    @provider.share(managed=True, idle_ttl=600)
    def load(size: int, name: str = "base") -> torch.nn.Module:
        """Build a layer."""
        return Net(size, size, bias=False)

    @provider.share(cache=False, concurrency="serialized")
    def ones(size: int) -> torch.Tensor:
        return torch.ones(size)

    return serve()


@pytest.fixture
def another(base_path: str) -> Iterator[Server]:
    """A second server, of another base path in the same directory."""
    provider = Provider(f"{base_path}-another", device="cpu")
    with Server(provider) as server:
        yield server


@pytest.fixture
def dead(base_path: str, children: list[Child]) -> str:
    """The socket that a killed server left behind."""
    code = """
        from shared_rpc import Provider, Server
        with Server(Provider(device="cpu")) as server:
            print(server.socket_path, flush=True)
            input()
    """
    child = Child("-c", textwrap.dedent(code))
    children.append(child)
    path = child.expect(".sock")
    child.process.kill()
    child.process.wait(10)
    return path


@pytest.fixture
def app(tmp_path: Path) -> Callable[..., Path]:
    """``app(code, name)`` writes an app where the commands run. Served as a module it needs no torch."""

    def write(code: str = "", name: str = "app.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("from shared_rpc import Provider\n\nprovider = Provider(device='cpu')\n\n" + textwrap.dedent(code))
        return path

    return write


# ls


def test_ls_without_a_server(base_path: str) -> None:
    """No server is no error: a sentence for people, an empty list for machines."""
    assert (cli("ls").output, cli("ls", "--json").data) == ("no server is alive\n", [])


def test_ls_in_a_directory_that_is_not_there(tmp_path: Path) -> None:
    """Before the first server there is no directory either, and looking makes none."""
    base_path = tmp_path / "later" / "s"
    assert cli("ls", "--base-path", str(base_path)).output == "no server is alive\n"
    assert not base_path.parent.exists()


def test_ls_tells_what_there_is_to_know(served: Server, connect: Callable[..., Client]) -> None:
    """One row for each server, whole even where the output is no terminal: scripts read it line by line."""
    handle = connect().call("load", 16)
    ran = cli("ls")
    assert (ran.code, ran.errors) == (0, "")
    header, row = ran.output.splitlines()
    columns = ["socket", "pid", "device", "endpoints", "objects", "memory", "leases", "clients", "up"]
    assert header.split() == columns
    assert re.split(r"\s{2,}", row.strip())[:8] == [
        served.socket_path,
        str(os.getpid()),
        "cpu",
        "load, ones",
        "1",
        "4.0 KiB",  # whole pages
        "1",
        "1",
    ]
    handle.release()


def test_ls_several(served: Server, another: Server) -> None:
    """All live servers in the directory of the base path, in the order of their sockets."""
    assert [info["socket_path"] for info in cli("ls", "--json").data] == [another.socket_path, served.socket_path]


def test_ls_passes_over_dead_sockets(dead: str, another: Server) -> None:
    """What a killed server left is not listed, and not mentioned."""
    assert Path(dead).exists()
    assert [info["socket_path"] for info in cli("ls", "--json").data] == [another.socket_path]


def test_ls_leaves_the_sockets_of_others_alone(tmp_path: Path, served: Server, children: list[Child]) -> None:
    """A socket beside ours that no server of ours made is not connected to: /run/user/1000 has many."""
    code = """
        import socket, sys
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(sys.argv[1])
        listener.listen()
        print("listening", flush=True)
        listener.accept()
        print("disturbed", flush=True)
    """
    stranger = Child("-c", textwrap.dedent(code), str(tmp_path / "a-stranger.sock"))
    children.append(stranger)
    stranger.expect("listening")
    assert [info["socket_path"] for info in cli("ls", "--json").data] == [served.socket_path]
    stranger.process.kill()
    assert stranger.process.communicate()[0] == ""


def test_ls_does_not_wait_for_a_stuck_server(
    app: Callable[..., Path], start: Callable[..., Child], another: Server, base_path: str
) -> None:
    """A server that does not answer is named on standard error, and the others are listed in time."""
    app()
    stuck = start("serve", "app")
    stuck.expect("serving")
    sigstop(stuck.pid)
    begin = time.monotonic()
    ran = cli("ls", "--json")
    assert time.monotonic() - begin < 15
    assert (ran.code, ran.errors) == (
        0,
        f"shared-rpc: passed over: the server at {base_path}-cpu.sock did not answer the handshake in time\n",
    )
    assert [info["socket_path"] for info in json.loads(ran.output)] == [another.socket_path]


# info


def test_info(served: Server) -> None:
    """The server's facts, and its endpoints with their options and the first line of their docstrings."""
    ran = cli("info")
    assert (ran.code, ran.errors) == (0, "")
    lines = [re.split(r"\s{2,}", line.strip()) for line in ran.output.splitlines()]
    assert ["socket_path", served.socket_path] in lines
    assert ["pid", str(os.getpid())] in lines
    assert ["mechanism", "memfd: host memory is a memfd"] in lines
    assert ["load", "yes", "all arguments", "parallel", "read_write", "all", "600 s", "on_evict", "Build a layer."] in lines
    assert ["ones", "no", "-", "serialized", "read_write", "all", "never", "on_evict"] in lines


@pytest.mark.usefixtures("admitted_source")
def test_info_of_a_source(served: Server) -> None:
    """What it reports, in one line; without one there is none."""
    assert "source " not in cli("info").output
    with Client(socket_path=served.socket_path) as client, client.source() as source:
        status: ClusterStatus = {"cluster": "prod", "node": "a", "state": "joined", "nodes": 3, "objects": 1}
        source.report(status | {"bytes_received": 1 << 30, "activity": ["sends load()"]})
        (line,) = [line for line in cli("info").output.splitlines() if line.startswith("source")]
    assert f"pid {os.getpid()}, for" in line
    assert "cluster prod, node a, state joined, 3 nodes, 1 object, 1.0 GiB received; sends load()" in line


def test_info_for_machines(served: Server) -> None:
    """Server and endpoints, as the client's methods give them."""
    data = cli("info", "--json").data
    assert set(data) == {"server", "endpoints"}
    assert data["server"]["server_id"] == served.info()["server_id"]
    assert data["endpoints"]["load"]["idle_ttl"] == 600


def test_which_server_is_meant(served: Server, another: Server) -> None:
    """With several servers one has to be named, by its socket; the error lists them."""
    assert cli("info").complaint == (
        f"several servers answer; choose one with --socket: {another.socket_path}, {served.socket_path}"
    )
    data = cli("info", "--json", "--socket", another.socket_path).data
    assert data["server"]["socket_path"] == another.socket_path


@pytest.mark.parametrize("command", ["info", "objects", "devices", "invalidate"])
def test_the_server_of_a_base_path(served: Server, another: Server, base_path: str, command: str) -> None:
    """It is the one that is meant, also where its base path begins another one's."""
    words = ["objects", command, "load"] if command == "invalidate" else [command]
    assert cli(*words, "--base-path", base_path, "--json").code == 0
    for base in (base_path, f"{base_path}-another"):
        data = cli("info", "--json", "--base-path", base).data
        assert data["server"]["socket_path"] == f"{base}-cpu.sock"


def test_servers_of_a_base_path(served: Server, another: Server, base_path: str, tmp_path: Path) -> None:
    """``ls`` lists those of each of its devices, and no other's; among several the error asks for one of them alone."""
    gpu = f"{base_path}-0f0f0f0f.sock"
    with Server(Provider(device="cpu"), socket_path=gpu), Server(Provider(device="cpu"), socket_path=f"{tmp_path}/own.sock"):
        listed = [info["socket_path"] for info in cli("ls", "--json", "--base-path", base_path).data]
        assert listed == [gpu, served.socket_path]
        assert cli("stop", "--base-path", base_path).complaint == (
            f"several servers answer; choose one with --socket: {gpu}, {served.socket_path}"
        )
        assert len(cli("ls", "--json").data) == 4


def test_no_server_of_a_base_path(served: Server, base_path: str) -> None:
    """One beside it is not asked in its place."""
    complaint = cli("info", "--base-path", f"{base_path}-3").complaint
    assert complaint.startswith(f"no server answers at {base_path}-3-<tag>.sock: start one with")


def test_no_server_to_ask(base_path: str, tmp_path: Path) -> None:
    """Without a server the error says where it looked, and how to start one."""
    complaint = cli("objects", "--json").complaint
    assert f"no server answers in {tmp_path}" in complaint
    assert "shared-rpc serve app.py" in complaint


def test_no_server_at_the_socket(tmp_path: Path) -> None:
    """A socket that was named and is not there is named in the error."""
    path = str(tmp_path / "none.sock")
    assert cli("info", "--socket", path).complaint.startswith(f"cannot connect to {path}: no server listens there")


# objects


def test_what_others_wrote_moves_no_cursor(
    provider: Provider, serve: Callable[..., Server], connect: Callable[..., Client], tmp_path: Path
) -> None:
    """Cache keys and errors quote values of callers; each object is a line, and no escape sequence gets through."""

    @provider.share(managed=True, cache_format_key="{name}")
    def load(name: str) -> torch.Tensor:
        return torch.ones(1)

    serve()
    with connect().call("load", "red \x1b[31m\nand [bold]"):
        listed = cli("objects")
    assert (listed.code, listed.errors) == (0, "")
    _, row = listed.output.splitlines()
    assert "load:red [31m and [bold]" in row
    failed = cli("ls", "--base-path", f"{tmp_path}/a\x1b[2J\x1b/b")
    wrong = cli("info", "--socket", f"{tmp_path}/\x1b[2J.sock")
    assert "\x1b" not in failed.output + failed.errors + wrong.complaint


@pytest.mark.parametrize(
    "environ", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}]
)
def test_a_terminal_without_the_letters(served: Server, connect: Callable[..., Client], environ: dict[str, str]) -> None:
    """Shows a question mark, and the rest."""
    with connect().call("load", 4, name="größe"):
        ran = cli("objects", environ=environ)
    assert (ran.code, ran.errors) == (0, "")
    assert re.search(r"name='gr\?+e'", ran.output)


def test_objects_and_who_holds_them(served: Server, children: list[Child]) -> None:
    """Every object with the processes that hold it, and what these processes run."""
    code = """
        import sys
        sys.path.insert(0, sys.argv[1])
        import shared_rpc
        client = shared_rpc.Client(device="cpu")
        handles = [client.call("load", 16), client.call("load", 16)]
        client.call("load", size=32, name="big").release()
        print("holding", flush=True)
        input()
    """
    holder = Child("-c", textwrap.dedent(code), str(ROOT))
    children.append(holder)
    holder.expect("holding")
    ran = cli("objects")
    data = cli("objects", "--json").data
    assert (ran.code, ran.errors) == (0, "")
    header, base, big = (re.split(r"\s{2,}", line.strip()) for line in ran.output.splitlines())
    where = ["device", "tier", "generation", "cached", "active"]
    assert header == ["object", "of", "size", "private", *where, "held by", "age", "last used"]
    private = {base.pop(3), big.pop(3)}
    assert private == {f"{data[0]['private_nbytes']} B"}
    assert base[1:6] == ["load(size=16, name='base')", "1.0 KiB", "cpu", "device", "1"]
    assert base[6:8] == ["yes", "1"]
    assert big[1:9] == ["load(size=32, name='big')", "4.0 KiB", "cpu", "device", "1", "yes", "0", "nobody"]
    assert re.fullmatch(rf"{holder.pid} \({re.escape(sys.executable[:20])}.*…?\)", base[8])
    assert [item["object_id"] for item in data] == [base[0], big[0]]
    assert [[one["pid"] for one in item["holders"]] for item in data] == [[holder.pid], []]


def test_buffers_are_told_from_results(served: Server, connect: Callable[..., Client]) -> None:
    """They are objects that nothing made, and ``ls`` counts them."""
    client = connect()
    client.call("load", 16).release()
    assert re.split(r"\s{2,}", cli("ls").output.splitlines()[1])[4] == "1"
    client.create_buffer(5000, keep=True).release()
    freed = client.create_buffer(100)
    client.free_buffer(freed)
    assert re.split(r"\s{2,}", cli("ls").output.splitlines()[1])[4] == "3 (2 buffers)"
    rows = [re.split(r"\s{2,}", line.strip())[1:7] for line in cli("objects").output.splitlines()[1:]]
    here = ["0 B", "cpu", "device", "1"]
    assert rows[1:] == [["buffer", "4.9 KiB", *here], ["buffer, freed", "100 B", *here]]
    assert [item["kind"] for item in cli("objects", "--json").data] == ["result", "buffer", "buffer"]
    freed.release()


# invalidate


def test_invalidating_an_endpoint(served: Server, connect: Callable[..., Client]) -> None:
    """Without arguments all results of the endpoint go; it says how many."""
    for size in (1, 2):
        connect().call("load", size).release()
    assert cli("objects", "invalidate", "load").output == "2 cached results of load dropped\n"
    assert cli("objects", "invalidate", "load", "--json").data == {"endpoint": "load", "invalidated": 0}


def test_invalidating_a_call(served: Server, connect: Callable[..., Client]) -> None:
    """With arguments, as Python literals or plain text, the result of that call goes."""
    for name in ("base", "big", "3"):
        connect().call("load", 1, name).release()
    assert cli("objects", "invalidate", "load", "size=1", "name=big").output == "1 cached result of load dropped\n"
    assert cli("objects", "invalidate", "load", "size=1", "name='3'").output == "1 cached result of load dropped\n"
    assert cli("objects", "invalidate", "load", "size=1", "name=big").output == "0 cached results of load dropped\n"
    assert served.info()["objects"] == 1


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["lod"], "the server has no endpoint 'lod': did you mean 'load'?"),
        (["load", "size=1", "siez=1"], "load(): got an unexpected keyword argument 'siez'"),
    ],
    ids=["endpoint", "argument"],
)
def test_invalidating_what_is_not_there(served: Server, arguments: list[str], complaint: str) -> None:
    """A wrong name is an error, not zero results."""
    assert cli("objects", "invalidate", *arguments).complaint.startswith(complaint)


# serve


def test_served_classes_travel_as_code(
    app: Callable[..., Path], start: Callable[..., Child], connect: Callable[..., Client]
) -> None:
    """A client that cannot import the file gets its classes with the object."""
    path = app("""
        import torch

        class Scale(torch.nn.Module):
            def __init__(self, factor):
                super().__init__()
                self.factor = torch.nn.Parameter(torch.tensor(factor))

            def forward(self, x):
                return x * self.factor

        @provider.share(managed=True)
        def load(factor):
            return Scale(factor)
    """)
    server = start("serve", str(path))
    client = connect()
    assert server.expect("serving") == f"serving load at {client.socket_path}"
    module = client.call("load", 3.0).value
    assert torch.equal(module(torch.ones(2)), torch.full((2,), 3.0))
    assert type(module).__name__ == "Scale"
    assert "app" not in sys.modules


def test_serving_a_module_s_provider(
    app: Callable[..., Path], start: Callable[..., Child], connect: Callable[..., Client], tmp_path: Path
) -> None:
    """``package.module:provider`` is found from where the command runs; no other provider of it is served, at no time."""
    app("other = Provider('/nowhere/s', device='cpu')", "package/models.py")
    server = start("serve", "package.models:provider")
    assert server.expect("serving") == f"serving no endpoints at {connect().socket_path}"
    server.process.send_signal(signal.SIGTERM)
    assert server.close() == (0, "")


def test_serving_all_providers_of_an_app(
    app: Callable[..., Path], start: Callable[..., Child], base_path: str, tmp_path: Path
) -> None:
    """Without a name every provider at the top level is served, each at its own path, and none twice."""
    app(f"other = Provider({base_path + '-2'!r}, device='cpu')\nalias = other")
    server = start("serve", "app")
    for path in (f"{base_path}-cpu.sock", f"{base_path}-2-cpu.sock"):
        assert server.expect("serving").endswith(path)
        with Client(socket_path=path, connect_timeout=0) as client:
            assert client.get_server_info()["pid"] == server.pid


def test_where_to_serve(app: Callable[..., Path], start: Callable[..., Child], tmp_path: Path) -> None:
    """``--base-path`` and ``--socket`` beat what the app and the environment say."""
    app()
    assert start("serve", "app", "--base-path", "other").expect("serving").endswith(f" {tmp_path}/other-cpu.sock")
    assert start("serve", "app", "--socket", "mine.sock").expect("serving").endswith(f" {tmp_path}/mine.sock")


def test_served_app_knows_its_role(app: Callable[..., Path], start: Callable[..., Child]) -> None:
    """While it is loaded the app sees the server role, whatever the shell's variables say."""
    app("print('role', provider.execution_mode, flush=True)")
    server = start("serve", "app", environ={"SHARED_TENSOR_ENABLED": "0", "SHARED_TENSOR_ROLE": "client"})
    assert server.expect("role") == "role server"


def test_served_app_imports_what_lies_beside_it(app: Callable[..., Path], start: Callable[..., Child], tmp_path: Path) -> None:
    """As for a script, the app's own directory is on the path, wherever the command runs."""
    (tmp_path / "weights.py").write_text("WHERE = 'beside'")
    server = start("serve", str(app("import weights; print(weights.WHERE, flush=True)")), cwd=Path("/"))
    assert server.expect("beside") == "beside"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_ends_when_asked(
    app: Callable[..., Path], start: Callable[..., Child], base_path: str, number: signal.Signals
) -> None:
    """A signal that comes right after it said that it serves ends it, with exit code 0."""
    app()
    server = start("serve", "app")
    server.expect("serving")
    server.process.send_signal(number)
    code = server.process.wait(20)
    assert (code, server.close()[1]) == (0, "")
    assert not Path(f"{base_path}-cpu.sock").exists()


@pytest.mark.parametrize(
    "target, complaint",
    [
        ("none.py", "no such file: none.py"),
        ("none", "no such module: 'none'; for a file write none.py"),
        ("json.none", "no such module: 'json.none'"),
        ("app:none", "app has no Provider named 'none'"),
        ("json", "json has no Provider at its top level: add one, or name it with json:name"),
        ("./app", "'./app' is neither a file nor a module: write app.py, or package.module"),
        (":provider", "'' is neither a file nor a module"),
    ],
)
def test_what_cannot_be_served(app: Callable[..., Path], base_path: str, tmp_path: Path, target: str, complaint: str) -> None:
    """A name that leads nowhere is one line that says which part of it is wrong; nothing is served then."""
    app()
    assert cli("serve", target, cwd=tmp_path).complaint.startswith(complaint)
    assert not list(tmp_path.glob("*.sock*"))


@pytest.mark.parametrize(
    "options, complaint",
    [
        (["--device", "tpu"], "device='tpu': use 'auto', 'cpu', 'cuda', 'cuda:<index>'"),
        (["--max-bytes", "lots"], "--max-bytes lots: use a number of bytes, or one with K, M, G or T"),
        (["--max-bytes", "-1"], "--max-bytes -1: use a number of bytes"),
        (["--max-bytes", "inf"], "--max-bytes inf: use a number of bytes"),
    ],
    ids=str,
)
def test_options_that_cannot_be_used(
    app: Callable[..., Path], base_path: str, tmp_path: Path, options: list[str], complaint: str
) -> None:
    """An option that does not fit is one line; nothing is served then."""
    app()
    assert cli("serve", "app", *options, cwd=tmp_path).misuse.startswith(complaint)
    assert not list(tmp_path.glob("*.sock"))


def test_one_socket_for_several_providers(app: Callable[..., Path], base_path: str, tmp_path: Path) -> None:
    """The error says how to name one of them."""
    app("other = Provider(device='cpu')")
    ran = cli("serve", "app", "--socket", "one.sock", cwd=tmp_path)
    assert ran.complaint.startswith("app has 2 providers for one --socket: name one with app:name")
    assert not list(tmp_path.glob("*.sock"))


def test_an_app_that_fails_to_load(app: Callable[..., Path], base_path: str, tmp_path: Path) -> None:
    """What the app raises is shown with its traceback; nothing is served, not even by the provider it made before."""
    app("raise LookupError('no such checkpoint')")
    ran = cli("serve", "app", cwd=tmp_path)
    assert (ran.code, ran.output) == (1, "")
    assert ran.errors.splitlines()[-1] == "LookupError: no such checkpoint"
    assert "app.py" in ran.errors
    assert not list(tmp_path.glob("*.sock*"))


def test_an_app_that_lacks_a_module(app: Callable[..., Path], base_path: str, tmp_path: Path) -> None:
    """A module that the app itself needs is not mistaken for the app."""
    app("import no_such_library", "package/models.py")
    ran = cli("serve", "package.models", cwd=tmp_path)
    assert ran.code == 1
    assert ran.errors.splitlines()[-1] == "ModuleNotFoundError: No module named 'no_such_library'"


@pytest.mark.parametrize(
    ("closed", "kind"),
    [("0", []), ("1", ["--in-process"]), ("2", []), ("012", []), ("012", ["--in-process"])],
    ids=["0-broker", "1-in-process", "2-broker", "012-broker", "012-in-process"],
)
def test_serving_without_standard_streams(
    app: Callable[..., Path],
    connect: Callable[..., Client],
    children: list[Child],
    tmp_path: Path,
    kind: list[str],
    closed: str,
) -> None:
    """``>&-`` in a shell closes them: nothing else gets their numbers, nor what is written to them."""
    app("print('said', flush=True)\nprovider.share('endpoint')(lambda: 0)")
    code = (
        "import os, sys; [os.close(int(n)) for n in sys.argv.pop(1)]; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    child = Child("-c", code, closed, *MODULE, "serve", "app.py", *kind, cwd=tmp_path, fresh=True)
    children.append(child)
    pid = connect(connect_timeout=40.0).get_server_info()["pid"]
    for number in closed:
        assert os.readlink(f"/proc/{pid}/fd/{number}") == os.devnull
    child.process.terminate()
    assert child.close()[0] == 0


@pytest.mark.parametrize(
    ("option", "kind"),
    [("--base-path", []), ("--socket", ["--in-process"]), ("", []), ("", ["--in-process"])],
    ids=["base path-broker", "socket-in-process", "environment-broker", "environment-in-process"],
)
def test_a_path_that_is_no_text(app: Callable[..., Path], tmp_path: Path, kind: list[str], option: str) -> None:
    """A server could not tell where it is: it says so, and ends."""
    app("provider.share('endpoint')(lambda: 0)")
    path = os.fsdecode(bytes(tmp_path / "caf") + b"\xe9")
    environ = {} if option else {"SHARED_TENSOR_BASE_PATH": path}
    ran = cli("serve", "app.py", *kind, *([option, path] if option else []), environ=environ, cwd=tmp_path)
    error = ran.misuse if option else ran.complaint
    assert error.startswith(f"the socket path b'{tmp_path}/caf\\xe9")
    assert "is not UTF-8: set another base_path or SHARED_TENSOR_BASE_PATH" in error


@pytest.mark.parametrize("kind", [[], ["--in-process"]], ids=["broker", "in-process"])
def test_an_app_in_a_folder_whose_name_is_no_text(
    start: Callable[..., Child], tmp_path: Path, kind: list[str], connect: Callable[..., Client]
) -> None:
    """It is served like any other."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    (folder / "beside.py").touch()
    (folder / "app.py").write_text("import beside\nfrom shared_rpc import Provider\nprovider = Provider(device='cpu')\n")
    server = start("serve", str(folder / "app.py"), *kind)
    server.expect("serving")
    server.process.terminate()
    assert server.close()[0] == 0


def test_serving_twice(app: Callable[..., Path], start: Callable[..., Child], base_path: str, tmp_path: Path) -> None:
    """The second server at a path is told who has it."""
    app()
    first = start("serve", "app")
    first.expect("serving")
    second = cli("serve", "app", cwd=tmp_path)
    assert second.complaint.startswith(f"{base_path}-cpu.sock is served by pid {first.pid}: ")


def test_memory_budget(app: Callable[..., Path], start: Callable[..., Child], connect: Callable[..., Client]) -> None:
    """``--max-bytes`` evicts what nobody holds beyond it; a page is the least that an object takes."""
    app("""
        @provider.share
        def ones(size):
            import torch

            return torch.ones(size)
    """)
    start("serve", "app", "--max-bytes", "9KiB").expect("serving")
    client = connect()
    for size in (1, 2, 3):
        client.call("ones", size)
    info = client.get_server_info()
    assert (info["objects"], info["nbytes"]) == (2, 8192)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("2000", 2000),
        ("2K", 2048),
        ("2kb", 2048),
        ("2 KiB", 2048),
        ("1.5M", 3 << 19),
        ("20G", 20 << 30),
        ("1t", 1 << 40),
        ("0", 0),
    ],
)
def test_sizes_as_people_write_them(text: str, expected: int) -> None:
    """A number of bytes, or one with a unit of 1024."""
    assert in_bytes(f"--max-bytes {text}", text) == expected


# doctor


def test_doctor(base_path: str, tmp_path: Path) -> None:
    """A table for people: what was looked at, what was found, what to do."""
    ran = cli("doctor")
    assert (ran.code, ran.errors) == (0, "")
    header, *rows = (re.split(r"\s{2,}", line.strip()) for line in ran.output.splitlines())
    assert header == ["what", "found", "what to do"]
    found = {row[1]: (row[0], row[2]) for row in rows}
    assert found["environment"] == ("ok", "role local")
    assert found["socket directory"] == ("ok", f"{tmp_path}, mode 0700")
    assert found["host memory"][0] == "ok"
    assert found["torch"][1].startswith(torch.__version__)


def test_doctor_for_machines(base_path: str) -> None:
    """Every finding has a state and, where it is not good, a fix; what stops every process shows in the exit code too."""
    ran = cli("doctor", "--json", environ={"SHARED_TENSOR_ROLE": "sever"})
    assert (ran.code, ran.errors) == (1, "")
    findings = json.loads(ran.output)
    assert {frozenset(finding) for finding in findings} == {frozenset({"what", "state", "found", "fix"})}
    assert {finding["what"] for finding in findings} >= {"environment", "socket directory", "limits", "host memory", "torch"}
    assert all(finding["fix"] for finding in findings if finding["state"] != "good")
    (broken,) = (finding for finding in findings if finding["state"] == "broken")
    assert broken["what"] == "environment"
    assert broken["found"].startswith("SHARED_TENSOR_ROLE='sever': use 'server', 'client', 'local' or 'spawn'")


def test_doctor_sees_an_open_directory(base_path: str, tmp_path: Path) -> None:
    """A directory that a server would refuse is found before a server is started."""
    tmp_path.chmod(0o777)
    (finding,) = (finding for finding in examine() if finding.state == "broken")
    assert (finding.what, finding.found) == ("socket directory", f"{tmp_path} has mode 0777, so other users can write to it")
    assert finding.fix.startswith(f"chmod 700 {tmp_path}")


def test_doctor_sees_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    """A base path below what is no directory cannot work."""
    (tmp_path / "file").write_text("")
    (finding,) = (finding for finding in examine(str(tmp_path / "file" / "s")) if finding.state == "broken")
    assert finding.what == "socket directory"
    assert str(tmp_path / "file") in finding.found
    assert "SHARED_TENSOR_BASE_PATH" in finding.fix


def test_doctor_makes_nothing(base_path: str, tmp_path: Path) -> None:
    """Looking at a place where nothing is yet leaves it so."""
    findings = examine(str(tmp_path / "later" / "s"))
    assert not [finding for finding in findings if finding.state == "broken"]
    assert not (tmp_path / "later").exists()


# The command itself.


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_version(option: str) -> None:
    """The version of the package."""
    ran = cli(option)
    assert (ran.code, ran.output, ran.errors) == (0, f"shared-rpc {__version__}\n", "")


def test_commands_of_other_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point of the group shared_rpc.cli is a command; a known one that is not installed is named with the extra."""
    other = typer.Typer()
    other.command()(lambda: print("it runs"))
    points = [SimpleNamespace(load=lambda: other)]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: points)
    assert CliRunner().invoke(program, ["cluster"]).output == "it runs\n"
    points.clear()
    ran = CliRunner().invoke(program, ["cluster", "status"])
    assert isinstance(ran.exception, ConfigurationError) and "pip install 'shared-rpc[ray]'" in str(ran.exception)


@pytest.mark.parametrize("command", [(), ("serve",), ("run",)], ids=" ".join)
def test_short_option_for_help(command: tuple[str, ...]) -> None:
    """-h is --help, of every command."""
    ran = cli(*command, "-h")
    assert (ran.code, ran.output) == (0, cli(*command, "--help").output)


def test_completion_in_a_shell() -> None:
    """A shell is told the commands that begin as typed, and the options of a command."""

    def completed(line: str) -> list[str]:
        environ = {"_SHARED_RPC_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
        return CliRunner().invoke(program, env=environ, prog_name="shared-rpc").output.split()

    assert completed("shared-rpc re") == ["reload"]
    assert completed("shared-rpc serve --max-b") == ["--max-bytes"]


def test_no_command_shows_the_help() -> None:
    """Every command is in the help, with what it does."""
    ran = cli("--help")
    assert ran.code == 0
    for command in ("serve", "ls", "info", "objects", "devices", "doctor", "tasks", "call"):
        assert re.search(rf"\b{command} +[A-Z]", ran.output)
    assert cli().output.strip() == ran.output.strip()


@pytest.mark.parametrize(
    "arguments",
    [
        *(["lst"], ["ls", "--jsn"], ["serve"], ["serve", "app.py", "--threads", "0"], ["serve", "app", "--max-tasks", "0"]),
        *(["tasks", "wait"], ["tasks", "cancel"], ["call"], ["tasks", "wait", "a-1", "--timeout", "-1"]),
    ],
    ids=str,
)
def test_misuse(arguments: list[str]) -> None:
    """What the command line does not know is exit code 2, with nothing on standard output."""
    ran = cli(*arguments)
    assert (ran.code, ran.output) == (2, "")
    assert "Usage:" in ran.errors


@pytest.mark.parametrize(
    "command",
    [["ls"], ["info"], ["objects"], ["objects", "invalidate", "load"], ["objects", "invalidate", "load", "size=1"]],
    ids=str,
)
def test_looking_loads_no_torch(served: Server, connect: Callable[..., Client], command: list[str]) -> None:
    """Commands that only ask a server start fast: they import neither torch nor cloudpickle nor the server."""
    connect().call("load", 1).release()
    ran = Ran("-X", "importtime", *MODULE, *command)
    assert ran.code == 0
    imported = {line.rpartition("|")[2].strip() for line in ran.errors.splitlines()}
    assert "shared_rpc.client.base" in imported
    assert not imported & {"torch", "cloudpickle", "shared_rpc.codec", "shared_rpc.server.server"}


@pytest.mark.parametrize("unbuffered", ["1", ""])
@pytest.mark.parametrize("command", [["ls"], ["ls", "--json"], ["info"], ["objects", "--json"]], ids=str)
def test_reader_that_goes_away(served: Server, connect: Callable[..., Client], command: list[str], unbuffered: str) -> None:
    """``shared-rpc ls | head`` leaves no traceback when the reader has read enough."""
    client = connect()
    for size in range(1, 40):
        client.call("load", size).release()
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as output:
        process = run(
            [sys.executable, *MODULE, *command],
            stdout=output,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": PYTHONPATH, "PYTHONUNBUFFERED": unbuffered},
            timeout=50,
            check=False,
        )
    assert process.stderr == b""


@pytest.mark.parametrize("options", [[], ["--in-process", "--max-bytes", "1G"]], ids=["workers", "in-process"])
def test_a_module_that_calls_its_own_endpoints_while_it_is_loaded(
    start: Callable[..., Child], connect: Callable[..., Client], tmp_path: Path, options: list[str]
) -> None:
    """The thread that pickles the result imports the module that waits for it; what it made is there for clients."""
    (tmp_path / "modelling.py").write_text(
        textwrap.dedent("""
        import torch
        from shared_rpc import Provider

        provider = Provider(device="cpu", timeout=20)

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(3))

        @provider.share
        def model():
            return Model()

        warm = model()
        """)
    )
    start("serve", "modelling", *options).expect("serving")
    info = connect().get_server_info()
    assert (info["objects"], info["builds"]) == (1, 1)
