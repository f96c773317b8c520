"""The process of an engine, which executes functions of this module on request over a pipe."""

from __future__ import annotations

import ctypes
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

#: Imports of engines, made once for all of them.
PRELOAD = ["vllm", "vllm.entrypoints.llm", "vllm.v1.engine.llm_engine"]
if not os.path.exists("/dev/nvidiactl"):  # torch.cuda would initialise CUDA before the forks
    PRELOAD.append("vllm.v1.worker.cpu_worker")  # which uses streams of torch.cuda

PROMPT = [1, 17, 42, 99]


def work(pipe: Connection, log: Path, environ: Mapping[str, str], options: Mapping[str, Any]) -> None:
    """Create an engine, and call functions of this module with it, by name, until the pipe is closed."""
    with log.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.update(environ)
    if "TEST_SHM" in environ:
        _limit_shm(int(environ["TEST_SHM"]))
    if "TEST_MISFIT" in environ:
        _misfit()
    llm: Any = None
    try:
        from vllm import LLM

        began = time.perf_counter()
        llm = LLM(**options)
        pipe.send(("done", time.perf_counter() - began))
    except BaseException as error:
        traceback.print_exc()
        pipe.send(("failed", f"{type(error).__name__}: {error}"))
        return
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        function: Callable[..., Any] = getattr(sys.modules[__name__], name)
        try:
            pipe.send(("done", function(llm, *arguments)))
        except BaseException as error:
            traceback.print_exc()
            pipe.send(("failed", f"{type(error).__name__}: {error}"))


def _limit_shm(nbytes: int) -> None:
    """Give this process and its children a /dev/shm of ``nbytes`` bytes, as in a container, if permitted."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_namespace, private, recursive = 0x20000, 1 << 18, 1 << 14  # CLONE_NEWNS, MS_PRIVATE, MS_REC
    if libc.unshare(new_namespace) == 0 and libc.mount(b"none", b"/", None, private | recursive, None) == 0:
        libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, f"size={nbytes}".encode())


def _misfit() -> None:
    """Add a tensor to models that no server has, as a later vLLM might."""
    from shared_rpc_vllm import loader

    def bind(model: Any, tensors: Any) -> None:
        model.table = torch.empty(2, device="meta")
        bound(model, tensors)

    bound, loader.bind = loader.bind, bind


def override(config: Any) -> Any:
    """Change a model's configuration, for ``hf_overrides``."""
    return config


def sleep(llm: Any, level: int = 1) -> None:
    """Suspend the worker with the backend that vLLM selects on a GPU, because its worker for the CPU ignores sleep requests."""
    llm.collective_rpc(_sleep, args=(level,))


def _sleep(worker: Any, level: int) -> None:
    _backend_of(worker).suspend(level)


def wake(llm: Any) -> None:
    """Resume the worker."""
    llm.collective_rpc(_wake)


def _wake(worker: Any) -> None:
    _backend_of(worker).resume()


def _backend_of(wrapper: Any) -> Any:
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

    worker = wrapper.worker
    if not hasattr(worker, "sleep_backend_of_test"):
        worker.sleep_backend_of_test = SleepModeBackendFactory.create_backend(worker.model_config)
    return worker.sleep_backend_of_test


def shm_bytes(llm: Any) -> int:
    """Return the size of /dev/shm."""
    found = os.statvfs("/dev/shm")
    return found.f_blocks * found.f_frsize


def generate(llm: Any, count: int = 12, adapter: Path | None = None) -> list[int]:
    """Return the most likely tokens after the prompt, with an adapter if given."""
    from vllm import SamplingParams, TokensPrompt
    from vllm.lora.request import LoRARequest

    adapted = None if adapter is None else LoRARequest(adapter.name, 1, str(adapter))
    sampling = SamplingParams(max_tokens=count, temperature=0.0, detokenize=False)
    answers = llm.generate([TokensPrompt(prompt_token_ids=PROMPT)], sampling, use_tqdm=False, lora_request=adapted)
    return list(answers[0].outputs[0].token_ids)


def tensors(llm: Any) -> dict[str, tuple[bool, str]]:
    """Return for each tensor of the model whether it is a parameter, and the permissions of its memory."""
    (found,) = llm.apply_model(_tensors)
    return dict(found)


def _tensors(model: Any) -> dict[str, tuple[bool, str]]:
    places = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [(*(int(end, 16) for end in place[0].split("-")), place[1], " ".join(place[5:])) for place in places]

    def of(address: int) -> str:
        return next(f"{mode} {name}".strip() for low, high, mode, name in ranges if low <= address < high)

    both = [(True, model.named_parameters()), (False, model.named_buffers())]
    return {name: (kind, of(tensor.data_ptr())) for kind, named in both for name, tensor in named if tensor.numel()}


def addresses(llm: Any) -> dict[str, int]:
    """Return the addresses of the model's tensors."""
    (found,) = llm.apply_model(_addresses)
    return dict(found)


def _addresses(model: Any) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def reload(llm: Any) -> None:
    """Call ``reload_weights`` of the worker."""
    llm.collective_rpc("reload_weights")


def reload_from(llm: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Load other weights into the worker, like a trainer."""
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": [(name, torch.zeros(*shapes[name])) for name in shapes]})


def weight_sync(llm: Any, step: str, *arguments: Any) -> None:
    """Execute a step of weight transfer, like the routes of vLLM's server."""
    getattr(llm, step)(*arguments)


def write_into_a_weight(llm: Any) -> None:
    """Write to a parameter, like a faulty extension of vLLM."""
    llm.apply_model(_write)


def _write(model: Any) -> None:
    next(model.parameters()).data.zero_()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
