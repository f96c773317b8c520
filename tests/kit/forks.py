"""Python processes that begin as forks of one that has imported torch: an import takes 2 seconds of a core, a fork 30 ms.

:func:`start` is :class:`subprocess.Popen`, except for how the process begins. Nothing of the interpreter is replaced. Of the
product, one function is, in forks that are brokers: the one by which a broker starts its workers, see :func:`_nest`.
:mod:`shared_rpc.zygote.child`, which has tests of its own, makes a fork equal to a new process.

``fresh=True`` is for tests of real starts; with ``SHARED_RPC_TESTS=fresh`` in the environment, as in ``nox -s deep``, every
process is a new one.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import io
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from shared_rpc.zygote.child import become, close_all_but, finish, new_main, own_path, run_program, set_title
from shared_rpc.zygote.process import die_with_parent, fork, is_readable
from shared_rpc.zygote.wire import PADDING, Lost, framed, receive, send

if TYPE_CHECKING:
    from shared_rpc.broker.worker import Begun

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

    def close(self) -> None:
        """End it."""
        self._socket.close()

    def can(self, args: Sequence[str], variables: Mapping[str, str]) -> bool:
        """Return False if only a new process is equal to the requested one, or in a fork of the process that started this."""
        program, *words = args
        _, words = _switches(words)
        known = words and (words[0] == "-c" or not words[0].startswith("-") or words[1].startswith(("shared_rpc", "tests.")))
        early = {name: value for name, value in variables.items() if _is_early(name)}
        return self._owner == os.getpid() and program == sys.executable and bool(known) and early.items() <= self._early.items()

    def fork(self, args: Sequence[str], variables: Mapping[str, str], fds: Mapping[int, int], cwd: Any, **options: Any) -> int:
        """Begin a process; return its id.

        :param fds: its descriptors, by their numbers there.
        :param options: those of :func:`_begin`.
        """
        switches, words = _switches(args[1:])
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


def _switches(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line after the interpreter into its switches and the program."""
    number = next((number for number, word in enumerate(words) if word not in ("-B", "-u", "-P")), len(words))
    return [*words[:number]], [*words[number:]]


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


class _Forked(subprocess.Popen[Any]):
    """A child of this process that begins as a fork; only that differs."""

    def _execute_child(self, args: Sequence[str], *given: Any) -> None:
        """Begin the process, with the parameters of the method that this one overrides, which is private."""
        _, _, _, pass_fds, cwd, env, _, _, _, stdin, _, _, stdout, _, stderr, *_, new_session, group = given
        assert _zygote is not None
        ends = {number: end if end >= 0 else number for number, end in enumerate((stdin, stdout, stderr))}
        try:
            self.pid = _zygote.fork(
                args,
                os.environ if env is None else env,
                ends | {fd: fd for fd in pass_fds},
                cwd,
                nested=any("shared_rpc.broker" in word for word in args),  # a module to run, or in a piece of code
                start_new_session=new_session,
                process_group=group if group >= 0 else None,
            )
            self._child_created = True
        finally:
            self._close_pipe_fds(*given[9:15])


def start(
    args: Sequence[str], *, fresh: bool = False, env: Mapping[str, str] | None = None, text: bool = False, **options: Any
) -> subprocess.Popen[Any]:
    """Start a process like :class:`subprocess.Popen`, as a fork if that is equivalent.

    :param fresh: True for a new process, whose children are new ones too.
    """
    can_fork = not fresh and _zygote is not None and _zygote.can(args, os.environ if env is None else env)
    return (_Forked if can_fork else subprocess.Popen)(args, -1 if text else 0, env=env, text=text, **options)


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
    atexit.register(_leave)  # before the callbacks of imports, which run first then
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
    # Finalizers of torch remove 134 libraries of operators from its dispatcher, and touch 27 MB: a short fork would take 62 ms
    # of a core instead of 30. Private: 3.4 to 3.14 have it.
    for info in weakref.finalize._registry.values():  # type: ignore[attr-defined]
        info.atexit = False
    _use_large_pages()
    _serve(connection)


def _use_large_pages() -> None:
    """Move this process's memory to large pages, if the system can: a short fork takes 30 ms of a core instead of 54."""
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
    numbers of the descriptors that come with it, which that of the working directory follows. ``start_new_session`` and
    ``process_group`` are those of :class:`subprocess.Popen`; ``nested`` is True for a zygote of its own.
    """
    words, variables = request["words"], request["variables"]
    if request.get("start_new_session"):
        os.setsid()
    elif request.get("process_group") is not None:
        os.setpgid(0, request["process_group"])
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
    """Fork a zygote for the workers of this process, a broker, and start them from it; return its descriptor's number.

    Every worker imports torch: without this, two thirds of the processor time of all tests would be that.
    """
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
    from shared_rpc.broker import worker, zygote

    worker.start_linked = zygote.start_linked = _start_linked
    return number


def _start_linked(words: Callable[[int], Sequence[str]], stdout: int | None = None) -> Begun:
    """Start a worker, or a broker's zygote: :func:`shared_rpc.broker.worker.start_linked`, with a fork."""
    ours, theirs = socket.socketpair()
    with theirs:
        fd, pipe, null = theirs.fileno(), subprocess.PIPE, subprocess.DEVNULL
        process = start(words(fd), pass_fds=(fd,), stdin=null, stdout=stdout, stderr=pipe, process_group=0)
    return process, process.stderr, ours


def _run(words: Sequence[str]) -> NoReturn:
    """Run a program. See :func:`_leave` for its end."""
    global _code
    try:
        if words[0] == "-c":
            new_main()
            finish(lambda: exec(compile(words[1], "<string>", "exec"), vars(sys.modules["__main__"])))
            raise SystemExit(0)
        if words[:2] == ["-m", "shared_rpc.worker"] and DRIVER in os.environ:
            importlib.import_module("tests.kit.fake_driver").install()
        run_program(words)
    except SystemExit as end:
        _code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    except KeyboardInterrupt:  # the interpreter ends by the signal
        raise
    except BaseException:
        _code = 1
        raise


#: The exit code of this fork, once its program has ended.
_code: int | None = None


def _leave() -> None:
    """End a fork, as its last exit callback, as the interpreter does, except that only the main module is cleared.

    The interpreter clears all modules, which touches every object in memory: a fork would copy 150 MB, in 0.1 s.
    """
    if _code is None:
        return
    vars(sys.modules["__main__"]).clear()
    gc.collect()
    with suppress(OSError, ValueError, AttributeError):  # the interpreter has a message and an exit code for that
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_code & 0xFF)
