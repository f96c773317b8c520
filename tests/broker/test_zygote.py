"""A zygote, and what its forks have in common with new processes: all that can be seen from inside."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.kit.processes import PYTHONPATH, eventually, python
from tests.kit.zygotes import Zygote

#: torch is imported anew in each.
pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("new_processes")]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Zygote]]:
    """``make(**options)`` is a zygote; it is ended at the end."""
    made: list[Zygote] = []

    def one(**options: Any) -> Zygote:
        made.append(Zygote(tmp_path, **options))
        return made[-1]

    yield one
    for zygote in made:
        zygote.close()


@pytest.fixture
def zygote(make: Callable[..., Zygote]) -> Zygote:
    """A zygote that has imported nothing yet."""
    return make()


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """A zygote that has imported torch, for tests that do not change it."""
    zygote = Zygote(tmp_path_factory.mktemp("torch"))
    zygote.prepare("torch", "numpy", "numpy.random", "tempfile", "multiprocessing", "random", "concurrent.futures")
    yield zygote
    zygote.close()


# What a fork is.

FACTS = """
    import torch
    import gc, logging, multiprocessing, os, resource, signal, sys, threading, warnings
    from pathlib import Path
    from tell import say

    def stream(one):
        buffer = type(one.buffer).__name__
        return [one.name, one.mode, one.encoding, one.errors, one.line_buffering, one.write_through, buffer, one.isatty()]

    def status(*names):
        return [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(names)]

    process = multiprocessing.current_process()
    say({
        "argv": sys.argv, "path": sys.path, "flags": list(sys.flags), "words": sys.orig_argv,
        "main": [__name__, __spec__.name, __file__, sys.modules["__main__"].__dict__ is globals()],
        "environ": dict(os.environ), "cwd": os.getcwd(), "umask": os.umask(0),
        "limits": [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")],
        "leads its group": os.getpgid(0) == os.getpid(),
        "signals": [repr(signal.getsignal(number)) for number in signal.valid_signals()],
        "blocked": status("SigBlk", "SigIgn", "SigCgt", "NoNewPrivs"), "comm": Path("/proc/self/comm").read_text(),
        "wakeup": signal.set_wakeup_fd(-1), "streams": [stream(sys.stdin), stream(sys.stdout), stream(sys.stderr)],
        "standard": [sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
        "fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:-1], "input": sys.stdin.read(),
        "thread": [threading.active_count(), threading.current_thread() is threading.main_thread()],
        "process": [process.name, multiprocessing.parent_process(), multiprocessing.active_children()],
        "collector": [gc.isenabled(), gc.get_threshold()], "warnings": [list(map(str, one)) for one in warnings.filters],
        "loggers": [len(logging.root.handlers), logging.root.level],
        "oom": Path("/proc/self/oom_score_adj").read_text(), "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "cores": sorted(os.sched_getaffinity(0)), "last": hasattr(sys, "last_value"),
        "hook": sys.excepthook is sys.__excepthook__,
    })
"""


@pytest.mark.parametrize(
    ("environ", "options"),
    [
        ({}, ()),
        ({"PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "7", "PYTHONFAULTHANDLER": "1"}, ()),
        ({}, ("-O", "-W", "error", "-X", "dev")),
    ],
    ids=["as usual", "by variables", "by options"],
)
def test_a_fork_is_as_a_new_process(make: Callable[..., Zygote], environ: dict[str, str], options: tuple[str, ...]) -> None:
    """Arguments, environment, streams, signals, limits, groups, threads: nothing tells it from ``python -m``."""
    zygote = make(environ=environ, options=options)
    # What libraries do when they are imported is the same in all cases; torch takes five seconds with "-X dev".
    library = "numpy" if options or environ else "torch"
    zygote.write("facts", FACTS.replace("import torch", f"import {library}"))
    plain = zygote.plain("facts", "--some", "word")
    assert plain.stderr == ""
    zygote.prepare(library, "multiprocessing", "logging", "resource", "tell")
    fork = zygote.fork("facts", "--some", "word")
    expected, found = json.loads(plain.stdout), fork.told()
    assert fork.close() == (0, "")
    assert found == expected


def test_what_serves_knows_the_main_file_of_the_fork(zygote: Zygote, tmp_path: Path) -> None:
    """Children that are spawned at the end of a script run that, and not the zygote's."""
    zygote.write(
        "serves",
        """
        from shared_rpc import Provider
        import shared_rpc.lifecycle.main_end as exits
        from tell import say

        provider = Provider(device="cpu", execution_mode="local")
        say(exits._main_file)
        """,
    )
    zygote.prepare("shared_rpc.lifecycle.main_end", "shared_rpc.provider.provider")
    assert zygote.fork("serves").told() == str(tmp_path / "serves.py")


def test_its_command_line_is_seen_by_others(zygote: Zygote) -> None:
    """Tools that list processes name it by what it does, and not by the zygote's."""
    zygote.write("wait", "from tell import say; say(1); import signal; signal.pause()")
    zygote.prepare()
    fork = zygote.fork("wait", "some", "word")
    fork.told()
    line = Path(f"/proc/{fork.pid}/cmdline").read_bytes().rstrip(b"\0").decode()
    assert line.endswith("-m wait some word")
    os.kill(fork.pid, signal.SIGTERM)
    assert fork.close() == (-signal.SIGTERM, "")


def test_random_numbers_differ(with_torch: Zygote) -> None:
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
    for values in zip(*(fork.told() for fork in forks), strict=True):
        assert len(set(values)) == 3
    assert [fork.close() for fork in forks] == [(0, "")] * 3


def test_a_fork_computes_with_threads_of_its_own(with_torch: Zygote) -> None:
    """Python's, and those of native libraries."""
    with_torch.write(
        "compute",
        """
        import concurrent.futures, threading
        import torch
        from tell import say

        torch.set_num_threads(2)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            sums = list(pool.map(lambda n: (torch.ones(600, 600) @ torch.ones(600, 600)).sum().item(), range(4)))
        say([sums, torch.get_num_threads(), threading.active_count()])
    """,
    )
    fork = with_torch.fork("compute")
    assert fork.told() == [[600.0**3] * 4, 2, 1]
    assert fork.close() == (0, "")


def test_what_an_import_registers_for_the_end(zygote: Zygote, tmp_path: Path) -> None:
    """Each fork does it once; the zygote, which is none of those that imported it, does not."""
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
    assert [fork.told() for fork in forks] == ["its own"] * 2
    assert [fork.close() for fork in forks] == [(0, "")] * 2
    zygote.socket.close()
    assert zygote.process.wait(20) == 0
    assert sorted((tmp_path / "end").read_text().split()) == sorted(str(fork.pid) for fork in forks)


def test_a_handler_that_an_import_made_writes_once(zygote: Zygote) -> None:
    """To the standard error of the fork that logs, with its lock free."""
    zygote.write("handles", "import logging, sys; logging.getLogger().addHandler(logging.StreamHandler(sys.stderr))")
    zygote.write("logs", "import logging, handles; logging.error('a line')")
    zygote.prepare("handles", "logging")
    forks = [zygote.fork("logs") for _ in range(2)]
    assert [fork.close() for fork in forks] == [(0, "a line\n")] * 2


def test_what_a_library_has_opened_stays(make: Callable[..., Zygote], tmp_path: Path) -> None:
    """libffi maps a file that it opened when ctypes was imported, by its number: no fork has another file in its place."""
    library = importlib.import_module("_ctypes").__file__
    early = tmp_path / "early"
    early.mkdir()
    (early / "sitecustomize.py").write_text(f"import os; os.dup2(os.open({library!r}, os.O_RDONLY), 5)")
    zygote = make(environ={"PYTHONPATH": os.pathsep.join([str(early), str(tmp_path), PYTHONPATH])})
    zygote.write("looks", "import os; from tell import say; say(os.readlink('/proc/self/fd/5'))")
    zygote.prepare()
    fork = zygote.fork("looks")
    assert (fork.told(), fork.close()) == (library, (0, ""))
    with open(os.devnull) as one:
        assert "a library in the zygote uses descriptor" in zygote.refused("looks", fds=[one.fileno()] * 3, at=3)["why"]


def test_descriptors_of_one_fork_are_in_no_other(zygote: Zygote) -> None:
    """Nor are the zygote's own: each has those that came with its request, under the numbers that were asked for."""
    zygote.write(
        "list",
        """
        import os
        from tell import say

        fds = [fd for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")]
        say({fd: os.readlink(f"/proc/self/fd/{fd}") for fd in fds})
        """,
    )
    zygote.prepare()
    with ExitStack() as stack:
        sockets = [stack.enter_context(one) for _ in range(3) for one in socket.socketpair()]
        for one in sockets:
            fork = zygote.fork("list", fds=[one.fileno()])
            found = {fd: name for fd, name in fork.told().items() if ".so" not in name}
            assert set(found) == {"0", "1", "2", "50"}
            assert found["50"] == os.readlink(f"/proc/self/fd/{one.fileno()}")
            assert fork.close() == (0, "")


def test_memory_is_shared_with_the_zygote(with_torch: Zygote) -> None:
    """What was imported is there once: a fork has little of its own."""
    with_torch.write("rest", "from tell import say; say(1); import signal; signal.pause()")
    fork = with_torch.fork("rest")
    fork.told()
    lines = Path(f"/proc/{fork.pid}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    # Pages of libraries are shared between all processes; what is dirty is Python's.
    assert sizes["Shared_Dirty"] > 4 * sizes["Private_Dirty"]
    os.kill(fork.pid, signal.SIGKILL)
    fork.close()


# How it ends.


def test_exit_codes_are_its_own(zygote: Zygote) -> None:
    """Codes and signals reach the one that asked for it."""
    zygote.write(
        "ends", "import os, sys; how = sys.argv[1]; os.kill(os.getpid(), int(how[1:])) if how[0] == '-' else sys.exit(int(how))"
    )
    zygote.prepare()
    assert [zygote.fork("ends", str(code)).close()[0] for code in (0, 3, -9, -11)] == [0, 3, -9, -11]


@pytest.mark.parametrize(
    "code", ["raise LookupError('no such thing')", "raise KeyboardInterrupt", "def f(:", "raise SystemExit('a word')"]
)
def test_an_error_ends_it_as_a_new_process(zygote: Zygote, code: str) -> None:
    """With the same traceback, and the same exit code or signal."""
    zygote.write("fails", f"def main():\n    pass\n\nmain()\n{code}\n")
    zygote.prepare()
    plain = zygote.plain("fails")
    assert zygote.fork("fails").close() == (plain.returncode, plain.stderr)
    assert plain.returncode != 0


def test_its_end_is_known_without_the_zygote(zygote: Zygote) -> None:
    """That is killed while it runs: the watcher reports it."""
    zygote.write("waits", "from tell import say; say(1); import sys; sys.exit(len(open(50).read()))")
    zygote.prepare()
    mine, theirs = os.pipe()
    fork = zygote.fork("waits", fds=[mine])
    fork.told()
    zygote.process.kill()
    zygote.process.wait()
    os.write(theirs, b"1234")
    os.close(theirs)
    os.close(mine)
    assert fork.close() == (4, "")


def test_the_zygote_ends_with_whoever_started_it(tmp_path: Path) -> None:
    """Without a word, as when that is killed."""
    zygote = Zygote(tmp_path)
    zygote.prepare()
    zygote.socket.close()
    assert zygote.process.wait(20) == 0
    assert zygote.errors() == ""
    zygote.close()


def test_twenty_at_once(zygote: Zygote) -> None:
    """Requests that wait behind each other are all met."""
    zygote.write("counts", "from tell import say; import os; say(os.getpid())")
    zygote.prepare("numpy")
    forks = [zygote.fork("counts") for _ in range(20)]
    assert [fork.told() for fork in forks] == [fork.pid for fork in forks]
    assert [fork.close() for fork in forks] == [(0, "")] * 20


# What makes a process unfit to be forked.


def test_an_import_that_raises_is_left_out(zygote: Zygote) -> None:
    """By its name, with the reason; SystemExit is one too."""
    zygote.write("raises", "raise LookupError('no such thing')")
    zygote.write("leaves", "raise SystemExit(3)")
    ready = zygote.prepare("raises", "leaves", "no_such_module", "colorsys")
    assert ready["dropped"] == {
        "raises": "LookupError: no such thing",
        "leaves": "SystemExit: 3",
        "no_such_module": "ModuleNotFoundError: No module named 'no_such_module'",
    }
    assert "colorsys" in ready["modules"]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (
            "import threading; threading.Thread(target=threading.Event().wait, name='watcher', daemon=True).start()",
            "threads (watcher)",
        ),
        ("import _thread, time; _thread.start_new_thread(time.sleep, (60,))", "threads"),
        ("import socket; kept = socket.socketpair()", "socket:"),
        ("import tempfile; kept = tempfile.TemporaryFile()", "is open"),
        ("import subprocess; kept = subprocess.Popen(['cat'], stdin=subprocess.PIPE)", "child processes"),
        (
            "import torch; torch.cuda._initialized = True; torch.cuda._is_in_bad_fork = lambda: False",
            "CUDA is initialised",
        ),
    ],
    ids=["thread", "low-level thread", "socket", "file", "process", "CUDA"],
)
def test_an_import_that_spoils_the_process(zygote: Zygote, code: str, why: str) -> None:
    """It is named, and nothing is forked."""
    zygote.write("spoils", code)
    answer = zygote.ask("colorsys", "spoils")
    assert (answer["type"], answer["module"]) == ("Unfit", "spoils")
    assert why in answer["why"]
    assert zygote.process.wait(20) == 0


@pytest.mark.gpu
def test_an_import_that_initialises_cuda(zygote: Zygote) -> None:
    """By torch, or by the driver's library alone."""
    zygote.write("spoils", "import torch; torch.zeros(1, device='cuda')")
    answer = zygote.ask("spoils")
    assert (answer["type"], answer["module"], "CUDA" in answer["why"]) == ("Unfit", "spoils", True)


def test_whether_cuda_has_been_initialised(tmp_path: Path) -> None:
    """Its library is asked, which answers without being initialised by that; where nobody has loaded it, it has not."""
    source, library = tmp_path / "cuda.c", tmp_path / "libcuda.so.1"
    source.write_text(
        "static int begun; int cuInit(unsigned flags) { begun = 1; return 0; }"
        "int cuDeviceGetCount(int *count) { *count = 1; return begun ? 0 : 3; }"
    )
    build = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source)]
    subprocess.run(build, check=True)
    code = f"""
        import ctypes
        from shared_rpc.zygote.safety import cuda_is_initialised
        told = [cuda_is_initialised()]
        driver = ctypes.CDLL({str(library)!r})
        told.append(cuda_is_initialised())
        driver.cuInit(0)
        print("told", *told, cuda_is_initialised())
    """
    child = python(code, fresh=True)
    assert child.expect("told") == "told False False True"
    assert child.close() == (0, "")


@pytest.mark.gpu
def test_an_import_that_asks_whether_there_is_a_gpu(zygote: Zygote) -> None:
    """It leaves a process that can be forked; each fork has the devices that it is allowed to see."""
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
    assert [fork.told() for fork in forks] == [[True, 1, 2.0, False]] * 2
    assert [fork.close() for fork in forks] == [(0, "")] * 2


def test_an_import_that_computes(make: Callable[..., Zygote]) -> None:
    """OpenMP would wait in a fork for threads that are not there: that is found out before anybody needs one."""
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


def test_a_module_of_the_persons_is_not_imported(zygote: Zygote, tmp_path: Path) -> None:
    """What lies in her folders changes at any time. An installed module that needs one of that name has the other one."""
    (tmp_path / "hers").mkdir()
    (tmp_path / "hers" / "helper.py").write_text("")
    zygote.write("installed", "import colorsys")
    ready = zygote.prepare("helper", "installed", folders=[str(tmp_path / "hers")])
    assert set(ready["dropped"]) == {"helper"}


def test_a_module_that_has_the_name_of_the_persons(zygote: Zygote) -> None:
    """The app would get the wrong one."""
    answer = zygote.ask("colorsys", own=["colorsys"])
    assert answer["type"] == "Unfit"
    assert "'colorsys'" in answer["why"]


# Whether what it has imported is still right.


def test_a_file_that_has_changed(zygote: Zygote) -> None:
    """No fork begins with what was there before."""
    path = zygote.write("changes", "value = 1")
    zygote.write("reads", "import changes; from tell import say; say(changes.value)")
    zygote.prepare("changes")
    assert zygote.fork("reads").told() == 1
    path.write_text("value = 22")
    assert zygote.refused("reads") == {"type": "ForkRefused", "why": f"{path} has changed", "stale": True}


def test_a_file_that_comes_before_an_imported_one(zygote: Zygote, tmp_path: Path) -> None:
    """A new process would import that; a folder that has no such file is no hindrance."""
    folder = tmp_path / "hers"
    folder.mkdir()
    zygote.write("reads", "from tell import say; say(1)")
    zygote.prepare("colorsys")
    assert zygote.fork("reads", folders=[str(folder)]).told() == 1
    (folder / "colorsys.py").write_text("")
    refused = zygote.refused("reads", folders=[str(folder)])
    assert not refused["stale"]
    assert str(folder / "colorsys.py") in refused["why"]


def test_forks_have_the_variables_that_an_import_sets(make: Callable[..., Zygote]) -> None:
    """But not where the requested process has another value of its own."""
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
    assert zygote.fork("says").told() == ["as it was", "by an import", None]
    zygote.environ["MADE"] = "by the request"
    assert zygote.fork("says").told() == ["as it was", "by the request", None]


# When it cannot be forked.


@pytest.mark.parametrize("error", ["OSError(12, 'Cannot allocate memory')", "MemoryError()"])
@pytest.mark.parametrize("which", [2, 3], ids=["the first of the two", "the second"])
def test_no_memory_for_a_fork(zygote: Zygote, error: str, which: int) -> None:
    """The request is refused, and the zygote is there for the next one."""
    zygote.write(
        "limits",
        f"""
        import os
        fork, calls = os.fork, []

        def limited():
            calls.append(1)
            if len(calls) == {which}:
                raise {error}
            return fork()

        os.fork = limited
    """,
    )
    zygote.write("says", "from tell import say; say(1)")
    zygote.prepare("limits")
    refused = zygote.refused("says")
    assert "memory" in refused["why"]
    assert not refused["stale"]
    if which == 2:
        assert zygote.fork("says").told() == 1


def test_nothing_is_left_of_forks(zygote: Zygote) -> None:
    """Neither processes nor descriptors of theirs stay with the zygote."""
    zygote.write("says", "from tell import say; say(1)")
    zygote.prepare()
    before = len(os.listdir(f"/proc/{zygote.process.pid}/fd"))
    for _ in range(5):
        zygote.fork("says").close()
    eventually(lambda: len(os.listdir(f"/proc/{zygote.process.pid}/fd")) == before)
    children = Path(f"/proc/{zygote.process.pid}/task/{zygote.process.pid}/children")
    eventually(lambda: children.read_text() == "")
