"""The key that selects the zygote of a script.

A fork cannot change state fixed at its zygote's start: the interpreter and its options, the variables that it, the loader and
libraries read at their start, credentials and namespaces, and limits that can only be lowered. All of that, the umask and the
other limits are hashed into a key, and each key has its own zygote.
"""

from __future__ import annotations

import os
import sys
from _blake2 import blake2b  # hashlib's own, without loading OpenSSL first; in 3.6 to 3.14
from collections.abc import Iterable, Mapping
from contextlib import suppress

import shared_rpc

#: Prefixes of variables that are read when the interpreter begins or a library is loaded: by Python, the loader and the C
#: library, the thread pools of OpenMP and BLAS, torch and its libraries, CUDA, numpy, and libraries of Hugging Face.
_PREFIXES = (
    *("PYTHON", "LD_", "LC_", "LANG", "GLIBC_", "MALLOC_", "LOCPATH", "COVERAGE_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_"),
    *("NUMEXPR_", "VECLIB_", "DNNL_", "ONEDNN_", "NPY_", "NUMPY_"),
    *("TORCH", "PYTORCH_", "ATEN_", "C10_", "KINETO_", "TRITON_", "NCCL_", "GLOO_", "TP_"),
    *("CUDA_", "CUBLAS", "CUDNN_", "CUSOLVER_", "NVIDIA_", "HIP_", "HSA_", "ROCM_", "ROCR_"),
    *("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_"),
)
#: Further such variables by full name: HOME determines the user's site-packages.
_NAMES = frozenset({"HOME"})
#: Lines of /proc/self/status: credentials, irrevocably dropped privileges, the processors that size thread pools, the umask.
_STATUS = frozenset(
    {"Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp", "Seccomp_filters", "Cpus_allowed", "Mems_allowed", "Umask"}
)


def key_of(environ: Mapping[str, str], preload: Iterable[str]) -> str:
    """Return the key of this process for its scripts: sixteen hexadecimal digits."""
    preload = sorted(set(preload))
    unbuffered = any(getattr(stream, "write_through", False) for stream in (sys.stdout, sys.stderr))  # in none of the flags
    lines = _content("/proc/self/status").splitlines()
    prefixes = (*_PREFIXES, *(f"{name.partition('.')[0].upper()}_" for name in preload))
    facts: list[object] = [
        # The package itself: a zygote only serves its own version.
        (shared_rpc.__version__, os.path.dirname(shared_rpc.__file__)),
        (sys.executable, sys.version, sys.prefix, sys.base_prefix, _identity(os.path.realpath(sys.executable))),
        (tuple(sys.flags), unbuffered, sorted(sys._xoptions.items(), key=str), sys.warnoptions),
        preload,
        sorted((name, value) for name, value in environ.items() if name in _NAMES or name.startswith(prefixes)),
        # The module site makes relative entries of the path absolute at the interpreter's start.
        _link("/proc/self/cwd") if is_relative(environ.get("PYTHONPATH", "")) else None,
        [line for line in lines if line.startswith("Cap") or line.partition(":")[0] in _STATUS],
        [_link(f"/proc/self/ns/{name}") for name in sorted(os.listdir("/proc/self/ns"))],
        _identity("/"),
        [_content(f"/proc/self/{name}") for name in ("personality", "oom_score_adj", "loginuid", "attr/current", "limits")],
        (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)),
    ]
    return blake2b(repr(facts).encode(errors="surrogateescape"), digest_size=8).hexdigest()


def interpreter_options() -> list[str]:
    """Return the options of this interpreter's command line, before the program and its arguments."""
    before, behind = sys.orig_argv[1 : -len(sys.argv)], sys.orig_argv[-len(sys.argv) + 1 :]
    if len(sys.argv) == 1 or behind != sys.argv[1:]:  # the program has changed its arguments
        return []
    return before[:-1] if before[-1:] in (["-m"], ["-c"]) else before


def is_relative(path: str) -> bool:
    """Return True if a variable such as PYTHONPATH has entries that depend on the working directory."""
    return bool(path) and any(not os.path.isabs(entry) for entry in path.split(os.pathsep))


def _content(path: str) -> str:
    with suppress(OSError), open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()
    return ""


def _link(path: str) -> str:
    with suppress(OSError):
        return os.readlink(path)
    return ""


def _identity(path: str) -> tuple[int, ...]:
    with suppress(OSError):
        status = os.stat(path)
        return status.st_dev, status.st_ino
    return ()
