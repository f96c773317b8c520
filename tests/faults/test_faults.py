"""Writing to host memory that is shared for reading: what the process that does it says before it ends by SIGSEGV."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator

import pytest
import torch

from shared_rpc import Client, Provider, Server
from shared_rpc.memory import faults
from shared_rpc.memory.mapping import MAPPINGS
from tests.kit.processes import Child, python

pytestmark = pytest.mark.usefixtures("no_leaks")

#: A weight large enough for torch to write to it in several threads.
SIDE = 2048

#: What every child begins with: ``weight`` is read-only, and ``other`` is its own.
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

TOLD = "wrote to memory that is shared with access='read', and ends by SIGSEGV"


@pytest.fixture
def server(provider: Provider, serve: Callable[..., Server]) -> Server:
    """A server whose clients may only read, and one endpoint whose clients may write."""

    @provider.share(access="read", managed=True)
    def load() -> torch.nn.Module:
        return torch.nn.Linear(SIDE, SIDE, bias=False).requires_grad_(False)

    @provider.share(managed=True)
    def writable() -> torch.Tensor:
        return torch.zeros(4)

    return serve()


@pytest.fixture
def run(server: Server, children: list[Child]) -> Callable[..., tuple[int, str, str]]:
    """``run(code, before)`` runs code in a client: its exit code, what it printed, and what it said on standard error."""

    def run(code: str, before: str = "") -> tuple[int, str, str]:
        child = python(BEGIN.format(code=code, before=before))
        children.append(child)
        output, errors = child.process.communicate(timeout=50)
        return child.process.returncode, output, errors

    return run


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def as_it_was() -> Iterator[None]:
    """This process's own handler, which a mapping of a test installs, is taken away again."""
    yield
    faults._HANDLER.remove()
    faults._HANDLER._earlier = None


@pytest.mark.parametrize(
    "code",
    [
        "weight[3, 4] = 1.0",
        "torch.set_num_threads(4)\nweight.zero_()",
        "torch.set_num_threads(1)\nweight.normal_()",
        "weight.numpy()[5] = 1",
        "ctypes.memset(weight.data_ptr() + 4096, 1, 8)",
        "thread = threading.Thread(target=weight.zero_)\nthread.start()\nthread.join()",
        "threads = [threading.Thread(target=weight[n].zero_) for n in range(8)]\n"
        "for thread in threads: thread.start()\nfor thread in threads: thread.join()",
        "torch.mm(weight, weight, out=weight)",
        "memoryview(weight.numpy())[0, 0] = 1.0",
    ],
    ids=["item", "threads of torch", "one thread", "numpy", "memset", "a thread", "threads", "gemm", "memoryview"],
)
def test_a_write_is_told_of(run: Run, server: Server, code: str) -> None:
    """The object, its endpoint, the place, the line and what to do; once, and the process ends as it did without."""
    status, output, errors = run(code)
    assert (status, output) == (-signal.SIGSEGV, "")
    assert errors.count(TOLD) == 1
    (item,) = server._engine.ask(lambda core: [stored.object_id for stored in core.objects])
    found = re.search(r"byte (\d+) of segment ([0-9a-f]{16}) of (\d+) bytes, with (.*); address 0x", errors)
    assert found is not None and int(found[1]) < int(found[3])
    assert found[4] == f"object {item} of load()"
    assert re.search(r'\n    File ".+", line \d+ in \S+\n', errors)
    assert "copy.deepcopy(module)" in errors and "read-only-weights" in errors


def test_the_line_is_the_one_that_wrote(run: Run) -> None:
    """Innermost first, as faulthandler has it, and the byte is the one that was written."""
    _, _, errors = run("def careless():\n    ctypes.memset(weight.data_ptr() + 4096, 1, 1)\ncareless()")
    lines = [line.strip() for line in errors.splitlines()]
    first = lines.index("by (most recent call first):") + 1
    assert lines[first].endswith("in careless") and lines[first + 1].endswith("in <module>")
    assert int(re.search(r"byte (\d+) of", errors)[1]) % 4096 == 0


def test_a_forked_child_tells_too(run: Run) -> None:
    """With its own pid; its parent goes on."""
    status, output, errors = run(
        """
pid = os.fork()
if pid == 0:
    weight.numpy()[0] = 1
    os._exit(0)
print(pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    )
    pid, ended = output.split("\n")[0].split()
    assert (status, int(ended)) == (0, -signal.SIGSEGV)
    assert f"process {pid} {TOLD}" in errors


def test_a_copy_can_be_written(run: Run) -> None:
    """The advice holds."""
    status, output, _ = run("import copy\ncopy.deepcopy(handle.value).weight.zero_()\nweight.clone().zero_()\nother.zero_()")
    assert (status, output) == (0, "survived\n")


# What is not ours.


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("ctypes.string_at(0)", -signal.SIGSEGV),
        ("ctypes.memset(ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p).value, 0, 1)", -signal.SIGSEGV),
        ("signal.raise_signal(signal.SIGSEGV)", -signal.SIGSEGV),
        ("os.kill(os.getpid(), signal.SIGSEGV)\nsignal.pause()", -signal.SIGSEGV),
        ("ctypes.CDLL(None).regcomp(ctypes.create_string_buffer(1024), b'(' * 2_000_000, 1)", -signal.SIGSEGV),
        ("os.abort()", -signal.SIGABRT),
    ],
    ids=["null", "code", "raised", "sent", "overflow", "abort"],
)
def test_another_end_is_as_it_was(run: Run, code: str, status: int) -> None:
    """Faults elsewhere, signals that were sent, and a stack that has overflowed: nothing is said, and the process ends."""
    assert run(code) == (status, "", "")


def test_faulthandler_before(run: Run) -> None:
    """Enabled before the memory was mapped it has its word after ours."""
    status, _, errors = run("weight.numpy()[0] = 1", "faulthandler.enable()")
    assert status == -signal.SIGSEGV
    assert errors.index(TOLD) < errors.index("Fatal Python error: Segmentation fault")


def test_faulthandler_after(run: Run) -> None:
    """Enabled later it is first, and does not hand the address on: what may have been written to is named all the same."""
    status, _, errors = run("faulthandler.enable()\nweight.numpy()[0] = 1")
    assert status == -signal.SIGSEGV
    assert errors.index("Fatal Python error: Segmentation fault") < errors.index("if this was a write, it may have been to")
    assert "of load()" in errors


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_faulthandler_and_another_fault(run: Run, before: bool) -> None:
    """It tells of what is not ours as ever."""
    enable = "faulthandler.enable()"
    status, _, errors = run(f"{'' if before else enable}\nctypes.string_at(0)", enable if before else "")
    assert status == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in errors and "string_at" in errors and TOLD not in errors


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_handler_of_the_user_is_called(run: Run, before: bool) -> None:
    """``signal.signal`` before or after: a signal that is sent is that handler's."""
    take = "signal.signal(signal.SIGSEGV, lambda *_: print('handled', flush=True))"
    status, output, errors = run(
        f"{'' if before else take}\nos.kill(os.getpid(), signal.SIGSEGV)\nfor _ in range(3): pass", take if before else ""
    )
    assert (status, output, errors) == (0, "handled\nsurvived\n", "")


def test_who_took_the_signal_keeps_it(run: Run) -> None:
    """Later mappings do not take it back."""
    status, _, errors = run("faulthandler.enable()\nmore = attach()\ndel handle, weight\nctypes.string_at(0)")
    assert status == -signal.SIGSEGV
    assert errors.count("Fatal Python error: Segmentation fault") == 1


def test_no_handler_where_nothing_is_read_only(run: Run) -> None:
    """A process that may write to all it has is left alone."""
    status, output, _ = run(
        "", "print(client_handler := open('/proc/self/status').read().partition('SigCgt:')[2].split()[0])\n"
        "client = Client(device='cpu', connect_timeout=5)\nheld = client.call('writable')\n"
        "print(open('/proc/self/status').read().partition('SigCgt:')[2].split()[0])",
    )  # fmt: skip
    before, after = output.split()[:2]
    assert status == 0 and before == after and not int(after, 16) >> (signal.SIGSEGV - 1) & 1


def test_memory_that_was_unmapped_is_not_told_of(server: Server, connect: Callable[..., Client], as_it_was: None) -> None:
    """What lies there next is somebody else's."""
    known = len(faults._places)
    handle = connect().call("load")
    address = handle.value.weight.data_ptr()
    assert faults._place_of(address) is not None and len(faults._places) == known + 1
    handle.release()
    del handle
    MAPPINGS.drain()
    assert faults._place_of(address) is None and len(faults._places) == known
