"""The steps by which a fork of a zygote becomes a process like any other, and the program that it runs."""

from __future__ import annotations

import builtins
import ctypes
import fcntl
import importlib
import io
import linecache
import os
import pkgutil
import random
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.machinery import BuiltinImporter, SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from zipimport import zipimporter

import msgspec

from shared_rpc.settings import change_environment, environment
from shared_rpc.zygote.preloading import shadowed

__all__ = [
    "Identity",
    "become",
    "close_all_but",
    "finish",
    "inherited_environment",
    "new_main",
    "open_descriptors",
    "own_path",
    "run_program",
    "set_title",
    "shadowed_by",
]


class Identity(msgspec.Struct, frozen=True):
    """The attributes that a fork does not have from its zygote.

    :param fds: the numbers that its descriptors have; 0, 1 and 2 are among them.
    :param variables: the environment.
    :param inherited: the environment without what imports have changed of it, for a process that takes the place of the fork.
    :param argv: ``sys.argv``.
    :param path: ``sys.path``.
    :param umask: None for the zygote's, as for the others.
    :param ignored: signals that it ignores, as it would have inherited that.
    :param group: whether it leads a process group of its own.
    :param options: of the interpreter; None for the zygote's.
    :param title: its command line behind the interpreter and the options, as other programs see it; by default ``argv``.
    """

    fds: Sequence[int]
    argv: Sequence[str]
    variables: Mapping[str, str]
    path: Sequence[str]
    umask: int | None = None
    limits: Mapping[int, tuple[int, int]] = {}
    ignored: Sequence[int] = ()
    group: bool = True
    options: Sequence[str] | None = None
    title: Sequence[str] = ()
    inherited: Mapping[str, str] | None = None


def become(identity: Identity, fds: Sequence[int], kept: Iterable[int], mask: Iterable[int]) -> None:
    """Make a process of its own of a fork. Once, in the fork, before anything else, while signals are held back.

    The rule: *what a new process would have made for itself is made anew; what it would have inherited from whoever asked for
    it is taken from there; what its imports would have made is kept.* So:

    - made anew: the state of random number generators (``random`` does that itself, as ``tempfile`` does; numpy's and torch's
      global ones do not), the key of :mod:`multiprocessing`, standard streams with their buffers, caches of directories and of
      sources, the names of its main module and its command line;
    - inherited: descriptors, environment (with the time zone that the C library had read from it), working directory, umask,
      resource limits, ignored signals, a process group;
    - kept: modules, atexit callbacks and logging handlers that imports registered (this process runs them, and its zygote,
      which ends without, does not), signal handlers that imports set, descriptors of devices without state. Objects of the
      imports stay frozen, see :func:`gc.freeze`: a collection that touched them would copy their memory.

    Locks need nothing here: a zygote has one thread, which holds none when it forks; ``threading`` and ``logging`` have
    hooks for forks of their own. The hash seed is the zygote's, as in any fork.

    :param fds: descriptors that came with the request, in the order of ``identity.fds``.
    :param kept: further descriptors that stay open.
    :param mask: signals that are blocked when all is done.
    """
    _place_descriptors(dict(zip(identity.fds, fds, strict=True)), kept)
    if identity.group:
        os.setpgid(0, 0)
    _inherited.update(identity.inherited if identity.inherited is not None else identity.variables)
    before = environment()
    change_environment({**dict.fromkeys(before), **identity.variables})
    if before.get("TZ") != identity.variables.get("TZ"):
        time.tzset()
    if identity.umask is not None:
        os.umask(identity.umask)
    if identity.limits:
        import resource

        for limit, values in identity.limits.items():
            resource.setrlimit(limit, values)
    _standard_streams()
    _seed()
    _forget_folders()
    sys.argv[:] = identity.argv
    sys.path[:] = identity.path
    title = identity.title or identity.argv
    set_title([sys.executable, *(identity.options or ()), *title])
    words = _interpreter_words() if identity.options is None else [sys.executable, *identity.options]
    sys.orig_argv[:] = [*words, *title]
    # 3.11 to 3.13 keep the zygote's id. Private; a new thread calls it itself: in 3.8 to 3.14.
    main: Any = threading.main_thread()
    main._set_native_id()
    signal.set_wakeup_fd(-1)
    for number in identity.ignored:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


#: See :func:`inherited_environment`.
_inherited: dict[str, str] = {}


def inherited_environment() -> dict[str, str]:
    """Return the environment that a new process would have begun with in place of this fork."""
    return dict(_inherited)


def _place_descriptors(wanted: Mapping[int, int], kept: Iterable[int]) -> None:
    """Give descriptors their numbers, and close all others except the kept ones."""
    above = max([*wanted, *kept, 2]) + 1
    # Moved first: one descriptor may have the number that another one is to get.
    moved = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for number, fd in wanted.items()}
    for number, fd in moved.items():
        os.dup2(fd, number, inheritable=True)
    close_all_but({*wanted, *kept})


def _standard_streams() -> None:
    """Make new ones, as the interpreter does when it starts: with buffers of their own, and terminals by the line."""
    for number, name, earlier in ((0, "stdin", sys.stdin), (1, "stdout", sys.stdout), (2, "stderr", sys.stderr)):
        stream = _stream(number, name, earlier)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _stream(number: int, name: str, earlier: Any) -> io.TextIOWrapper | None:
    unbuffered = getattr(earlier, "write_through", False)
    try:
        # As the interpreter does: open() chooses the buffer size by the kind of file. The file stays open.
        buffering = 0 if unbuffered and number != 0 else -1
        buffer: Any = os.fdopen(number, "rb" if number == 0 else "wb", buffering, closefd=False)
    except OSError:
        return None
    raw = getattr(buffer, "raw", buffer)
    raw.name = f"<{name}>"
    stream = io.TextIOWrapper(
        buffer,
        encoding=earlier.encoding if earlier is not None else "utf-8",
        errors=earlier.errors if earlier is not None else "strict",
        newline="\n",
        line_buffering=not unbuffered and (number == 2 or raw.isatty()),
        write_through=unbuffered,
    )
    stream.mode = "r" if number == 0 else "w"  # type: ignore[misc]
    return stream


def _seed() -> None:
    """Seed the global generators of random numbers anew. Those of modules that are imported later are seeded then."""
    random.seed()
    legacy = sys.modules.get("numpy.random")
    if legacy is not None:
        legacy.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        # Not torch.seed(): it would also seed CUDA's generators later, which seed themselves.
        torch.default_generator.seed()
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)


def _interpreter_words() -> list[str]:
    """Return the interpreter and its options, which a fork has in common with its zygote."""
    words = sys.orig_argv
    return words[: next(index for index, word in enumerate(words) if word in ("-m", "-c"))]


def _forget_folders() -> None:
    """Have directories and sources be read anew: the zygote may be hours old."""
    importlib.invalidate_caches()
    linecache.clearcache()
    tempfile = sys.modules.get("tempfile")
    if tempfile is not None:
        vars(tempfile)["tempdir"] = None
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        # Children that are not forked search for the main module there, if its path is relative.
        try:
            vars(process)["ORIGINAL_DIR"] = os.path.abspath(os.getcwd())
        except OSError:  # the directory has been removed
            vars(process)["ORIGINAL_DIR"] = None


def own_path(words: Sequence[str]) -> list[str]:
    """Return what the interpreter puts before all other directories of modules for a program, see :func:`run_program`."""
    if sys.flags.safe_path:
        return []
    if words[0] == "-m":
        try:
            return [os.getcwd()]
        except OSError:  # the directory has been removed
            return []
    if pkgutil.get_importer(_absolute(words[0])) is not None:
        return [_absolute(words[0])]
    try:
        return [os.path.dirname(os.path.realpath(words[0], strict=True))]
    except OSError:
        return [os.path.dirname(words[0])]


def shadowed_by(path: Sequence[str]) -> str:
    """Return a module that a new process would import from the :func:`own_path` of its program; empty for none."""
    if found := shadowed(path):
        return found
    for entry in path:
        importer = pkgutil.get_importer(entry)
        if isinstance(importer, zipimporter):
            names = {name.partition(".")[0] for name in sys.modules} - {"__main__"}
            return next((f"{name} in {entry}" for name in sorted(names) if importer.find_spec(name) is not None), "")
    return ""


def _absolute(path: str) -> str:
    """Return a path with the working directory before it, and otherwise unchanged."""
    try:
        return path if os.path.isabs(path) else os.getcwd() if path == "." else f"{os.getcwd()}/{path}"
    except OSError:  # the directory has been removed
        return path


def run_program(words: Sequence[str]) -> NoReturn:
    """Run a script, a directory, an archive, or ``-m`` with a module, as ``python`` does, to the end of the process."""
    new_main()
    # Private; "python -m" itself calls it: in 3.4 to 3.14. It also sets sys.argv[0], unless told not to.
    private: Any = runpy
    if words[0] == "-m":
        finish(lambda: private._run_module_as_main(words[1]))
    elif pkgutil.get_importer(_absolute(words[0])) is not None:
        finish(lambda: private._run_module_as_main("__main__", False))
    else:
        finish(lambda: _run_file(_absolute(words[0])))
    raise SystemExit(0)


def _run_file(path: str) -> None:
    # Not by runpy.run_path(): its main module ends with the script's code, and a server goes on after that.
    main = vars(sys.modules["__main__"])
    with io.open_code(path) as file:
        code = pkgutil.read_code(file)  # None where it is no bytecode
    loader = SourceFileLoader if code is None else SourcelessFileLoader
    main.update(__file__=path, __cached__=None, __loader__=loader("__main__", path))
    if code is None:
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main)


def new_main() -> None:
    """Make a main module with what the interpreter puts there before the program.

    Not the zygote's own one made empty, which is frozen: what a program leaves there would not be collected at its end.
    """
    earlier, main = sys.modules["__main__"], ModuleType("__main__")
    vars(main).update(__loader__=BuiltinImporter, __builtins__=builtins)
    if "__annotations__" in vars(earlier):  # up to 3.13
        vars(main)["__annotations__"] = {}
    sys.modules["__main__"] = main


def finish(main: Callable[[], object]) -> None:
    """Call the program; show an error of it without the frames of this module, and end the process."""
    try:
        main()
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        error = error.with_traceback(trace)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        if sys.version_info >= (3, 12):
            sys.last_exc = error
        sys.excepthook(type(error), error, trace)
        del trace  # this frame is a part of it: the program's objects would be collected late
        # The interpreter handles the error too, and chooses how to end: by SIGINT for a KeyboardInterrupt.
        sys.excepthook = lambda *_: None
        raise


def open_descriptors() -> list[int]:
    """Return the numbers of all open descriptors, the least one first."""
    found = []
    for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
        try:
            os.fstat(fd)
        except OSError:  # the descriptor of the listing itself
            continue
        found.append(fd)
    return found


def close_all_but(kept: Iterable[int]) -> None:
    """Close every descriptor that is not among these."""
    stay = sorted(kept)
    for first, last in zip([-1, *stay], [*stay, open_descriptors()[-1] + 1], strict=True):
        if first + 1 < last:
            os.closerange(first + 1, last)


def set_title(words: Sequence[str]) -> None:
    """Overwrite the words that this process was started with, as far as there is room; see proc_pid_cmdline(5)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc_pid_stat(5)
    room = end - start
    if room < 2:
        return
    title = b" ".join(map(os.fsencode, words))[: room - 2]
    # A last byte other than zero makes the kernel treat this as one text, up to the first zero; see setproctitle(3).
    ctypes.memmove(start, title.ljust(room - 1, b"\0") + b".", room)
