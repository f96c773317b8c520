"""A zygote, and forks that are equivalent to new processes in everything that can be observed from inside."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shared_rpc.zygote.wire import framed, receive, send
from tests.kit.processes import eventually
from tests.kit.zygotes import Zygote

#: torch is imported again in each.
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Zygote]]:
    """``make(**options)`` starts a zygote, which is ended at the end."""
    made: list[Zygote] = []

    def one(**options: Any) -> Zygote:
        made.append(Zygote(tmp_path, **options))
        return made[-1]

    yield one
    for zygote in made:
        zygote.close()


@pytest.fixture
def zygote(make: Callable[..., Zygote]) -> Zygote:
    """A zygote without imports."""
    return make()


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """A zygote that has imported torch, for tests that do not change it."""
    zygote = Zygote(tmp_path_factory.mktemp("torch"))
    zygote.prepare("torch", "numpy", "numpy.random", "tempfile", "multiprocessing", "random", "concurrent.futures")
    yield zygote
    zygote.close()


def test_received_descriptors_are_not_inherited() -> None:
    """By programs that the receiver executes."""
    one, other = socket.socketpair()
    with one, other, open(os.devnull, encoding="ascii") as file:
        send(one, framed({"type": "Fork"}), [file.fileno()])
        _, [received] = receive(other)
    assert not os.get_inheritable(received)
    os.close(received)


# Properties of a fork.


def test_random_states_differ(with_torch: Zygote) -> None:
    """Those of the standard library, of numpy and of torch, names of temporary files, and the keys of multiprocessing."""
    with_torch.write(
        "draw",
        """
        import multiprocessing, random, tempfile
        import numpy, torch
        from tell import say

        name, key = next(tempfile._get_candidate_names()), multiprocessing.current_process().authkey.hex()
        say([random.random(), numpy.random.rand(), torch.rand(1, dtype=torch.float64).item(), name, key])
    """,
    )
    forks = [with_torch.fork("draw") for _ in range(3)]
    for values in zip(*(fork.read_message() for fork in forks), strict=True):
        assert len(set(values)) == 3
    assert [fork.close() for fork in forks] == [(0, "")] * 3


def test_atexit_callbacks_of_imports_run_once_per_fork(zygote: Zygote, tmp_path: Path) -> None:
    """Each fork runs them once; the zygote does not."""
    zygote.write(
        "registers",
        f"""
        import atexit, os
        atexit.register(lambda: open({str(tmp_path / "end")!r}, "a").write(f"{{os.getpid()}}\\n"))
    """,
    )
    zygote.write("ends", "import registers, atexit; from tell import say; atexit.register(say, 'its own')")
    zygote.prepare("registers")
    forks = [zygote.fork("ends") for _ in range(2)]
    assert [fork.read_message() for fork in forks] == ["its own"] * 2
    assert [fork.close() for fork in forks] == [(0, "")] * 2
    zygote.socket.close()
    assert zygote.process.wait(20) == 0
    assert sorted((tmp_path / "end").read_text().split()) == sorted(str(fork.pid) for fork in forks)


# Conditions that make a process unfit to be forked.


def test_failing_imports_are_left_out(zygote: Zygote) -> None:
    """By name, with the reason, even for SystemExit."""
    zygote.write("raises", "raise LookupError('no such thing')")
    zygote.write("leaves", "raise SystemExit(3)")
    ready = zygote.prepare("raises", "leaves", "no_such_module", "colorsys")
    assert ready["dropped"] == {
        "raises": "LookupError: no such thing",
        "leaves": "SystemExit: 3",
        "no_such_module": "ModuleNotFoundError: No module named 'no_such_module'",
    }
    assert ready["modules"] > 0


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "threads"),
        ("import socket; kept = socket.socketpair()", "socket:"),
        ("import subprocess; kept = subprocess.Popen(['cat'], stdin=subprocess.PIPE)", "child processes"),
    ],
    ids=["thread", "socket", "process"],
)
def test_imports_that_prevent_forks_are_named(zygote: Zygote, code: str, why: str) -> None:
    """And nothing is forked."""
    zygote.write("spoils", code)
    answer = zygote.ask("colorsys", "spoils")
    assert (answer["type"], answer["module"]) == ("Unfit", "spoils")
    assert why in answer["why"]
    assert zygote.process.wait(20) == 0


@pytest.mark.gpu
def test_imports_that_initialise_cuda_are_detected(zygote: Zygote) -> None:
    """By torch, or by the driver's library alone."""
    zygote.write("spoils", "import torch; torch.zeros(1, device='cuda')")
    answer = zygote.ask("spoils")
    assert (answer["type"], answer["module"], "CUDA" in answer["why"]) == ("Unfit", "spoils", True)


@pytest.mark.gpu
def test_imports_that_check_for_a_gpu_are_harmless(zygote: Zygote) -> None:
    """The process can be forked; each fork sees its own devices."""
    zygote.write("asks", "import torch; available = torch.cuda.is_available()")
    zygote.write(
        "uses",
        """
        import os, asks, torch
        from tell import say

        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        total = torch.zeros(2, device="cuda").add_(1).sum().item()
        say([asks.available, torch.cuda.device_count(), total, torch.cuda._is_in_bad_fork()])
    """,
    )
    zygote.prepare("asks")
    forks = [zygote.fork("uses") for _ in range(2)]
    assert [fork.read_message() for fork in forks] == [[True, 1, 2.0, False]] * 2
    assert [fork.close() for fork in forks] == [(0, "")] * 2


def test_imports_that_compute_are_detected(make: Callable[..., Zygote]) -> None:
    """OpenMP would wait in a fork for missing threads: the check detects that in time."""
    zygote = make(environ={"OMP_NUM_THREADS": "2"})
    zygote.write(
        "computes",
        """
        import torch
        from shared_rpc.zygote import safety

        safety._PATIENCE = 0.5  # seconds until a fork that does not compute is taken for one that cannot
        torch.set_num_threads(2)
        torch.ones(2000, 2000).exp().sum()
        """,
    )
    answer = zygote.ask("computes")
    assert answer["type"] == "Unfit"
    assert "a fork of it cannot compute" in answer["why"]


def test_modules_that_shadow_the_users_are_refused(zygote: Zygote) -> None:
    """The app would get the wrong one."""
    answer = zygote.ask("colorsys", own=["colorsys"])
    assert answer["type"] == "Unfit"
    assert "'colorsys'" in answer["why"]


# Validity of its imports.


def test_forks_have_the_variables_set_by_imports(make: Callable[..., Zygote]) -> None:
    """Unless the requested process has its own value."""
    zygote = make(environ={"KEPT": "as it was"})
    zygote.write("looks", "import os; os.environ['MADE'] = 'by an import'")
    zygote.write(
        "says",
        """
        import os, looks
        from tell import say

        say([os.environ.get(name) for name in ("KEPT", "MADE", "PYTORCH_NVML_BASED_CUDA_CHECK")])
    """,
    )
    zygote.prepare("looks")
    assert zygote.fork("says").read_message() == ["as it was", "by an import", None]
    zygote.environ["MADE"] = "by the request"
    assert zygote.fork("says").read_message() == ["as it was", "by the request", None]


# When it cannot be forked.


def test_forks_leave_nothing_in_the_zygote(zygote: Zygote) -> None:
    """Neither processes nor descriptors."""
    zygote.write("says", "from tell import say; say(1)")
    zygote.prepare()
    before = len(os.listdir(f"/proc/{zygote.process.pid}/fd"))
    for _ in range(5):
        zygote.fork("says").close()
    eventually(lambda: len(os.listdir(f"/proc/{zygote.process.pid}/fd")) == before)
    children = Path(f"/proc/{zygote.process.pid}/task/{zygote.process.pid}/children")
    eventually(lambda: children.read_text() == "")
