"""Examination of this machine: findings about all requirements of sharing, each with its fix."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from shared_rpc.cli.rendering import MPS
from shared_rpc.errors import SharedRPCError
from shared_rpc.memory.backends.choice import PREFERENCE, chosen, mps, survey
from shared_rpc.protocol.own_files import directory_problem
from shared_rpc.protocol.peers import is_own
from shared_rpc.settings import resolve_base_path, resolve_role

#: Descriptors: a lower limit is enough for few clients.
_FEW_FILES = 4096


class Finding(NamedTuple):
    """One line: ``state`` is ``"good"``, ``"limited"`` (works, with less) or ``"broken"`` (sharing is impossible)."""

    what: str
    state: Literal["good", "limited", "broken"]
    found: str
    fix: str = ""


def examine(base_path: str | None = None) -> list[Finding]:
    """Examine all requirements of sharing. Leaves nothing behind; imports torch."""
    return [*_settings(), *_directory(base_path), *_limits(), *_host_memory(), *_torch(), *_gpus()]


def _settings() -> Iterator[Finding]:
    try:
        yield Finding("environment", "good", f"role {resolve_role()}")
    except SharedRPCError as error:
        yield Finding("environment", "broken", str(error), "correct the variable, or unset it")


def _directory(base_path: str | None) -> Iterator[Finding]:
    directory = Path(resolve_base_path(base_path)).parent
    fix = "set SHARED_TENSOR_BASE_PATH to a path in a directory of your own"
    try:
        status = directory.lstat()
    except FileNotFoundError:
        parent = next(path for path in directory.parents if path.exists())
        if os.access(parent, os.W_OK):
            yield Finding("socket directory", "good", f"{directory}, made when a server starts")
        else:
            yield Finding("socket directory", "broken", f"{directory} cannot be made: {parent} is not writable", fix)
        return
    except OSError as error:
        yield Finding("socket directory", "broken", f"{directory}: {error}", fix)
        return
    reason = directory_problem(status)
    if not reason:
        yield Finding("socket directory", "good", f"{directory}, mode {stat.S_IMODE(status.st_mode):04o}")
    else:
        own = stat.S_ISDIR(status.st_mode) and is_own(status.st_uid)
        yield Finding("socket directory", "broken", f"{directory} {reason}", f"chmod 700 {directory}, or {fix}" if own else fix)


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} open files, {hard} at most; a server raises its own"
    few = hard < _FEW_FILES
    fix = "raise the hard limit: ulimit -Hn, or LimitNOFILE= of the service" if few else ""
    yield Finding("limits", "limited" if few else "good", found, fix)


def _host_memory() -> Iterator[Finding]:
    from shared_rpc.memory.backends.host import HOST

    try:
        with HOST.create(1) as segment:
            address = HOST.map(segment.fileno(), segment.info.nbytes, "read_write")
            HOST.seal(segment.fileno())
            HOST.unmap(address, segment.info.nbytes)
    except (SharedRPCError, OSError) as error:
        yield Finding(
            "host memory", "broken", f"memfd: {error}", "Linux 5.1 or later is needed, and a sandbox that allows memfd_create"
        )
    else:
        yield Finding("host memory", "good", "memfd, sealed against writing where access='read'")


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding("torch", "broken", str(error), "pip install torch")
        return
    if torch.cuda.is_available():
        yield Finding("torch", "good", f"{torch.__version__}, CUDA {torch.version.cuda}")
    else:
        why = "built without CUDA" if torch.version.cuda is None else "finds no usable GPU or driver"
        fix = "for GPUs install a CUDA build of torch and NVIDIA's driver; host memory works as it is"
        yield Finding("torch", "limited", f"{torch.__version__}, {why}", fix)


def _gpus() -> Iterator[Finding]:
    try:
        from shared_rpc.memory.backends.cuda import peer_capable, visible_gpus
    except ImportError as error:
        yield Finding("CUDA driver", "limited", f"{error}", "pip install 'shared-rpc[cuda]' where there is a GPU")
        return
    gpus = visible_gpus()
    if not gpus:
        yield Finding("CUDA driver", "limited", "no GPU", "check nvidia-smi and CUDA_VISIBLE_DEVICES where there is one")
    for ordinal, uuid in enumerate(gpus):
        peers = [str(other) for other in range(len(gpus)) if other != ordinal and peer_capable(ordinal, other)]
        reach = f", peer of GPU {', '.join(peers)}" if peers else ", no peers" if len(gpus) > 1 else ""
        yield _gpu(f"GPU {ordinal}", uuid, reach)


def _gpu(name: str, uuid: str, reach: str) -> Finding:
    """Describe the mechanisms of a GPU and the one in use."""
    lacks = survey(uuid)
    works = ", ".join(f"{mechanism} {'no' if lacks[mechanism] else 'yes'}" for mechanism in PREFERENCE)
    try:
        choice = chosen(uuid)
    except SharedRPCError as error:
        return Finding(name, "limited", f"{uuid}{reach}; {error}", "a newer driver or GPU; host memory works as it is")
    found = f"{uuid}{reach}; {works}; uses {choice.name}: {choice.reason}"
    if mps(uuid):
        fix = "if a crash of one client must not end the others, run them without it: echo quit | nvidia-cuda-mps-control"
        return Finding(name, "limited", f"{found}; {MPS}", fix)
    if choice.name == "vmm":
        return Finding(name, "good", found)
    fix = "a newer driver or GPU gives memory that outlives its maker and can be mapped read-only; vGPU and WSL lack it"
    return Finding(name, "limited", found, fix)
