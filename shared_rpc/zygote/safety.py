"""The check that this process may be forked."""

from __future__ import annotations

import _thread
import ctypes
import os
import signal
import sys
import threading

from shared_rpc.settings import open_descriptors
from shared_rpc.zygote.process import fork, is_readable

#: Devices without state, which processes may share.
HARMLESS = frozenset({"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"})
#: Devices of the NVIDIA driver that its management library opens too, without CUDA.
_NVIDIA = "/dev/nvidia"
#: CUDA_ERROR_NOT_INITIALIZED, returned by every function of the driver's interface before cuInit().
_NOT_INITIALIZED = 3
#: Files by which that library waits for events (both seen with driver 580). Forks inherit them with the devices, and do not
#: wait.
_EVENTS = ("anon_inode:[eventfd]", "pipe:")
#: Seconds for the trial fork's computation.
_PATIENCE = 10.0


def unsafe(known: frozenset[int]) -> str:
    """Return the reason why this process must not be forked; empty if it may be.

    Python threads would be missing in a fork, with their locks held. CUDA does not survive a fork. A child process, an open
    file or a socket would be shared by independent forks. Threads of native libraries (OpenBLAS, OpenMP) are harmless: those
    libraries restart them in a fork.

    :param known: descriptors that are allowed to be open.
    """
    if threading.active_count() > 1 or _thread._count() > 0:
        names = ", ".join(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
        return f"it has threads ({names or 'without names'})"
    if cuda_is_initialised():
        return "CUDA is initialised"
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        pass
    else:
        return "it has child processes"
    opened = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in open_descriptors()}
    devices = [name for name in opened.values() if name.startswith(_NVIDIA)]
    harmless = (*HARMLESS, *devices, *(_EVENTS if devices else ()))
    return next((f"{name} is open" for fd, name in opened.items() if fd not in known and not name.startswith(harmless)), "")


def cuda_is_initialised() -> bool:
    """Return True if any code in this process has initialised CUDA, which then does not work in its forks."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # the library is not loaded
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED)


def try_fork() -> str:
    """Fork and compute in the fork; return the error if that fails, empty if it succeeds.

    After a parallel region of OpenMP, the library in a fork waits for threads that do not exist there.
    """
    pid = fork()
    if pid == 0:
        try:
            os._exit(_compute())
        finally:
            os._exit(1)
    pidfd = os.pidfd_open(pid)
    try:
        hangs = not is_readable(pidfd, _PATIENCE)
        if hangs:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os.close(pidfd)
    if hangs:
        return f"a fork of it cannot compute: it hung for {_PATIENCE:g} s, as after earlier use of OpenMP"
    if code == _POISONED:
        return "CUDA is initialised: torch refuses to use it in a fork"
    return "" if code == 0 else f"a fork of it cannot compute: it ended with {code}"


_POISONED = 3


def _compute() -> int:
    """Use the thread pools of torch and numpy, if imported."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "ones"):
        matrix = numpy.ones((256, 256), numpy.float32)
        if (matrix @ matrix)[0, 0] != 256:
            return 2
    if torch is not None and hasattr(torch, "ones"):
        matrix = torch.ones(512, 512)
        if (matrix @ matrix).add_(1).sum().item() != 512 * 512 * 513:
            return 2
        if torch.cuda._is_in_bad_fork():
            return _POISONED
    return 0
