"""Python processes that begin as forks of one which has imported torch, since most tests wait for processes to begin.

Importing torch and this package takes 2 seconds of a core; a fork of a process that has imported them begins in 30 ms.
:mod:`shared_rpc.zygote.child` prepares such a fork, which the tests of zygotes test. The requesting process is the fork's
parent. A process that is to start others itself, as a broker does, gets its own zygote with them.

With ``SHARED_RPC_TESTS=fresh`` in the environment, every process is a new one.
"""

from __future__ import annotations

import argparse
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
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from shared_rpc.zygote import child as forked
from shared_rpc.zygote.child import become, new_main, set_title
from shared_rpc.zygote.process import die_with_parent, fork
from shared_rpc.zygote.safety import unsafe
from shared_rpc.zygote.wire import PADDING
from tests.kit import leaving
from tests.kit.pages import collapse
from tests.kit.subreaper import adopting, fork_for_subreaper

ROOT = Path(__file__).parent.parent.parent
#: A variable that makes workers use the driver made of host memory, including those without an app that would install it.
DRIVER = "SHARED_RPC_TESTS_FAKE_DRIVER"
#: Makes processes import this source, and the modules that these tests import.
PYTHONPATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
#: The warning of Python 3.12 and later about forks with threads, as in pyproject.toml: tests read a child's output.
NO_FORK_WARNING = "ignore:This process (pid=:DeprecationWarning"

#: Imported before processes begin. Excludes modules whose first import is itself under test.
MODULES = (
    *("torch", "torch._dynamo", "numpy", "asyncio", "anyio._backends._asyncio", "hypothesis", "typer", "rich.console"),
    *("typer._adapters", "typer._click.decorators", "annotated_types"),
    *("textual.app", "textual.containers", "textual.screen", "textual.drivers.linux_driver", "textual.widgets._data_table"),
    *("textual.widgets._footer", "textual.widgets._help_panel", "textual.widgets._input", "textual.widgets._sparkline"),
    *(
        "shared_rpc",
        "shared_rpc.cli.app",
        "shared_rpc.provider.provider",
        "shared_rpc.operations.client",
        "shared_rpc.operations.async_client",
    ),
    *("shared_rpc.broker.__main__", "shared_rpc.worker.__main__", "shared_rpc.server.server"),
    *("shared_rpc.codec.arguments", "shared_rpc.codec.results"),
    *(
        "shared_rpc.extras.materialize",
        "shared_rpc.provider.loopback",
        "shared_rpc.provider.main_end",
        "shared_rpc.provider.spawn",
        "shared_rpc.protocol.ticket",
    ),
    *("shared_rpc.memory.backends.host", "shared_rpc.scripts.command", "shared_rpc.zygote.serving"),
)
#: Variables with these prefixes are read when a process starts. (Imports in this process set those of torch's compiler.)
_READ_EARLY = ("PYTHON", "LD_", "OMP_NUM_THREADS", "MALLOC_", "LC_", "LANG")
#: These take effect in a fork, or are read on use: a driver of Ray sets the last one.
_CARRIED_OUT = frozenset({"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONBREAKPOINT"})
#: The beginning of the code of children that :mod:`multiprocessing` starts, except its resource tracker.
_SPAWNED = ("from multiprocessing.spawn ", "from multiprocessing.forkserver ")
#: The last action at the end of a fork is registered before everything that imports register.
_BEGIN = "from tests.kit import leaving; leaving.register(); from tests.kit import forks; forks.begin()"


class _Request(msgspec.Struct):
    """A process to begin; sent with the descriptors of these numbers, and that of the working directory.

    :param words: of the command line, after the interpreter and its options.
    :param nested: True for a zygote of its own.
    :param safe_path: True if ``sys.path`` begins without the folder of the program, as by ``-P``.
    """

    words: list[str]
    variables: dict[str, str]
    fds: list[int]
    unbuffered: bool
    new_session: bool = False
    group: int = -1
    nested: bool = False
    safe_path: bool = False


class _Zygote:
    """The other end of a zygote's socket, in the process whose child the zygote is.

    :param variables: the environment in which it made its imports.
    """

    def __init__(self, sock: socket.socket, variables: dict[str, str]) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self.variables = variables

    @property
    def usable(self) -> bool:
        """True in the process that started it: a fork of that has no zygote."""
        return self._owner == os.getpid()

    def ask(self, request: _Request, fds: Iterable[int], cwd: Any = None) -> int:
        """Request a fork; return the process id of this new child."""
        data = msgspec.msgpack.encode(request)
        folder = os.open(cwd or ".", os.O_PATH | os.O_CLOEXEC)
        try:
            with self._lock, adopting():
                socket.send_fds(self._socket, [struct.pack("!I", len(data))], [*fds, folder])
                self._socket.sendall(data)
                (answer,) = struct.unpack("!i", _exactly(self._socket, 4))
        except BaseException:  # as by a test's timeout: the next request would get the answer to this one
            self._owner = -1
            raise
        finally:
            os.close(folder)
        if answer < 0:
            raise OSError(-answer, os.strerror(-answer))
        return int(answer)

    def close(self) -> None:
        """End it."""
        self._socket.close()


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
    with theirs:
        _process = subprocess.Popen(
            [sys.executable, "-c", _BEGIN, "--fd", str(theirs.fileno()), "--parent", str(os.getpid()), PADDING],
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
        zygote = _zygote if _zygote is not None and _zygote.usable and not self._fresh else None
        plain = preexec_fn is None and close_fds and not shell and executable is None and umask < 0
        words = None
        if zygote is not None and plain and (gid, gids, uid) == (None, None, None):
            variables = {os.fsdecode(k): os.fsdecode(v) for k, v in (os.environ if env is None else env).items()}
            words = _words(args, variables, zygote.variables)
        if zygote is None or words is None:
            super()._execute_child(*given)
            return
        streams = {number: number if fd < 0 else fd for number, fd in enumerate((p2cread, c2pwrite, errwrite))}
        fds = streams | {fd: fd for fd in pass_fds}
        options, words = words
        request = _Request(
            words=words,
            variables=variables,
            fds=list(fds),
            unbuffered="-u" in options or bool(variables.get("PYTHONUNBUFFERED")),
            new_session=bool(new_session),
            group=-1 if group is None else group,
            nested=self._has_workers or _has_workers(words, variables),
            safe_path="-P" in options,
        )
        try:
            self.pid = zygote.ask(request, fds.values(), cwd)
            self._child_created = True
        finally:
            self._close_pipe_fds(*rest[:6])


def run(
    args: Sequence[str],
    *,
    input: Any = None,  # as in subprocess.run()
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Run such a process like :func:`subprocess.run`."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(args, **options) as process:
        try:
            output, errors = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(args, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


_spawnv = multiprocessing.util.spawnv_passfds


def _spawn(path: bytes, args: Sequence[Any], passfds: Iterable[int]) -> int:
    """The function that starts processes of :mod:`multiprocessing` from 3.11 to 3.14: those of spawn, and fork servers."""
    words = None
    if _zygote is not None and _zygote.usable:
        variables = dict(os.environ)
        # The only option of the interpreter that variables determine too.
        words = _words([word for word in args if word != "-B"], variables, _zygote.variables)
    if _zygote is None or words is None or not words[1][1].startswith(_SPAWNED):
        return int(_spawnv(path, args, passfds))
    fds = [0, 1, 2, *sorted(map(int, passfds))]
    return _zygote.ask(_Request(words[1], variables, fds, bool(variables.get("PYTHONUNBUFFERED"))), fds)


_posix_spawn = os.posix_spawn


def _spawn_zygote(path: str, argv: Sequence[str], env: Mapping[str, str], **options: Any) -> int:
    """Replaces :func:`os.posix_spawn`, which starts detached processes: brokers, and zygotes of ``shared-rpc run``."""
    words = None
    if _zygote is not None and _zygote.usable and path == sys.executable:
        words = _words([word for word in argv if word != "-B"], dict(env), _zygote.variables)
    if _zygote is None or words is None:
        return _posix_spawn(path, argv, env, **options)
    fds = {fd: fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2 and _is_inherited(fd)}
    for kind, fd, *numbers in options["file_actions"]:
        if kind == os.POSIX_SPAWN_CLOSE:
            fds.pop(fd, None)
        else:
            fds[numbers[0]] = fd
    request = _Request(
        words=words[1],
        variables=dict(env),
        fds=list(fds),
        unbuffered=bool(env.get("PYTHONUNBUFFERED")),
        group=options["setpgroup"],
        nested=words[1][0] == "-m",
        safe_path="-P" in words[0],
    )
    return _zygote.ask(request, fds.values())


def _is_inherited(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:  # the directory that has just been listed
        return False


def _words(args: Any, variables: dict[str, str], imported_with: dict[str, str]) -> tuple[list[str], list[str]] | None:
    """Return the interpreter's options, and the words after them; None if only a new process will do."""
    if isinstance(args, (str, bytes, os.PathLike)):
        return None
    program, *words = map(os.fsdecode, args)
    options = list(itertools.takewhile(lambda word: word in ("-u", "-P"), words))
    words = words[len(options) :]
    if program != sys.executable or not words or (words[0].startswith("-") and words[0] not in ("-c", "-m")):
        return None
    if words[0] == "-m" and (len(words) < 2 or words[1].partition(".")[0] not in ("shared_rpc", "tests")):
        return None
    early = {name for name in {*variables, *imported_with} if name.startswith(_READ_EARLY) and name not in _CARRIED_OUT}
    if any(variables.get(name, imported_with.get(name)) != imported_with.get(name) for name in early):
        return None
    if any("\udc80" <= letter <= "\udcff" for text in (*words, *variables.values()) for letter in text):
        return None  # the request is text
    return options, words


def _has_workers(words: list[str], variables: dict[str, str]) -> bool:
    if variables.get("SHARED_TENSOR_ROLE") == "spawn":
        return True
    served = words[:1] == ["-m"] and (words[1].startswith("shared_rpc.broker") or "serve" in words)
    return served and "--in-process" not in words


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise ConnectionError("the tests' zygote has ended")
        data += part
    return data


class _Serving:
    """The zygote's side: begins processes until the other end is closed."""

    def __init__(self, sock: socket.socket, path: list[str], mask: set[int]) -> None:
        self._socket = sock
        self._path = path
        self._mask = mask

    def serve(self) -> _Born | None:
        """Serve requests. Returns in every fork; None at the end."""
        while True:
            head, fds, _, _ = socket.recv_fds(self._socket, 4, 253)
            if not head:
                return None
            request = msgspec.msgpack.decode(_exactly(self._socket, *struct.unpack("!I", head)), type=_Request)
            try:
                pid = fork_for_subreaper()
            except OSError as error:
                pid = -(error.errno or 1)
            if pid == 0:
                self._socket.detach()
                return _Born(request, fds, self._path, self._mask)
            for fd in fds:
                os.close(fd)
            self._socket.sendall(struct.pack("!i", pid))


class _Born:
    """A fork before its program begins."""

    def __init__(self, request: _Request, fds: list[int], path: list[str], mask: set[int]) -> None:
        self._request, self._path, self._mask = request, path, mask
        *self._fds, self._folder = fds

    def run(self) -> NoReturn:
        """Run the requested program to its end."""
        request, words = self._request, self._request.words
        if request.new_session:
            os.setsid()
        elif request.group >= 0:
            os.setpgid(0, request.group)
        os.fchdir(self._folder)
        kept = [self._nest()] if request.nested else []
        streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=request.unbuffered) for _ in range(3)]
        sys.stdin, sys.stdout, sys.stderr = streams
        own = (
            os.path.dirname(os.path.abspath(words[0]))
            if words[0] not in ("-c", "-m")
            else os.getcwd()
            if words[0] == "-m"
            else ""
        )
        given = request.variables.get("PYTHONPATH", "")
        path = [
            *([] if request.safe_path else [own]),
            *(os.path.abspath(entry) for entry in given.split(os.pathsep) if entry),
            *self._path,
        ]
        argv = words if words[0] not in ("-c", "-m") else [words[0], *words[2:]]
        become(
            dict(zip(request.fds, self._fds, strict=True)),
            argv=argv,
            words=words,
            variables=request.variables,
            path=path,
            mask=self._mask,
            kept=kept,
        )
        forked.inherited.update(request.variables)
        with leaving.noted():
            forked.finish(lambda: _run(words))
            raise SystemExit(0)

    def _nest(self) -> int:
        """Fork a zygote for the children of this process; return the number of its descriptor."""
        global _zygote
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        if fork() == 0:
            die_with_parent(parent)
            # Close the parent's descriptors: a fork has only those of its request.
            nothing = os.open(os.devnull, os.O_RDWR)
            for fd in {int(name) for name in os.listdir("/proc/self/fd")} - {nothing, theirs.fileno()}:
                with suppress(OSError):  # the directory that has just been listed
                    os.close(fd)
            for fd in range(3):
                os.dup2(nothing, fd)
            os.close(nothing)
            ours.detach()
            set_title([sys.executable, "-m", "tests.kit.forks", "nested"])
            # Signals that a terminal sends to its parent's group are not meant for it.
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            born = _Serving(theirs, self._path, self._mask).serve()
            if born is None:
                os._exit(0)
            born.run()
        theirs.close()
        # Numbers of descriptors that no test examines.
        number = fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, 900)
        ours.close()
        _zygote = _Zygote(socket.socket(fileno=number), self._request.variables)
        subprocess.Popen = Popen
        multiprocessing.util.spawnv_passfds = _spawn
        os.execv, os.posix_spawn = _exec, _spawn_zygote
        return number


_execv = os.execv


class _Exec(BaseException):
    """Leaves a program that another one replaces."""

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__()
        self.words = words


def _exec(program: str, words: Sequence[str]) -> NoReturn:
    """Replace the program, as ``serve`` becomes a broker by :func:`os.execv`; the process keeps its imports, and its zygote."""
    serves = list(words[1:4]) == ["-P", "-m", "shared_rpc.broker"] or list(words[1:4]) == ["-m", "shared_rpc.cli", "serve"]
    if not program == words[0] == sys.executable or not serves:
        _execv(program, words)
    raise _Exec(words[1:])


def _run(words: Sequence[str]) -> None:
    """Run a program, and each one that replaces it."""
    new_main()
    following = None
    try:
        _run_main(words)
    except _Exec as given:
        following = given.words
    if following is not None:
        if following[0] == "-P":
            following = following[1:]
            del sys.path[:1]
        sys.argv[:] = [following[0], *following[2:]]
        sys.orig_argv[1:] = following
        set_title([sys.executable, *following])
        _run(following)


def _run_main(words: Sequence[str]) -> None:
    main = vars(sys.modules["__main__"])
    if words[0] == "-m":
        if words[1] == "shared_rpc.worker" and DRIVER in os.environ:
            importlib.import_module("tests.kit.fake_driver").install()
        runpy._run_module_as_main(words[1], True)
    elif words[0] == "-c":
        exec(compile(words[1], "<string>", "exec"), main)
    else:
        path = main["__file__"] = os.path.abspath(words[0])
        exec(compile(Path(words[0]).read_bytes(), path, "exec"), main)


def main() -> _Born | None:
    """Run the zygote. Returns in every fork."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("padding")
    options = parser.parse_args()
    die_with_parent(options.parent)
    own = {os.getcwd(), "", *os.environ["PYTHONPATH"].split(os.pathsep)}
    path = [entry for entry in sys.path if entry not in own]
    for name in MODULES:
        with suppress(ModuleNotFoundError):  # of another release
            importlib.import_module(name)
    # The program's module must not be imported already, nor any module of the tests, unless the program imports it.
    for name in [name for name in sys.modules if name.endswith(".__main__") or name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    # Functions registered with exit(3) before, as static objects of torch's libraries are, do not run at the end of forks:
    # that would touch, and so copy, all their memory, for 0.2 s. See on_exit(3).
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
    connection = socket.socket(fileno=options.fd)
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
    leaving.spare_what_there_is()
    collapse()
    return _Serving(connection, path, signal.pthread_sigmask(signal.SIG_BLOCK, ())).serve()


def begin() -> NoReturn:
    """Run the zygote, and in each fork the requested program."""
    begun = main()
    if begun is None:
        os._exit(0)
    begun.run()
