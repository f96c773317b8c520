"""Writes to host memory that is shared for reading: a message is printed before SIGSEGV ends the process."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

import pytest
import torch

from tests.kit.world import World

#: A weight large enough for torch to write to it in several threads.
SIDE = 2048

#: The beginning of every child: ``weight`` is read-only, and ``other`` is private.
BEGIN = """
import ctypes, faulthandler, os, signal, sys, threading
import torch
from shared_rpc import Client

def attach():
    client = Client(device="cpu", connect_timeout=5)
    return client, client.call("load")

{before}
client, handle = attach()
weight, other = handle.value.weight, torch.zeros(4)
{code}
print("survived", flush=True)
"""

MESSAGE = "wrote to memory that is shared with access='read', and is killed by SIGSEGV"


@pytest.fixture
def world(world: World) -> World:
    """A server whose clients may only read, and one endpoint whose clients may write."""

    @world.share(access="read", managed=True)
    def load() -> torch.nn.Module:
        return torch.nn.Linear(SIDE, SIDE, bias=False).requires_grad_(False)

    @world.share(managed=True)
    def writable() -> torch.Tensor:
        return torch.zeros(4)

    return world


@pytest.fixture
def run(world: World) -> Callable[..., tuple[int, str, str]]:
    """``run(code, before)`` runs code in a client; returns its exit code, its output, and its errors."""

    def run(code: str, before: str = "") -> tuple[int, str, str]:
        child = world.process(BEGIN.format(code=code, before=before))
        output, errors = child.process.communicate(timeout=50)
        return child.process.returncode, output, errors

    return run


Run = Callable[..., tuple[int, str, str]]


#: Ways to write to ``weight``.
WRITES = {
    "item": "weight[3, 4] = 1.0",
    "threads of torch": "torch.set_num_threads(4)\nweight.zero_()",
}


@pytest.mark.parametrize("how", WRITES)
def test_a_write_is_reported(run: Run, world: World, how: str) -> None:
    """Once, with the object, its endpoint, the place, the line and a remedy; then the process ends as without the report."""
    status, output, errors = run(WRITES[how])
    assert (status, output) == (-signal.SIGSEGV, "")
    assert errors.count(MESSAGE) == 1
    (item,) = world.server._engine.ask(lambda core: [stored.object_id for stored in core.objects])
    found = re.search(r"byte (\d+) of segment ([0-9a-f]{16}) of (\d+) bytes, with (.*); address 0x", errors)
    assert found is not None and int(found[1]) < int(found[3])
    assert found[4] == f"object {item} of load()"
    assert re.search(r'\n  File ".+", line \d+ in <module>\n', errors)
    assert "copy.deepcopy(module)" in errors and "read-only-weights" in errors


# Other faults and other handlers.


def test_other_faults_are_not_reported(run: Run) -> None:
    """They end the process as usual."""
    assert run("ctypes.string_at(0)") == (-signal.SIGSEGV, "", "")


FATAL, ENABLE = "Fatal Python error: Segmentation fault", "faulthandler.enable()"


@pytest.mark.parametrize(
    ("before", "code", "texts"),
    [
        (ENABLE, "weight.numpy()[0] = 1", [MESSAGE, FATAL]),
        ("", f"{ENABLE}\nweight.numpy()[0] = 1", [FATAL, "<module>"]),
    ],
    ids=["enabled before", "enabled later"],
)
def test_faulthandler_is_compatible(run: Run, before: str, code: str, texts: list[str]) -> None:
    """The last installed handler runs first; faulthandler passes no address on, so there is no report then."""
    status, _, errors = run(code, before)
    assert (status, errors.count(FATAL), MESSAGE in errors) == (-signal.SIGSEGV, 1, MESSAGE in texts)
    places = [errors.index(text) for text in texts]
    assert places == sorted(places)


def test_handlers_of_the_user_are_called(run: Run) -> None:
    """For a sent signal."""
    take = "signal.signal(signal.SIGSEGV, lambda *_: print('handled', flush=True))"
    ran = run("os.kill(os.getpid(), signal.SIGSEGV)\nfor _ in range(3): pass", take)
    assert ran == (0, "handled\nsurvived\n", "")


def test_no_handler_without_read_only_memory(run: Run) -> None:
    """A process that may write to all its memory keeps its handlers."""
    caught = "print(open('/proc/self/status').read().partition('SigCgt:')[2].split()[0])"
    attach = "client = Client(device='cpu', connect_timeout=5)\nheld = client.call('writable')"
    status, output, _ = run("", f"{caught}\n{attach}\n{caught}")
    before, after = output.split()[:2]
    assert status == 0 and before == after and not int(after, 16) >> (signal.SIGSEGV - 1) & 1
