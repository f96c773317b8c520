"""The steps that turn a fork of a zygote into an ordinary process, and the program that it runs."""

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
from importlib.machinery import BuiltinImporter, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from shared_rpc.settings import change_environment, environment, open_descriptors

#: In a fork, the environment that a new process would start with: without the changes made by the zygote's imports.
inherited: dict[str, str] = {}


def become(
    fds: Mapping[int, int],
    *,
    argv: Sequence[str],
    words: Sequence[str],
    variables: Mapping[str, str],
    path: Sequence[str],
    mask: Iterable[int],
    options: Sequence[str] = (),
    kept: Iterable[int] = (),
    ignored: Iterable[int] = (),
) -> None:
    """Turn a fork into an independent process. Once, in the fork, before anything else, while signals are blocked.

    The rule: *state that a new process would create is created again; state that it would inherit from its requester is
    taken from there; state that its imports would create is kept.* So:

    - created again: the state of random number generators (``random`` and ``tempfile`` do that themselves; numpy's and torch's
      global ones do not), the key of :mod:`multiprocessing`, standard streams with their buffers, caches of directories and of
      sources, the names of its main module and its command line;
    - inherited: descriptors, environment (with the time zone that the C library had read from it), working directory, ignored
      signals; umask and resource limits are the zygote's, which are those of its clients;
    - kept: modules, atexit callbacks and logging handlers registered by imports (this process runs them, and its zygote does
      not), signal handlers set by imports, descriptors of devices without state. Objects of the imports stay frozen, see
      :func:`gc.freeze`: a collection that touched them would copy their memory.

    Locks need no care: a zygote has one thread, which holds none when it forks; ``threading`` and ``logging`` have their own
    fork hooks. The hash seed is the zygote's, as in any fork.

    :param fds: descriptors, by their new numbers; must include 0, 1 and 2 for standard streams.
    :param words: its command line after the interpreter and its ``options``, as other programs see it.
    :param mask: signals that stay blocked afterwards.
    :param kept: further descriptors that stay open.
    :param ignored: signals that it ignores, as if inherited.
    """
    _place_descriptors(fds, kept)
    before = environment()
    change_environment({**dict.fromkeys(before), **variables})
    if before.get("TZ") != variables.get("TZ"):
        time.tzset()
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _stream(number, name, getattr(sys, name))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    _seed()
    _forget_folders()
    sys.argv[:] = argv
    sys.path[:] = path
    sys.orig_argv[:] = [sys.executable, *options, *words]
    set_title(sys.orig_argv)
    # 3.11 to 3.13 keep the zygote's id. Private; a new thread calls it itself: in 3.8 to 3.14.
    main: Any = threading.main_thread()
    main._set_native_id()
    signal.set_wakeup_fd(-1)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _place_descriptors(wanted: Mapping[int, int], kept: Iterable[int]) -> None:
    """Give descriptors their numbers, and close all others except the kept ones."""
    above = max([*wanted, *kept, 2]) + 1
    # Moved first: the number of one descriptor may be the new number of another.
    moved = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for number, fd in wanted.items()}
    for number, fd in moved.items():
        os.dup2(fd, number, inheritable=True)
    close_all_but({*wanted, *kept})


def _stream(number: int, name: str, earlier: io.TextIOWrapper) -> io.TextIOWrapper | None:
    """Open a standard stream as the interpreter does at its start: with its own buffer, line-buffered on a terminal."""
    unbuffered = earlier.write_through
    try:
        # open() chooses the buffer size by the kind of file. The file stays open.
        mode, size = ("rb", -1) if number == 0 else ("wb", 0 if unbuffered else -1)
        buffer: Any = open(number, mode, size, closefd=False)  # noqa: SIM115
    except OSError:  # it is closed in the requesting process
        return None
    raw = getattr(buffer, "raw", buffer)
    raw.name = f"<{name}>"
    by_line = not unbuffered and (number == 2 or raw.isatty())
    stream = io.TextIOWrapper(buffer, earlier.encoding, earlier.errors, "\n", by_line, write_through=unbuffered)
    stream.mode = mode[0]  # type: ignore[misc]
    return stream


def _seed() -> None:
    """Reseed the global random number generators. Those of modules imported later are seeded on import."""
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


def _forget_folders() -> None:
    """Invalidate caches of directories and sources: the zygote may be hours old."""
    importlib.invalidate_caches()
    linecache.clearcache()
    tempfile = sys.modules.get("tempfile")
    if tempfile is not None:
        vars(tempfile)["tempdir"] = None


def own_path(options: Sequence[str], words: Sequence[str]) -> list[str]:
    """Return the entries that the interpreter puts first on a program's module path, see :func:`run_program`.

    :raises OSError: if the working directory or the script has been removed.
    """
    if sys.flags.safe_path or "-P" in options:
        return []
    if words[0] == "-m":
        return [os.getcwd()]
    if pkgutil.get_importer(_absolute(words[0])) is not None:
        return [_absolute(words[0])]
    return [os.path.dirname(os.path.realpath(words[0], strict=True))]


def _absolute(path: str) -> str:
    """Prefix a relative path with the working directory, leaving it otherwise unchanged."""
    return path if os.path.isabs(path) else os.getcwd() if path == "." else f"{os.getcwd()}/{path}"


def run_program(words: Sequence[str]) -> NoReturn:
    """Run a script, a directory, an archive, or ``-m`` with a module, as ``python`` does, to the end of the process."""
    new_main()
    # Private; "python -m" itself calls it: in 3.4 to 3.14. It also sets sys.argv[0] by default.
    private: Any = runpy
    if words[0] == "-m":
        finish(lambda: private._run_module_as_main(words[1]))
    elif pkgutil.get_importer(_absolute(words[0])) is not None:
        finish(lambda: private._run_module_as_main("__main__", False))
    else:
        finish(lambda: _run_file(_absolute(words[0])))
    raise SystemExit(0)


def _run_file(path: str) -> None:
    # Not by runpy.run_path(): its main module ends with the script's code, but a server continues after that.
    main, loader = vars(sys.modules["__main__"]), SourceFileLoader("__main__", path)
    main.update(__file__=path, __cached__=None, __loader__=loader)
    exec(compile(loader.get_data(path), path, "exec", dont_inherit=True), main)


def new_main() -> None:
    """Create a main module with the globals that the interpreter sets before the program.

    The zygote's own one is not reused: it is frozen, so objects of the program in it would not be collected at its end.
    """
    earlier, main = sys.modules["__main__"], ModuleType("__main__")
    vars(main).update(__loader__=BuiltinImporter, __builtins__=builtins)
    if "__annotations__" in vars(earlier):  # up to 3.13
        vars(main)["__annotations__"] = {}
    sys.modules["__main__"] = main


def finish(main: Callable[[], object]) -> None:
    """Call the program, and print its error without the frames of this module."""
    try:
        main()
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        del trace  # it includes this frame: the program's objects would be collected late
        # The interpreter handles the error too, and chooses how to end: by SIGINT for a KeyboardInterrupt.
        sys.excepthook = lambda *_: None
        raise


def close_all_but(kept: Iterable[int]) -> None:
    """Close every descriptor except these."""
    stay = sorted(kept)
    for first, last in zip([-1, *stay], [*stay, open_descriptors()[-1] + 1], strict=True):
        if first + 1 < last:
            os.closerange(first + 1, last)


def set_title(words: Sequence[str]) -> None:
    """Overwrite the command line of this process, as far as it fits; see proc_pid_cmdline(5)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc_pid_stat(5)
    space = end - start
    if space < 2:
        return
    title = b" ".join(map(os.fsencode, words))[: space - 2]
    # A last byte other than zero makes the kernel treat this as one text, up to the first zero; see setproctitle(3).
    ctypes.memmove(start, title.ljust(space - 1, b"\0") + b".", space)
