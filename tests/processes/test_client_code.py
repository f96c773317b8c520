"""Servers that accept no code, only plain tensors and scalars: from any client, or from those of other containers."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shared_rpc import Server
from shared_rpc.errors import CapabilityError
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.exported import Adopt
from shared_rpc.protocol.peers import shares_pid_namespace
from tests.kit.attacker import in_namespaces, needs_namespaces
from tests.kit.brokers import BrokerApp
from tests.kit.raw import Raw
from tests.kit.world import World

#: A client that sends a module, and prints how that went.
SEND = """
import sys, torch
from shared_rpc import Client

with Client(socket_path=sys.argv[1], timeout=40.0) as client:
    print("plain", client.call("total", [torch.ones(2), 1]).tolist())
    try:
        print("module", client.call("total", [torch.nn.Linear(1, 1)]).tolist())
    except Exception as error:
        print("module", type(error).__name__, error)
"""


def total(values: list[Any]) -> torch.Tensor:
    """The value that the test's endpoint returns."""
    return torch.stack([value.sum() if isinstance(value, torch.Tensor) else torch.tensor(1.0) for value in values]).sum()


@pytest.fixture
def server(world: World) -> Callable[[str], Server]:
    """``server(client_code)`` serves a total, and an object to export."""
    world.share("total", cache=False)(total)
    world.share("load", managed=True)(lambda: torch.ones(4))
    return lambda code: world.serve(client_code=code)


def test_no_code_is_accepted(server: Callable[[str], Server], world: World) -> None:
    """Modules and records are refused by an error that names the option; tensors and scalars are accepted."""
    server("none")
    client = world.client()
    assert client.call("total", [torch.ones(2), 1]).tolist() == 3.0
    for attempt in (client.call, client.submit, client.prepare):
        with pytest.raises(CapabilityError, match=r"from clients \(client_code='none'\), and an argument that is a module"):
            attempt("total", [torch.nn.Linear(1, 1)])
    with (
        client.call("load") as handle,
        client.export(handle) as record,
        pytest.raises(CapabilityError, match="and a record contains one"),
    ):
        client.adopt(record)
    assert client.call("total", [torch.ones(2)]).tolist() == 2.0


def test_no_record_is_accepted(server: Callable[[str], Server]) -> None:
    """Even from a client that skips the check."""
    with Raw(server("none").socket_path) as raw:
        answer = raw.ask(Adopt([]))
    assert isinstance(answer, m.Error) and answer.code == CapabilityError.code


def test_the_own_pid_namespace_is_trusted(server: Callable[[str], Server], world: World) -> None:
    """The server's own processes, and those of its pid namespace: these could as well attach a debugger to it."""
    assert world.process(SEND, server("namespace").socket_path).expect("module") == "module 1.0"
    assert world.provider.call("total", [torch.nn.Linear(1, 1)]).tolist() == 1.0


@needs_namespaces
@pytest.mark.parametrize(("code", "answer"), [("all", "module 1.0"), ("namespace", "module CapabilityError the server")])
def test_other_containers_are_not_trusted(server: Callable[[str], Server], world: World, code: str, answer: str) -> None:
    """They may send code only if the server accepts it from all clients; other calls are served."""
    child = in_namespaces(world, SEND, server(code).socket_path)
    assert child.expect("plain") == "plain 3.0"
    assert child.expect("module").startswith(answer)


def test_an_ended_process_is_not_trusted(tmp_path: Path) -> None:
    """Its pid may be reused."""
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(path)
        listener.listen()
        pid = os.fork()
        if not pid:
            client.connect(path)
            os._exit(0)
        os.waitpid(pid, 0)
        accepted, _ = listener.accept()
        with accepted:
            assert not shares_pid_namespace(accepted)


def test_brokers_accept_no_code(broker_app: BrokerApp) -> None:
    """On behalf of their workers."""
    broker_app.start(client_code="none")
    with pytest.raises(CapabilityError, match="client_code='none'"):
        broker_app.connect().call("echo", torch.nn.Linear(1, 1))
    assert broker_app.connect().call("echo", torch.ones(1)).tolist() == [1.0]
