"""``shared-rpc run``: a script sees and does the same as under ``python``.

For common properties of all forks of zygotes and new processes, see `broker/test_zygote.py`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path

import pytest

from shared_rpc import Client
from shared_rpc.cli.app import app as commands
from shared_rpc.scripts import command
from shared_rpc.scripts.command import Script, parse
from shared_rpc.scripts.key import interpreter_options, key_of
from tests.kit.brokers import is_running
from tests.kit.deep import deep
from tests.kit.processes import eventually, python, skip_without_late_threads
from tests.kit.scripts import WAITS, Place
from tests.kit.world import World

#: The first test waits for torch to be imported.
pytestmark = pytest.mark.timeout(180)


#: What a program can observe about itself, except the results of its imports.
FACTS = """
    import json, os, resource, signal, sys, threading
    fds = {}
    for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
        try:
            name = os.readlink(f"/proc/self/fd/{fd}").partition(":")[0]
            if ".so" not in name:  # libffi opens itself, where ctypes is imported
                fds[fd] = [name, os.get_inheritable(fd)]
        except OSError:
            pass
    def stream(s):
        return [s.encoding, s.errors, s.line_buffering, s.write_through, s.mode, s.name, s.isatty(), type(s.buffer).__name__]
    status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
    facts = {
        "main": [__name__, __file__, __doc__, __package__, __spec__, type(__loader__).__name__, sorted(globals())],
        "sys": [sys.argv, sys.orig_argv, sys.path, sys.executable, sys.prefix, list(sys.flags), sys.warnoptions, sys._xoptions],
        "streams": [*map(stream, (sys.stdin, sys.stdout, sys.stderr)), sys.stdin.read()],
        "environ": dict(os.environ), "binary": sorted(repr(k) + repr(v) for k, v in os.environb.items()),
        "place": [os.getcwd(), os.umask(0)],
        "limits": [resource.getrlimit(n) for n in range(16)],
        "signals": [str(signal.getsignal(n)) for n in sorted(signal.valid_signals())],
        "masks": [status[name].strip() for name in ("SigBlk", "SigIgn", "SigCgt", "ShdPnd", "NoNewPrivs", "Seccomp", "Groups")],
        "threads": [threading.active_count(), threading.current_thread() is threading.main_thread(), status["Threads"].strip()],
        "name": [open("/proc/self/comm").read(), os.getpriority(os.PRIO_PROCESS, 0), sorted(os.sched_getaffinity(0))],
        "fds": fds,
    }
    print(json.dumps(facts, default=str))
"""


def test_a_script_sees_the_same(place: Place, tmp_path: Path) -> None:
    """Its names, arguments, path, streams, descriptors, environment, directory, umask, limits and signals."""
    place.write(FACTS, "sub/script.py")
    reading, writing = os.pipe()

    def begin() -> None:
        os.umask(0o027)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    environ = {"A": "b=c", "EMPTY": "", "TZ": "America/New_York", "UNUSUAL": "\udcff\udcfe", "PWD": None}
    words = ("./script.py", "a", "", "ü \n -m", "--preload")
    try:
        options = {"cwd": place.folder / "sub", "setup": begin, "text": "in\r\nput", "pass_fds": (reading, writing)}
        both = place.both(*words, environ=environ, **options)
    finally:
        os.close(reading)
        os.close(writing)
    assert [(ran.code, ran.errors) for ran in both] == [(0, "")] * 2
    plain, forked = (json.loads(ran.output) for ran in both)
    for found in (plain, forked):
        found["environ"].pop("_", None)
        # Signals 32 and 33 are the C library's, which handles them once there have been threads; see nptl(7).
        found["masks"] = [f"{int(mask, 16) & ~(3 << 31):x}" for mask in found["masks"][:4]] + found["masks"][4:]
    assert {name: (plain[name], forked[name]) for name in plain if plain[name] != forked[name]} == {}
    assert forked["place"] == [str(place.folder / "sub"), 0o027]


#: How a script ends: without a traceback, with one, or by the interpreter itself.
ENDS = {
    "exit with a code": "import sys; print('x', end=''); sys.exit(7)",
    "exit with a text": "import sys; sys.exit('a text')",
    "os._exit": "import os; print('lost'); os._exit(5)",
    "SIGSEGV": "import ctypes; ctypes.string_at(0)",
    "a thread that is left": "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
    "a fork that returns": "import os, sys\nif os.fork() == 0: sys.exit(9)\nprint(os.waitstatus_to_exitcode(os.wait()[1]))",
    "an error": "def f(x):\n    return 1 / x\n\nprint('before')\nf(0)",
    "no syntax": "print('x'\nprint('y')",
    "a closed output": "import os; os.close(1); print('x')",
}


@pytest.mark.parametrize("name", ENDS)
def test_a_script_ends_the_same(place: Place, name: str) -> None:
    """With the same code or signal, output, and traceback: it has no frame below the script's own."""
    plain, forked = place.both(place.write(ENDS[name]))
    assert forked == plain


def test_directories_are_scripts(place: Place) -> None:
    """With a __main__.py."""
    place.write("name = 'helped'", "whole/helper.py")
    what = place.write(
        "import helper, sys\nprint(helper.name, __name__, __file__, __package__, __spec__.name, sys.argv, sys.path[0])",
        "whole/__main__.py",
    ).parent
    plain, forked = place.both(what, "argument")
    assert forked == plain
    assert "helped" in forked.output


@pytest.mark.parametrize("module", ["package", "package.fails", "missing"])
def test_modules(place: Place, module: str) -> None:
    """As with python -m: the interpreter's own frames are in a traceback, and none of ours."""
    show = "import sys; print(__name__, __package__, __file__, __spec__.name, sys.argv, sys.path[0], sorted(globals()))"
    place.write("", "package/__init__.py")
    place.write(show, "package/__main__.py")
    place.write("def f(): 1 / 0\nf()", "package/fails.py")
    plain, forked = place.both("-m", module, "-x", "--preload")
    assert forked == plain


def test_children_of_multiprocessing(place: Place) -> None:
    """They find the main module, by a relative path too, and its classes."""
    place.write("""
        import multiprocessing, os

        class Kept:
            def __init__(self, value): self.value = value

        def work(kept, results):
            results.put((type(kept).__qualname__, kept.value * 2, __name__))

        if __name__ == "__main__":
            os.chdir("/")
            context = multiprocessing.get_context("spawn")
            results = context.Queue()
            process = context.Process(target=work, args=(Kept(21), results))
            process.start()
            print(results.get(), flush=True)
            process.join()
    """)
    plain, forked = place.both("script.py")
    assert forked == plain
    assert forked.code == 0


@pytest.mark.parametrize("number", [signal.SIGINT, *deep(signal.SIGWINCH, signal.SIGHUP)])
def test_a_signal_reaches_the_script_once(place: Place, world: World, number: signal.Signals) -> None:
    """By way of its command."""
    script = place.write(
        WAITS
        + f"""
        signal.signal({int(number)}, lambda n, frame: os.write(1, b"got %d\\n" % n))
        os.write(1, b"ready\\n")
        while text := line():
            os.write(1, b"read " + text.encode())
    """
    )
    child = place.start(script)
    world.children.append(child)
    child.expect("ready")
    child.process.send_signal(number)
    assert child.expect("") == f"got {int(number)}"
    child.tell("x")
    assert child.expect("") == "read x"
    assert child.close() == (0, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_as_it_ends_the_script(place: Place, world: World, number: signal.Signals) -> None:
    """The command's parent sees the same status."""
    script = place.write(WAITS + "\n        os.write(1, b'ready\\n'); line(); print('on')")
    codes = []
    for run in (False, True):
        child = place.start(script, run=run)
        world.children.append(child)
        child.expect("ready")
        child.process.send_signal(number)
        code, errors = child.process.wait(20), child.process.stderr and child.process.stderr.read()
        codes.append((code, (errors or "").splitlines()[-1:]))  # the line before identifies the call
    assert codes[0] == codes[1]


TELLS_PIDS = """
    import os, sys
    print("pids", os.getpid(), os.getppid(), flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("killed", ["script", "command", "watcher"])
def test_a_kill_ends_script_and_command(place: Place, world: World, killed: str) -> None:
    """Whichever of them it was: no script runs on without a watcher, and the shell prints "Killed"."""
    child = place.start(place.write(TELLS_PIDS))
    world.children.append(child)
    script, watcher = map(int, child.expect("pids").split()[1:])
    os.kill({"script": script, "command": child.pid, "watcher": watcher}[killed], signal.SIGKILL)
    assert child.process.wait(20) == -signal.SIGKILL
    eventually(lambda: not is_running(script))


def test_the_command_imports_little(place: Place) -> None:
    """It starts in a fraction of the time of other commands."""
    script = place.write("print('ran')")
    code = f"""
        import os, signal, sys
        from shared_rpc.cli.__main__ import main
        def report(*words):
            os.write(1, " ".join(["loaded", *sys.modules, "\\n"]).encode())  # one write: the script's line comes at any time
            raise SystemExit
        signal.sigwaitinfo = report
        sys.argv[1:] = ["run", {str(script)!r}]
        os.environ["SHARED_TENSOR_BASE_PATH"] = {place.base_path!r}
        os.dup2 = lambda *x, **y: None
        main()
    """
    heavy = {"typer", "rich", "torch", "msgspec", "anyio", "argparse", "subprocess", "asyncio", "inspect"}

    def loads_little() -> bool:
        child = python(code, fresh=True)
        loaded = set(child.expect("loaded").split())
        child.close()
        return "shared_rpc.scripts.command" in loaded and not heavy & loaded

    eventually(loads_little, 30.0)  # a command that finds no zygote starts one


def test_the_key_of_a_zygote(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It depends on all that a fork cannot change, and on nothing else; a relative path depends on the directory."""
    environ = {"PATH": "/bin", "HOME": "/home/somebody", "OMP_NUM_THREADS": "1"}
    key = key_of(environ, [])
    assert key_of({**environ, "PATH": "/sbin", "SHARED_TENSOR_ROLE": "spawn"}, []) == key
    assert key_of(environ, ["b", "a", "a"]) == key_of(environ, ["a", "b"]) != key
    for name in ("PYTHONPATH", "LD_PRELOAD", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "TORCH_LOGS", "LANG", "HOME"):
        assert key_of({**environ, name: "another"}, []) != key, name
    assert key_of({**environ, "VLLM_X": "1"}, ["vllm.engine"]) != key_of(environ, ["vllm.engine"])
    here = key_of({"PYTHONPATH": "src"}, [])
    monkeypatch.chdir(tmp_path)
    assert key_of({"PYTHONPATH": "src"}, []) != here
    monkeypatch.setattr(sys, "warnoptions", ["error"])
    assert key_of(environ, []) != key


@pytest.mark.parametrize("way", [["/usr/bin/shared-rpc"], ["-m", "shared_rpc.cli"], ["-c", "main()"]], ids=lambda way: way[0])
def test_options_of_the_interpreter_precede_the_program(way: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """However the command is started."""
    monkeypatch.setattr(sys, "argv", [way[0], "run", "app.py"])
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-X", "dev", *way, "run", "app.py"])
    assert interpreter_options() == ["-X", "dev"]


def test_zygotes_are_listed_and_stopped(place: Place) -> None:
    """By ``ls`` and ``stop --all``."""
    script = place.write("import sys; print('torch' in sys.modules)")
    assert place.run(script).output == "True\n"
    shared_rpc = [sys.executable, "-m", "shared_rpc.cli"]
    (listed,) = [one for one in json.loads(place._finish([*shared_rpc, "ls", "--json"]).output) if one["runs"]][:1]
    assert (listed["kind"], listed["preload"], len(listed["key"])) == ("zygote", ["torch"], 16)
    assert listed["runs"] >= 1 and listed["idle"] >= 0 and listed["rss"] > 1 << 20
    assert f"{listed['key']}" in place._finish([*shared_rpc, "ls"]).output
    assert str(listed["pid"]) in place._finish([*shared_rpc, "stop", "--all"]).output
    assert not is_running(listed["pid"])
    assert place.zygotes() == []


APP = """
    import sys
    import torch
    from shared_rpc import Provider

    provider = Provider(device="cpu")

    @provider.share
    def numbers(n):
        return torch.arange(n)

    if __name__ == "__main__":
        print("sum", int(numbers(10).sum()), provider.execution_mode, flush=True)
"""


def test_the_server_role_serves_until_it_is_interrupted(place: Place, world: World) -> None:
    """The main code's end is not the end of the process, and Ctrl-C is."""
    skip_without_late_threads()
    child = place.start(place.write(APP), SHARED_TENSOR_ROLE="server")
    world.children.append(child)
    assert child.expect("sum") == "sum 45 server"
    child.expect_error("serving")
    with Client(place.base_path, device="cpu") as client:
        assert client.call("numbers", 3).tolist() == [0, 1, 2]
    assert child.close(signal.SIGINT) == (0, "")


@pytest.mark.parametrize(
    "words",
    [
        ["x.py", "--preload", "a", "-m", "--help"],
        ["-m", "a.b", "-c"],
        ["--preload", "a", "--preload=b", "--idle-exit", "5", "x.py"],
        ["--", "-x.py", "--"],
    ],
    ids=str,
)
def test_both_parsers_agree(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick one, and typer's, to which it leaves help and misuse."""
    seen: list[Script] = []
    monkeypatch.setattr(command, "launch", seen.append)
    commands(["run", *words], standalone_mode=False)
    assert [parse(words)] == seen
    assert parse(["--help"]) is parse([]) is parse(["--idle-exit", "soon", *words]) is parse(["--no-such", *words]) is None
