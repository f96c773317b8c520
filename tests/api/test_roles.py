"""One script in three roles, chosen by the environment alone: real processes run the same file."""

from __future__ import annotations

import json
import signal
import textwrap
from pathlib import Path

import pytest
import torch

from shared_rpc import Client
from tests.kit.processes import Child, skip_without_late_threads
from tests.kit.world import World

#: A script as users write it: no branch on the role.
APP = """
import json

import torch
from shared_rpc import Provider

provider = Provider(device="cpu")


class Net(torch.nn.Linear):
    pass


@provider.share(managed=True)
def load(size=4):
    print("building", flush=True)
    net = Net(size, size, bias=False)
    torch.nn.init.constant_(net.weight, 0.5)
    return net


@provider.share
def fail():
    raise ZeroDivisionError("on purpose")


def main():
    print("begins", flush=True)
    answers = {"mode": provider.execution_mode}
    with load(4) as handle, torch.no_grad():
        answers["managed"] = type(handle).__name__, type(handle.value).__name__, handle.generation
        answers["forward"] = handle.value(torch.ones(1, 4)).tolist()
        answers["info"] = sorted(handle.get_object_info())
    answers["released"] = handle.released
    try:
        fail()
    except ZeroDivisionError as error:
        answers["error"] = str(error)
    print("answers:", json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
"""

#: A script that needs no torch before an endpoint runs, and so starts fast; its main code follows.
SCRIPT = """
import os
import sys

from shared_rpc import Provider

provider = Provider(device="cpu", server_startup_timeout=float(os.environ.get("PATIENCE", "30")))


@provider.share
def ones(size):
    import torch

    return torch.ones(size)

"""


def start(world: World, main: str = "", role: str = "server", **environ: str) -> Child:
    """Run :data:`SCRIPT` with that main code, in a role."""
    if role == "server":
        skip_without_late_threads()
    path = Path(world.base_path).with_name("app.py")
    path.write_text(SCRIPT + textwrap.dedent(main))
    return world.start(str(path), environ={"SHARED_TENSOR_ROLE": role, **environ})


def end(child: Child) -> tuple[int, str]:
    """End a process; return its exit code, and its standard error."""
    return child.close(signal.SIGTERM)


def test_every_role_gives_the_same_answers(world: World, tmp_path: Path) -> None:
    """Values, handles and errors; a client attaches to the server's objects, without a server a process builds."""
    path = tmp_path / "app.py"
    path.write_text(APP)
    found = {}
    for role in ("server", "client", "local"):
        child = world.start(str(path), environ={"SHARED_TENSOR_ROLE": role})
        child.expect("begins")
        line = child.expect("")
        built = line == "building"
        answers = json.loads((child.expect("answers:") if built else line).removeprefix("answers:"))
        assert (answers.pop("mode"), built) == (role, role != "client")
        found[role] = answers
        if role != "server":
            assert child.close() == (0, "")
    assert found["client"] == found["local"] == found["server"]
    assert (answers["managed"], answers["released"]) == (["Handle", "Net", 1], True)
    assert answers["forward"] == [[2.0] * 4]
    assert answers["error"] == "on purpose"


def test_a_missing_server_is_reported(world: World) -> None:
    """The client's error has the socket, and how to start a server."""
    code, errors = start(world, "ones(2)", "client", PATIENCE="0").close()
    assert code == 1
    last = errors.splitlines()[-1]
    assert last.startswith("shared_rpc.errors.ConnectError: ")
    assert f"{world.base_path}-cpu.sock" in last
    assert "shared-rpc serve app.py" in last
    assert "SHARED_TENSOR_ROLE=server python app.py" in last


@pytest.mark.parametrize("main", ["", "sys.exit(0)"])
def test_a_server_serves_after_its_main_code(world: World, main: str) -> None:
    """After any successful end of the main code the process continues, and reports that; even if the script only decorates."""
    server = start(world, main)
    line = server.expect_error("serving at")
    client = world.client()
    info = client.get_server_info()
    assert (info["pid"], info["endpoints"]) == (server.pid, ["ones"])
    assert line == f"shared_rpc: serving at {client.socket_path} until SIGINT or SIGTERM"


def test_a_server_serves_while_its_main_code_runs(world: World) -> None:
    """The process serves from its first call on, and the end of its main code changes nothing for clients."""
    server = start(world, "print(ones(2).tolist()); input()")
    server.expect("[1.0, 1.0]")
    client = world.client()
    tensor = client.call("ones", 2)
    assert torch.equal(tensor, torch.ones(2))
    server.tell("")
    server.expect_error("serving at")
    assert client.get_server_info()["cache_hits"] == 1
    assert torch.equal(client.call("ones", 3), torch.ones(3))
    assert end(server)[0] == 0


def test_a_script_that_fails_does_not_serve(world: World) -> None:
    """An exception of the main code ends the process with its traceback."""
    code, errors = start(world, "provider.get_runtime_info()\nraise LookupError('no such checkpoint')").close()
    assert code == 1
    assert errors.splitlines()[-1] == "LookupError: no such checkpoint"
    assert "serving at" not in errors


def test_forked_children_of_a_server_are_its_clients(world: World) -> None:
    """They get their parent's memory; they end after their work, and do not serve."""
    main = """
        mine = ones(3)
        pid = os.fork()
        if pid == 0:
            found = ones(3)
            print("child:", provider.execution_mode, found.tolist(), flush=True)
            found.fill_(7)
            sys.exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print("parent:", provider.execution_mode, mine.tolist(), code, flush=True)
    """
    server = start(world, main)
    assert server.expect("child:") == "child: client [1.0, 1.0, 1.0]"
    assert server.expect("parent:") == "parent: server [7.0, 7.0, 7.0] 0"
    server.expect_error("serving at")
    assert world.client().get_server_info()["pid"] == server.pid
    assert end(server)[0] == 0


def test_a_forked_child_without_a_server_keeps_the_cache(world: World) -> None:
    """Results from before the fork of workers are not built again in each of them, and the parent's handles stay."""
    main = """
        import torch
        load = provider.share("load", managed=True)(lambda size: torch.ones(size))
        handle = load(2)
        pid = os.fork()
        if pid == 0:
            again = load(2)
            print("child:", again.value is handle.value, again.generation, load(3).generation, flush=True)
            again.release()
            handle.release()
            sys.exit(0)
        os.waitpid(pid, 0)
        print("parent:", load(2).value is handle.value, handle.is_stale(), flush=True)
    """
    child = start(world, main, "local")
    assert child.expect("child:") == "child: True 1 1"
    assert child.expect("parent:") == "parent: True False"
    assert child.close() == (0, "")


def test_several_providers_are_served(world: World) -> None:
    """Each at its own base path, and one signal ends them all."""
    server = start(world, f"other = Provider({world.base_path + '-other'!r}, device='cpu')")
    paths = [f"{world.base_path}-cpu.sock", f"{world.base_path}-other-cpu.sock"]
    for path in paths:
        assert path in server.expect_error("serving at")
        with Client(socket_path=path, connect_timeout=0) as client:
            assert client.get_server_info()["pid"] == server.pid
    assert end(server) == (0, "")
    assert not any(Path(path).exists() for path in paths)


def test_providers_at_one_path_are_refused(world: World) -> None:
    """They cannot share a socket; nothing is served, and one line gives the reason."""
    server = start(world, "other = Provider(device='cpu')")
    code, errors = server.close()
    assert code == 1
    assert errors.splitlines() == [
        f"shared_rpc: {world.base_path}-cpu.sock is served by another provider of this process (pid {server.pid}): "
        f"stop that server, or choose another base_path"
    ]
    assert not Path(f"{world.base_path}-cpu.sock").exists()


def test_a_closed_provider_does_not_serve(world: World) -> None:
    """After ``provider.close()`` the process ends with its main code, and leaves no socket."""
    code, errors = start(world, "provider.get_runtime_info(); provider.close()").close()
    assert (code, errors) == (0, "")
    assert not Path(f"{world.base_path}-cpu.sock").exists()


def test_the_role_is_resolved_at_its_first_use(world: World) -> None:
    """An invalid variable does not fail an import."""
    Path(world.base_path).with_name("library.py").write_text(SCRIPT)
    child = start(world, "import library; print('imported', flush=True); library.ones(2)", "sever")
    child.expect("imported")
    code, errors = child.close()
    assert (code, "ConfigurationError: SHARED_TENSOR_ROLE='sever': use" in errors.splitlines()[-1]) == (1, True)


def test_an_invalid_role_fails_a_script_that_only_decorates(world: World) -> None:
    """It was meant to serve: with a misspelt role it ends with an error."""
    code, errors = start(world, "", "sever").close()
    assert code == 1
    assert errors == "shared_rpc: SHARED_TENSOR_ROLE='sever': use 'server', 'client', 'local' or 'spawn', or leave it unset\n"
