"""Python processes that begin as forks of one which has imported torch, since most tests wait for processes to begin.

Importing torch and this package takes 2 seconds of a core; a fork of a process that has imported them begins in 30 ms.
:mod:`shared_rpc.zygote.child` prepares such a fork, which the tests of zygotes test. The requesting process is the fork's
parent. A process that is to start others itself, as a broker does, gets its own zygote with them.

With ``SHARED_RPC_TESTS=fresh`` in the environment, every process is a new one.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import io
import itertools
import multiprocessing.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from shared_rpc.zygote import child
from shared_rpc.zygote.child import become, close_all_but, finish, new_main, own_path, set_title
from shared_rpc.zygote.process import die_with_parent, fork, is_readable
from shared_rpc.zygote.safety import unsafe
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
#: Variables with these prefixes are read when a process starts. (Imports in this process set those of torch's compiler.)
_READ_EARLY = ("PYTHON", "LD_", "OMP_NUM_THREADS", "MALLOC_", "LC_", "LANG")
#: These take effect in a fork, or are read on use: a driver of Ray sets the last one.
_CARRIED_OUT = frozenset({"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONBREAKPOINT"})
_PR_SET_CHILD_SUBREAPER = 36


class _Zygote:
    """The other end of a zygote's socket, in the process whose child the zygote is.

    :param variables: the environment in which it made its imports.
    """

    def __init__(self, sock: socket.socket, variables: Mapping[str, str]) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._variables = variables

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
        """Begin a process; return its id, or 0 if only a new process will do.

        :param fds: its descriptors, by their numbers there.
        :param options: those of :func:`_begin`.
        """
        program, *words = args
        switches = list(itertools.takewhile(lambda word: word in ("-u", "-P"), words))
        words = words[len(switches) :]
        if not self.usable or program != sys.executable or not words or not self._fits(words, variables):
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

    def _fits(self, words: list[str], variables: Mapping[str, str]) -> bool:
        """Return whether a fork is equivalent to a new process."""
        if words[0] == "-m":
            if len(words) < 2 or words[1].partition(".")[0] not in ("shared_rpc", "tests"):
                return False
        elif words[0].startswith("-") and words[0] != "-c":
            return False
        early = {name for name in {*variables, *self._variables} if name.startswith(_READ_EARLY)} - _CARRIED_OUT
        return all(variables.get(name, self._variables.get(name)) == self._variables.get(name) for name in early)


_zygote: _Zygote | None = None
_process: subprocess.Popen[bytes] | None = None


def start_zygote() -> None:
    """Start a zygote for this process, if forks are enabled; it ends with this process."""
    global _zygote, _process
    if os.environ.get("SHARED_RPC_TESTS") == "fresh" or (_zygote is not None and _zygote.usable):
        return
    ours, theirs = socket.socketpair()
    variables = {name: value for name, value in os.environ.items() if not name.startswith("SHARED_TENSOR_")}
    variables["PYTHONPATH"] = PYTHONPATH
    variables["PYTHONWARNINGS"] = NO_FORK_WARNING
    # What is registered first is called last.
    code = "import atexit; end = []; atexit.register(lambda: end and end[0]()); from tests.kit import forks; "
    code += f"forks.main({theirs.fileno()}, {os.getpid()}, end)"
    with theirs:
        _process = subprocess.Popen(
            [sys.executable, "-c", code, PADDING],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=variables,
        )
    _zygote = _Zygote(ours, variables)
    multiprocessing.util.spawnv_passfds = _spawn


def stop_zygote() -> None:
    """End it."""
    global _zygote, _process
    multiprocessing.util.spawnv_passfds = _spawnv
    if _zygote is not None:
        _zygote.close()
        _zygote = None
    if _process is not None:
        _process.wait()
        _process = None


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
        args, executable, preexec_fn, close_fds, pass_fds, cwd, env, _, _, shell, *rest = given
        p2cread, _, _, c2pwrite, _, errwrite, _, gid, gids, uid, umask, new_session, group = rest
        plain = isinstance(args, list) and preexec_fn is None and close_fds and not shell and executable is None and umask < 0
        pid = 0
        if _zygote is not None and not self._fresh and plain and (gid, gids, uid) == (None, None, None):
            streams = {number: number if fd < 0 else fd for number, fd in enumerate((p2cread, c2pwrite, errwrite))}
            pid = _zygote.fork(
                args,
                os.environ if env is None else env,
                streams | {fd: fd for fd in pass_fds},
                cwd,
                session=bool(new_session),
                group=group,
                nested=self._has_workers or _has_workers(args, env or os.environ),
            )
        if not pid:
            super()._execute_child(*given)
            return
        self.pid, self._child_created = pid, True
        self._close_pipe_fds(*rest[:6])


def _has_workers(args: Sequence[str], variables: Mapping[str, str]) -> bool:
    served = "shared_rpc.broker" in args or ("shared_rpc.cli" in args and "serve" in args)
    return variables.get("SHARED_TENSOR_ROLE") == "spawn" or (served and "--in-process" not in args)


def run(args: Sequence[str], *, input: Any = None, timeout: float | None = None, **options: Any) -> Any:
    """Run such a process like :func:`subprocess.run`, by default with pipes."""
    with Popen(args, **{**dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE), **options}) as process:
        try:
            output, errors = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(args, process.returncode, output, errors)


_spawnv, _posix_spawn, _execv = multiprocessing.util.spawnv_passfds, os.posix_spawn, os.execv


def _spawn(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """Replaces the function that starts processes of :mod:`multiprocessing` in 3.11 to 3.14: of spawn, and fork servers."""
    # The only switch of the interpreter that variables determine too.
    words = [os.fsdecode(word) for word in args if word != "-B"]
    pid = 0
    if _zygote is not None and "from multiprocessing.resource_tracker" not in words[-1]:
        pid = _zygote.fork(words, os.environ, {fd: fd for fd in (0, 1, 2, *map(int, passfds))})
    return pid or int(_spawnv(path, args, passfds))


def _spawn_detached(path: str, argv: Sequence[str], env: Mapping[str, str], **options: Any) -> int:
    """Replaces :func:`os.posix_spawn`, which starts detached processes: brokers, and zygotes of ``shared-rpc run``."""
    fds = {numbers[0]: fd for _, fd, *numbers in options["file_actions"] if numbers}
    pid = _zygote.fork([word for word in argv if word != "-B"], env, fds, group=options["setpgroup"]) if _zygote else 0
    return pid or _posix_spawn(path, argv, env, **options)


class _Exec(BaseException):
    """Leaves a program that another one replaces."""


def _exec(program: str, args: Sequence[str]) -> NoReturn:
    """Replaces :func:`os.execv`, by which ``serve`` becomes a broker: the process keeps its imports, and its zygote."""
    words = list(args[1:])
    if words[0] == "-P":
        words = words[1:]
        del sys.path[:1]
    if program != sys.executable or words[0] != "-m" or not words[1].startswith("shared_rpc."):
        _execv(program, args)
    raise _Exec(words)


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
#: The exit code of this process, once its program has ended with one.
_code: int | None = None


def main(fd: int, parent: int, end: list[Callable[[], None]]) -> NoReturn:
    """Run the zygote, and in each fork the requested program."""
    die_with_parent(parent)
    end.append(_leave)
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
    why = unsafe(frozenset(map(int, os.listdir("/proc/self/fd"))))
    assert not why, why
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
    path = [*own_path(request["switches"], words), *(os.path.abspath(entry) for entry in entries if entry), *_path]
    become(
        dict(zip(request["fds"], fds, strict=True)),
        argv=words if words[0] not in ("-c", "-m") else [words[0], *words[2:]],
        words=words,
        variables=variables,
        path=path,
        mask=(),
        kept=[_nest(variables)] if request.get("nested") else [],
    )
    child.inherited.update(variables)
    _run(words)


def _nest(variables: Mapping[str, str]) -> int:
    """Fork a zygote for the children of this process; return the number of its descriptor."""
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
    multiprocessing.util.spawnv_passfds = _spawn
    subprocess.Popen, os.execv, os.posix_spawn = Popen, _exec, _spawn_detached  # type: ignore[misc]
    return number


def _run(words: Sequence[str]) -> NoReturn:
    """Run a program, and record the exit code with which the interpreter is about to end this process."""
    global _code
    new_main()
    try:
        finish(lambda: _run_main(words))
    except SystemExit as end:
        # As in sys.exit(); the interpreter prints all but numbers.
        _code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    except KeyboardInterrupt:  # it ends by the signal
        raise
    except BaseException:
        _code = 1
        raise
    _code = 0
    raise SystemExit(0)


def _run_main(words: Sequence[str]) -> None:
    main = vars(sys.modules["__main__"])
    try:
        if words[0] == "-m":
            if words[1] == "shared_rpc.worker" and DRIVER in os.environ:
                importlib.import_module("tests.kit.fake_driver").install()
            runpy._run_module_as_main(words[1], True)  # type: ignore[attr-defined]
        elif words[0] == "-c":
            exec(compile(words[1], "<string>", "exec"), main)
        else:
            path = main["__file__"] = os.path.abspath(words[0])
            exec(compile(Path(words[0]).read_bytes(), path, "exec"), main)
        return
    except _Exec as given:
        (words,) = given.args
    sys.argv[:] = ["-m", *words[2:]]
    sys.orig_argv[1:] = words
    set_title([sys.executable, *words])
    new_main()
    _run_main(words)


def _leave() -> None:
    """End this process after all exit callbacks. It clears its main module, but no others.

    The interpreter clears every module, and so touches every object in memory. In a fork, this copies each of them, which
    takes 0.1 s and 150 MB.
    """
    if _code is None:
        return
    if threading.active_count() == 1:  # the interpreter has stopped the others by then
        main = vars(sys.modules["__main__"])
        for name in sorted(main, key=lambda name: not name.startswith("_")):
            if name != "__builtins__":
                main[name] = None
    gc.collect()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        return  # the interpreter has an exit code for that
    os._exit(_code & 0xFF)
