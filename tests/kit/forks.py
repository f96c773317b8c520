"""Python processes that begin as forks of one that has imported torch: an import takes 2 seconds of a core, a fork 30 ms.

:class:`Popen` and :func:`run` are those of :mod:`subprocess`, but for how the process begins; tests call them by name, and
nothing of the interpreter is replaced in the process of the tests. Only in forks requested with ``has_workers``, those of
brokers and of programs that start one, the product's own starts become forks too: see :func:`_nest`, and ``fresh`` for tests
of real starts. :mod:`shared_rpc.zygote.child`, which has tests of its own, makes a fork equal to a new process.

With ``SHARED_RPC_TESTS=fresh`` in the environment, as in ``nox -s deep``, every process is a new one.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import io
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from shared_rpc.zygote.child import become, close_all_but, finish, new_main, own_path, set_title
from shared_rpc.zygote.process import die_with_parent, fork, is_readable
from shared_rpc.zygote.wire import PADDING, Lost, framed, receive, send

ROOT = Path(__file__).parent.parent.parent
#: A variable that makes workers use the driver made of host memory, including those without an app that would install it.
DRIVER = "SHARED_RPC_TESTS_FAKE_DRIVER"
#: Makes processes import this source, and the modules that these tests import.
PYTHONPATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
#: The warning of Python 3.12 and later about forks with threads, as in pyproject.toml: tests read a child's output.
NO_FORK_WARNING = "ignore:This process (pid=:DeprecationWarning"

#: Imported before processes begin. Excludes modules whose first import is itself under test.
MODULES = """
    torch torch._dynamo numpy asyncio anyio._backends._asyncio hypothesis
    typer typer._adapters typer._click.decorators rich.console annotated_types
    textual.app textual.containers textual.screen textual.drivers.linux_driver textual.widgets._data_table
    textual.widgets._footer textual.widgets._help_panel textual.widgets._input textual.widgets._sparkline
    shared_rpc shared_rpc.cli.app shared_rpc.scripts.command shared_rpc.zygote.serving
    shared_rpc.provider.provider shared_rpc.provider.loopback shared_rpc.provider.main_end shared_rpc.provider.spawn
    shared_rpc.operations.client shared_rpc.operations.async_client
    shared_rpc.broker.__main__ shared_rpc.worker.__main__ shared_rpc.server.server
    shared_rpc.codec.arguments shared_rpc.codec.results shared_rpc.extras.materialize shared_rpc.protocol.ticket
    shared_rpc.memory.backends.host
"""
#: Variables with these prefixes are read when a process starts, but for those that take effect in a fork too.
_READ_EARLY = ("PYTHON", "LD_", "OMP_NUM_THREADS", "MALLOC_", "LC_", "LANG")
_READ_LATE = frozenset({"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONBREAKPOINT"})
_PR_SET_CHILD_SUBREAPER = 36


class _Zygote:
    """The other end of a zygote's socket, in the process whose child the zygote is.

    :param variables: the environment in which it made its imports.
    """

    def __init__(self, sock: socket.socket, variables: Mapping[str, str]) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._early = {name: value for name, value in variables.items() if _is_early(name)}

    @property
    def usable(self) -> bool:
        """True in the process that started it: a fork of that has no zygote."""
        return self._owner == os.getpid()

    def close(self) -> None:
        """End it."""
        self._socket.close()

    def fork(
        self, args: Sequence[str], variables: Mapping[str, str], fds: Mapping[int, int], cwd: Any = None, **options: Any
    ) -> int:
        """Begin a process; return its id, or 0 if only a new process is equal to the requested one.

        :param fds: its descriptors, by their numbers there.
        :param options: those of :func:`_begin`.
        """
        program, *words = args
        switches = []
        while words and words[0] in ("-B", "-u", "-P"):
            switches.append(words.pop(0))
        known = words and (words[0] == "-c" or not words[0].startswith("-") or words[1].startswith(("shared_rpc", "tests.")))
        early = {name: value for name, value in variables.items() if _is_early(name)}
        if not self.usable or program != sys.executable or not known or early.items() - self._early.items():
            return 0
        request = {"type": "Fork", "switches": switches, "words": words, "variables": dict(variables), "fds": list(fds)}
        folder = os.open(cwd or ".", os.O_PATH | os.O_CLOEXEC)
        try:
            with self._lock, _adopting():
                send(self._socket, framed({**request, **options}), [*fds.values(), folder])
                return int(receive(self._socket)[0]["pid"])
        except BaseException:  # as by a test's timeout: the next request would get the answer to this one
            self._owner = -1
            raise
        finally:
            os.close(folder)


def _is_early(name: str) -> bool:
    return name.startswith(_READ_EARLY) and name not in _READ_LATE


_zygote: _Zygote | None = None
_process: subprocess.Popen[bytes] | None = None


def start_zygote() -> None:
    """Start a zygote for this process, if forks are enabled; it ends with this process."""
    global _zygote, _process
    if os.environ.get("SHARED_RPC_TESTS") == "fresh":
        return
    ours, theirs = socket.socketpair()
    variables = {name: value for name, value in os.environ.items() if not name.startswith("SHARED_TENSOR_")}
    variables |= {"PYTHONPATH": PYTHONPATH, "PYTHONWARNINGS": NO_FORK_WARNING}
    code = f"from tests.kit import forks; forks.main({theirs.fileno()}, {os.getpid()})"
    with theirs:
        _process = subprocess.Popen(
            [sys.executable, "-c", code, PADDING],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=variables,
        )
    _zygote = _Zygote(ours, variables)


def stop_zygote() -> None:
    """End it."""
    global _zygote, _process
    if _zygote is not None and _process is not None:
        _zygote.close()
        _process.wait()
    _zygote = _process = None


class Popen(subprocess.Popen[Any]):
    """:class:`subprocess.Popen`, whose process begins as a fork if that is equivalent.

    :param fresh: True for a new process, whose children are new ones too.
    :param has_workers: True if its own children begin as forks too, although its command line does not show it: a broker.
    """

    def __init__(self, args: Any, *rest: Any, fresh: bool = False, has_workers: bool = False, **options: Any) -> None:
        self._fresh, self._has_workers = fresh, has_workers
        super().__init__(args, *rest, **options)

    def _execute_child(self, *given: Any) -> None:
        # Private, and the same from 3.11 to 3.14: the one place that makes a process, with its pipes before and after it.
        args, _, preexec_fn, _, pass_fds, cwd, env, _, _, shell, *rest = given
        p2cread, _, _, c2pwrite, _, errwrite, _, _, _, _, _, new_session, group = rest
        variables = os.environ if env is None else env
        pid = 0
        if _zygote is not None and not self._fresh and isinstance(args, list) and preexec_fn is None and not shell:
            streams = {number: number if fd < 0 else fd for number, fd in enumerate((p2cread, c2pwrite, errwrite))}
            nested = self._has_workers or _has_workers(args, variables)
            options = {"session": new_session, "group": group, "nested": nested}
            pid = _zygote.fork(args, variables, streams | {fd: fd for fd in pass_fds}, cwd, **options)
        if not pid:
            super()._execute_child(*given)
            return
        self.pid, self._child_created = pid, True
        self._close_pipe_fds(*rest[:6])


def _has_workers(args: Sequence[str], variables: Mapping[str, str]) -> bool:
    served = "shared_rpc.broker" in args or ("shared_rpc.cli" in args and "serve" in args)
    return variables.get("SHARED_TENSOR_ROLE") == "spawn" or served


def run(args: Sequence[str], *, input: Any = None, timeout: float | None = None, **options: Any) -> Any:
    """Run such a process like :func:`subprocess.run`, by default with pipes."""
    with Popen(args, **{**dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE), **options}) as process:
        try:
            output, errors = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(args, process.returncode, output, errors)


@contextmanager
def _adopting() -> Iterator[None]:
    """Make this process adopt descendants whose parent ends within the block; see PR_SET_CHILD_SUBREAPER of prctl(2)."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


# In the zygote, and in its forks.

#: The ``sys.path`` of forks, without that of their program.
_path: list[str] = []


def main(fd: int, parent: int) -> NoReturn:
    """Run the zygote, and in each fork the requested program."""
    die_with_parent(parent)
    own = {os.getcwd(), "", *os.environ["PYTHONPATH"].split(os.pathsep)}
    _path.extend(entry for entry in sys.path if entry not in own)
    for name in MODULES.split():
        with suppress(ModuleNotFoundError):  # of another release
            importlib.import_module(name)
    # The program's module must not be imported already, nor any module of the tests, unless the program imports it.
    for name in [name for name in sys.modules if name.endswith(".__main__") or name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    connection = socket.socket(fileno=fd)
    connection.set_inheritable(False)
    set_title([sys.executable, "-m", "tests.kit.forks"])
    # The test runner may ignore it, as under nohup.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Forks have it only if their variables do.
    sys.warnoptions.remove(NO_FORK_WARNING)
    gc.collect()
    gc.freeze()
    # Finalizers of torch remove 134 libraries of operators from its dispatcher, and touch 27 MB. Private: 3.4 to 3.14 have it.
    for info in weakref.finalize._registry.values():  # type: ignore[attr-defined]
        info.atexit = False
    _use_large_pages()
    _serve(connection)


def _use_large_pages() -> None:
    """Move this process's memory to large pages, if the system can: copying their tables takes 5 ms of a fork instead of 20."""
    large, collapse = 2 << 20, 25  # MADV_COLLAPSE, from Linux 6.1 on
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, _, _, _, *name = line.split(maxsplit=5)
        begin, end = (int(address, 16) for address in addresses.split("-"))
        if rights == "rw-p" and name in ([], ["[heap]"]):
            for address in range(-(-begin // large) * large, end - large + 1, large):
                madvise(address, large, collapse)


def _serve(connection: socket.socket) -> NoReturn:
    """Begin processes until the other end is closed. Signals of a terminal are not meant for a zygote."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        try:
            request, fds = receive(connection)
        except Lost:
            os._exit(0)
        pid = _fork_for_parent()
        if pid == 0:
            connection.detach()
            _begin(request, fds)
        for fd in fds:
            os.close(fd)
        send(connection, framed({"type": "Forked", "pid": pid}))


def _fork_for_parent() -> int:
    """Fork a child of the parent, which is adopting; return its id, and 0 in the child. A process between the two ends."""
    reading, writing = os.pipe()
    between = fork()
    if between:
        os.waitpid(between, 0)
        pid = int(os.read(reading, 64))
        os.close(reading)
        os.close(writing)
        return pid
    between = os.pidfd_open(os.getpid())
    pid = fork()
    if pid:
        os.write(writing, str(pid).encode())
        os._exit(0)
    is_readable(between)  # from here on, the parent is final
    return 0


def _begin(request: dict[str, Any], fds: list[int]) -> NoReturn:
    """Become the requested process, and run its program.

    A request has ``words``, the command line after the interpreter and its ``switches``; ``variables``; and ``fds``, the
    numbers of the descriptors that come with it, which that of the working directory follows. ``session`` and ``group`` are
    those of :class:`subprocess.Popen`; ``nested`` is True for a zygote of its own.
    """
    words, variables = request["words"], request["variables"]
    if request.get("session"):
        os.setsid()
    elif request.get("group", -1) >= 0:
        os.setpgid(0, request["group"])
    os.fchdir(fds.pop())
    unbuffered = "-u" in request["switches"] or bool(variables.get("PYTHONUNBUFFERED"))
    sys.stdin, sys.stdout, sys.stderr = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=unbuffered) for _ in range(3))
    entries = variables.get("PYTHONPATH", "").split(os.pathsep)
    own = [""] if words[0] == "-c" and "-P" not in request["switches"] else own_path(request["switches"], words)
    path = [*own, *(os.path.abspath(entry) for entry in entries if entry), *_path]
    become(
        dict(zip(request["fds"], fds, strict=True)),
        argv=words if words[0] not in ("-c", "-m") else [words[0], *words[2:]],
        words=words,
        variables=variables,
        path=path,
        mask=(),
        kept=[_nest(variables)] if request.get("nested") else [],
    )
    _run(words)


def _nest(variables: Mapping[str, str]) -> int:
    """Fork a zygote for the children of this process, started by any of three functions; return its descriptor's number."""
    global _zygote
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    if fork() == 0:
        die_with_parent(parent)
        close_all_but([theirs.fileno()])
        for _ in range(3):
            os.open(os.devnull, os.O_RDWR)
        ours.detach()
        set_title([sys.executable, "-m", "tests.kit.forks", "nested"])
        _serve(theirs)
    theirs.close()
    # Numbers of descriptors that no test examines.
    number = fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, 900)
    ours.close()
    _zygote = _Zygote(socket.socket(fileno=number), variables)
    subprocess.Popen, os.execv, os.posix_spawn = Popen, _exec, _spawn_detached  # type: ignore[misc, assignment]
    return number


_posix_spawn, _execv = os.posix_spawn, os.execv


def _spawn_detached(path: str, argv: list[str], env: Mapping[str, str], **options: Any) -> int:
    """Start a detached process: a broker, or a zygote of ``shared-rpc run``."""
    fds = {numbers[0]: fd for _, fd, *numbers in options["file_actions"] if numbers}
    pid = _zygote.fork(argv, env, fds, group=options["setpgroup"]) if _zygote else 0
    return pid or _posix_spawn(path, argv, env, **options)


def _exec(program: str, args: list[str]) -> NoReturn:
    """Run the broker that ``serve`` becomes; this process keeps its imports, and its zygote."""
    words = list(args[1:])
    if words[0] == "-P":
        words = words[1:]
        del sys.path[:1]
    if words[0] != "-m" or not words[1].startswith("shared_rpc."):
        _execv(program, args)
    sys.argv[:] = ["-m", *words[2:]]
    sys.orig_argv[1:] = words
    set_title([sys.executable, *words])
    _run(words)


def _run(words: Sequence[str]) -> NoReturn:
    """Run a program, and end this process as the interpreter does, except that only the main module is cleared.

    The interpreter clears all modules, which touches every object in memory: a fork would copy 150 MB, in 0.1 s.
    """
    new_main()
    main = vars(sys.modules["__main__"])
    code: Any = 0
    try:
        finish(lambda: _run_main(words, main))
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:  # it ends by the signal
        raise
    except BaseException as error:
        code, sys.last_value = 1, error
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    main.clear()
    gc.collect()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        raise SystemExit(code) from None  # the interpreter has a message and an exit code for that
    os._exit(code & 0xFF)


def _run_main(words: Sequence[str], main: dict[str, Any]) -> None:
    if words[0] == "-m":
        if words[1] == "shared_rpc.worker" and DRIVER in os.environ:
            importlib.import_module("tests.kit.fake_driver").install()
        runpy._run_module_as_main(words[1], True)  # type: ignore[attr-defined]
    elif words[0] == "-c":
        exec(compile(words[1], "<string>", "exec"), main)
    else:
        path = main["__file__"] = os.path.abspath(words[0])
        exec(compile(Path(words[0]).read_bytes(), path, "exec"), main)
