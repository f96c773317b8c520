"""Commands that print the state of servers, and the command line itself."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import typer
from typer.testing import CliRunner

from shared_rpc import Client, ClusterStatus, Provider, Server, TaskStatus, __version__
from shared_rpc.cli import discovery
from shared_rpc.cli.__main__ import main
from shared_rpc.cli.app import app as program
from shared_rpc.cli.doctor import examine
from shared_rpc.cli.options import in_bytes
from shared_rpc.cli.rendering import lasted, span
from shared_rpc.errors import ConfigurationError
from tests.kit.commands import cli, spawn
from tests.kit.processes import eventually
from tests.kit.world import World

TOTAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def world(world: World) -> World:
    """A server with two endpoints and an empty cache."""

    @world.share(managed=True, idle_ttl=600)
    def load(size: int, name: str = "base") -> torch.nn.Module:
        """Build a layer."""
        return torch.nn.Linear(size, size, bias=False)

    @world.share(cache=False, concurrency="serialized")
    def ones(size: int) -> torch.Tensor:
        return torch.ones(size)

    world.serve(quotas={"cpu": 8 << 20})
    return world


@pytest.fixture
def another(base_path: str) -> Iterator[Server]:
    """A second server, of another base path in the same directory."""
    with Server(Provider(f"{base_path}-another", device="cpu")) as server:
        yield server


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    """A socket that accepts no connection; it sorts before those of the servers."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "a.sock"))
        sock.listen()
        sock.setblocking(False)
        yield sock


def listed(*options: str) -> list[str]:
    """Return the sockets that ``ls`` lists."""
    return [info["socket_path"] for info in cli("ls", "--json", *options).data]


def test_ls_without_a_server(base_path: str, tmp_path: Path) -> None:
    """It succeeds, and creates no directory where a server would."""
    assert (cli("ls").succeeded, cli("ls", "--json").data) == ("no server is alive\n", [])
    assert cli("ls", "--base-path", f"{tmp_path}/later/s").succeeded == "no server is alive\n"
    assert not (tmp_path / "later").exists()


def test_ls_prints_a_row_for_each_server(world: World) -> None:
    """Whole, however long it is, where the output is no terminal."""
    with world.client().call("load", 16):
        header, row = cli("ls").rows
    assert header == ["socket", "pid", "device", "endpoints", "objects", "memory", "leases", "clients", "up"]
    assert row[:8] == [world.server.socket_path, str(os.getpid()), "cpu", "load, ones", "1", "4.0 KiB", "1", "1"]


def test_ls_omits_dead_servers_and_other_programs(
    world: World, another: Server, listener: socket.socket, tmp_path: Path
) -> None:
    """Silently: /run/user/1000 has many sockets; those of servers have a lock file beside them."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "dead.sock"))
    (tmp_path / "dead.sock.lock").touch()
    assert listed() == [another.socket_path, world.server.socket_path]
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_ls_reports_a_server_that_does_not_answer(
    world: World, listener: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On standard error, after a limited time; the other servers are listed."""
    monkeypatch.setattr(discovery, "PATIENCE", 0.2)
    (tmp_path / "a.sock.lock").touch()
    ran = cli("ls")
    assert (ran.code, world.server.socket_path in ran.output) == (0, True)
    assert ran.errors == f"shared-rpc: passed over: the server at {tmp_path}/a.sock did not answer the handshake in time\n"


def test_the_only_server_does_not_answer(
    base_path: str, listener: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says so, for commands and the live view, and does not advise to start one."""
    monkeypatch.setattr(discovery, "PATIENCE", 0.2)
    (tmp_path / "a.sock.lock").touch()
    silent = f"no server answers in {tmp_path}: the server at {tmp_path}/a.sock did not answer the handshake in time"
    for words in (["objects"], ["tasks", "wait", "a-1"], ["top", "--once"]):
        assert cli(*words).complaint == silent
    assert cli("stop", "--all").complaint == silent.partition(": ")[2]  # it has not stopped all


def test_several_servers_need_a_choice(world: World, another: Server, base_path: str) -> None:
    """By their socket, or their base path, also where one base path begins with another one; the error lists the sockets."""
    sockets = f"{another.socket_path}, {world.server.socket_path}"
    assert cli("info").complaint == f"several servers answer; choose one with --socket: {sockets}"
    data = cli("info", "--json", "--socket", another.socket_path).data
    assert data["server"]["socket_path"] == another.socket_path
    for words in (["info"], ["objects"], ["devices"], ["objects", "invalidate", "load"]):
        assert cli(*words, "--base-path", base_path, "--json").code == 0
    assert listed("--base-path", base_path) == [world.server.socket_path]


def test_no_server_to_ask(base_path: str, tmp_path: Path) -> None:
    """The error says where the command looked, and how to start a server."""
    assert cli("objects", "--base-path", base_path).complaint.startswith(
        f"no server answers at {base_path}-<tag>.sock: start one with 'shared-rpc serve app.py'"
    )
    assert cli("info", "--socket", f"{tmp_path}/none.sock").complaint.startswith(
        f"cannot connect to {tmp_path}/none.sock: no server listens there"
    )
    for words in (["objects"], ["tasks", "wait", "a-1"], ["top", "--once"]):
        assert cli(*words).complaint.startswith(f"no server answers in {tmp_path}: start one with")


def test_info(world: World) -> None:
    """The server's facts, and its endpoints with their options and the first line of their docstrings."""
    rows = cli("info").rows
    assert ["socket_path", world.server.socket_path] in rows
    assert ["mechanism", "memfd: host memory is a memfd"] in rows
    assert ["load", "yes", "all arguments", "parallel", "read_write", "all", "600 s", "on_evict", "Build a layer."] in rows
    data = cli("info", "--json").data
    assert set(data) == {"server", "endpoints"}
    assert (data["server"]["server_id"], data["endpoints"]["load"]["idle_ttl"]) == (world.server.info()["server_id"], 600)


@pytest.mark.usefixtures("admitted_source")
def test_info_describes_the_source(world: World) -> None:
    """In one line, with what it reports."""
    assert "source " not in cli("info").succeeded
    with Client(socket_path=world.server.socket_path) as client, client.source() as source:
        status: ClusterStatus = {"cluster": "prod", "node": "a", "state": "joined", "nodes": 3, "objects": 1}
        source.report(status | {"bytes_received": 1 << 30, "activity": ["sends load()"]})
        (line,) = [line for line in cli("info").output.splitlines() if line.startswith("source")]
    assert f"pid {os.getpid()}, for" in line
    assert "cluster prod, node a, state joined, nodes 3, objects 1, bytes received 1.0 GiB; sends load()" in line


def test_objects_and_their_holders(world: World) -> None:
    """Every object with the processes that hold it, and their command lines."""
    client = world.client()
    with client.call("load", 16):
        client.call("load", size=32, name="big").release()
        header, base, big = cli("objects").rows
        data = cli("objects", "--json").data
    where = ["device", "tier", "generation", "cached", "active"]
    assert header == ["object", "of", "size", "private", *where, "held by", "age", "last used"]
    private = f"{data[0]['private_nbytes']} B"
    assert base[1:8] == ["load(size=16, name='base')", "1.0 KiB", private, "cpu", "device", "1", "yes"]
    assert big[1:10] == ["load(size=32, name='big')", "4.0 KiB", private, "cpu", "device", "1", "yes", "0", "none"]
    assert base[8] == "1" and re.fullmatch(rf"{os.getpid()} \(.+\)", base[9])
    assert [item["object_id"] for item in data] == [base[0], big[0]]
    assert [[one["pid"] for one in item["holders"]] for item in data] == [[os.getpid()], []]


def test_an_unfetched_result_is_held_by_its_task(client: Client) -> None:
    """Not by the process that submitted that, which may have exited."""
    task_id = client.submit("load", 16)
    eventually(lambda: client.get_task_status(task_id).status is TaskStatus.COMPLETED)
    assert cli("objects").rows[1][9] == f"task {task_id}, not fetched"


def test_buffers_are_marked(world: World) -> None:
    """They are objects that no call made; ``ls`` counts them separately."""
    client = world.client()
    client.call("load", 16).release()
    assert cli("ls").rows[1][4] == "1"
    client.create_buffer(5000, keep=True).release()
    with client.create_buffer(100) as freed:
        client.free_buffer(freed)
        assert cli("ls").rows[1][4] == "3 (2 buffers)"
        assert [row[1:3] for row in cli("objects").rows[2:]] == [["buffer", "4.9 KiB"], ["buffer, freed", "100 B"]]
        assert [item["kind"] for item in cli("objects", "--json").data] == ["result", "buffer", "buffer"]


def test_devices(world: World) -> None:
    """Memory of each device: all, used, and the quota."""
    world.client().create_buffer(3 << 20, ttl=600).release()
    header, row = cli("devices").rows
    assert header == ["device", "name", "memory", "free", "used", "quota"]
    assert row[:2] == ["cpu", "host memory"] and row[4:] == ["3.0 MiB", "8.0 MiB"]
    (found,) = cli("devices", "--json").data
    assert (found["id"], found["total"], found["used"], found["limit"]) == ("cpu", TOTAL, 3 << 20, 8 << 20)


def test_text_of_clients_moves_no_cursor(world: World, tmp_path: Path) -> None:
    """Cache keys and errors quote values of callers; each object is one line without escape sequences."""
    world.share("load", cache_format_key="{name}")(lambda name: torch.ones(1))
    world.client().call("load", "red \x1b[31m\nand [bold]")
    _, row = cli("objects").succeeded.splitlines()
    assert "load:red [31m and [bold]" in row
    assert "\x1b" not in cli("ls", "--base-path", f"{tmp_path}/a\x1b[2J\x1b/b").output
    assert "\x1b" not in cli("info", "--socket", f"{tmp_path}/\x1b[2J.sock").complaint


def test_invalidating_an_endpoint_or_a_call(world: World) -> None:
    """Arguments are Python literals or plain text; the output says how many results were dropped."""
    for name in ("base", "big", "3"):
        world.client().call("load", 1, name).release()
    assert cli("objects", "invalidate", "load", "size=1", "name=big").succeeded == "1 cached result of load dropped\n"
    assert cli("objects", "invalidate", "load", "size=1", "name='3'").succeeded == "1 cached result of load dropped\n"
    assert cli("objects", "invalidate", "load", "size=1", "name=big").succeeded == "0 cached results of load dropped\n"
    assert cli("objects", "invalidate", "load", "--json").data == {"endpoint": "load", "invalidated": 1}


def test_doctor(base_path: str, tmp_path: Path) -> None:
    """A table of the checks, the findings, and the advice: every finding that is not good has a fix, and a broken one fails."""
    header, *rows = cli("doctor").rows
    assert header == ["what", "found", "what to do"]
    assert {row[1]: (row[0], row[2]) for row in rows}["socket directory"] == ("ok", f"{tmp_path}, mode 0700")
    ran = cli("doctor", "--json", environ={"SHARED_TENSOR_ROLE": "sever"})
    assert (ran.code, ran.errors) == (1, "")
    findings = {finding["what"]: finding for finding in json.loads(ran.output)}
    assert findings.keys() >= {"environment", "socket directory", "limits", "host memory", "torch"}
    assert all(finding["fix"] for finding in findings.values() if finding["state"] != "good")
    assert [name for name, finding in findings.items() if finding["state"] == "broken"] == ["environment"]
    assert findings["environment"]["found"].startswith("SHARED_TENSOR_ROLE='sever': use 'server', 'client'")


def test_doctor_examines_the_socket_directory(base_path: str, tmp_path: Path) -> None:
    """It reports one that a server would refuse, or could not create, and creates none."""
    (tmp_path / "file").touch()

    def broken(path: str | None = None) -> list[tuple[str, str]]:
        return [(finding.found, finding.fix) for finding in examine(path) if finding.state == "broken"]

    assert broken(str(tmp_path / "later" / "s")) == []
    assert not (tmp_path / "later").exists()
    ((found, fix),) = broken(str(tmp_path / "file" / "s"))
    assert str(tmp_path / "file") in found and "SHARED_TENSOR_BASE_PATH" in fix
    tmp_path.chmod(0o777)
    ((found, fix),) = broken()
    assert found == f"{tmp_path} has mode 0777, so other users can write to it"
    assert fix.startswith(f"chmod 700 {tmp_path}")


def test_commands_of_other_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point of the group shared_rpc.cli is a command; for a known one that is missing the error names the extra."""
    other = typer.Typer()
    other.command()(lambda: print("it runs"))
    points = [SimpleNamespace(load=lambda: other)]
    monkeypatch.setattr("shared_rpc.cli.app.entry_points", lambda **_: points)
    assert CliRunner().invoke(program, ["cluster"]).output == "it runs\n"
    points.clear()
    ran = CliRunner().invoke(program, ["cluster", "status"])
    assert isinstance(ran.exception, ConfigurationError) and "pip install 'shared-rpc[ray]'" in str(ran.exception)


def test_help_lists_the_commands() -> None:
    """With what each does; -h is --help, and so is no command at all; an unknown word is misuse."""
    text = cli("--help").succeeded
    for command in ("serve", "ls", "info", "objects", "devices", "doctor", "tasks", "call"):
        assert re.search(rf"\b{command} +[A-Z]", text)
    assert cli("-h").succeeded == text
    assert cli().output.strip() == text.strip()
    assert cli("-V").succeeded == f"shared-rpc {__version__}\n"
    assert (cli("lst").code, cli("ls", "--jsn").code, cli("serve", "app", "--threads", "0").code) == (2, 2, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("objects", "invalidate", "load", "16"), "'16' is no argument: write key=value"),
        (("objects", "import", "x.record", "size=16"), "name its endpoint with --endpoint"),
        (("stop", "--all", "--socket", "x.sock"), "--all and --socket contradict each other"),
        (("tasks", "--json", "wait", "a-1"), "--json is of the list: write the options of 'wait' after it"),
    ],
    ids=" ".join,
)
def test_contradictory_arguments_are_misuse(base_path: str, arguments: tuple[str, ...], words: str) -> None:
    """The error is one line."""
    assert words in cli(*arguments).misuse


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("2000", 2000), ("2K", 2048), ("2kb", 2048), ("2 KiB", 2048)),
        *(("1.5M", 3 << 19), ("20G", 20 << 30), ("1t", 1 << 40), ("0", 0)),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    """A number of bytes, or one with a unit of 1024."""
    assert in_bytes(f"--max-bytes {text}", text) == expected


@pytest.mark.parametrize(
    ("seconds", "text", "short"),
    [
        (2.1e-4, "210 µs", "0s"),
        (0.00099999, "1 ms", "0s"),
        (99.96, "100 s", "100s"),
        (600, "10 min", "10m"),
        (7300, "2 h", "2h"),
    ],
)
def test_durations(seconds: float, text: str, short: str) -> None:
    """With three digits, in the unit that suits them; or in few characters."""
    assert (span(seconds), lasted(seconds)) == (text, short)


def test_commands_load_no_torch(world: World) -> None:
    """They ask a server and rebuild nothing, neither results nor exceptions: torch alone would take seconds to import."""
    client = world.client()
    completed, failed = client.submit("load", 1), client.submit("load", "none")
    client.wait_for_task(completed).release()
    with pytest.raises(TypeError):
        client.wait_for_task(failed)
    code = f"""
        import sys
        from shared_rpc.cli.__main__ import main
        for words in (
            "ls", "info", "devices", "objects", "objects invalidate load size=1", "tasks", "tasks wait {completed} --json",
            "tasks wait {failed}", "tasks cancel {completed}", "call load size=1", "top --once -d 0.05",
        ):
            sys.argv[1:] = words.split()
            try:
                main()
            except SystemExit as ended:
                assert not ended.code or "{failed}" in words, words
            loaded = {{"torch", "numpy", "cloudpickle", "shared_rpc.codec", "shared_rpc.server.server"}} & sys.modules.keys()
            assert not loaded, (words, loaded)
        assert not {{"asyncio", "textual"}} & sys.modules.keys()
        print("checked")
    """
    child = world.process(code, fresh=True)
    child.expect("checked")


def test_a_reader_that_exits_early_is_no_error(world: World) -> None:
    """``shared-rpc objects | head`` leaves no traceback."""
    for size in range(1, 40):
        world.client().call("load", size).release()
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as output:
        assert spawn("objects", "--json", stdout=output).errors == ""


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (BrokenPipeError(), 1)])
def test_ctrl_c_and_closed_pipes_end_the_list_of_servers(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a traceback, although no parser handles them there."""
    monkeypatch.setattr("shared_rpc.cli.listing.live_servers", Mock(side_effect=error))
    monkeypatch.setattr("sys.argv", ["shared-rpc", "ls"])
    with pytest.raises((SystemExit, type(error))) as ended:  # an escaped KeyboardInterrupt would end pytest
        main()
    assert getattr(ended.value, "code", None) == code
