"""A client process that attaches: the first time, again while it holds the object, again after it gave it back.

It says when it is ready (interpreter, torch, CUDA context and the model's classes are loaded then), waits for a line,
measures every case, answers, and holds what it attached until stdin is closed, where it was asked to.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks import models  # noqa: F401  the classes of what is attached
from benchmarks.echo import Echo
from benchmarks.memory import gpu_bytes_of_process, private_bytes, used
from benchmarks.ours import Ours, load_lazy_modules
from benchmarks.peer import Peer
from benchmarks.processes import configuration, next_command, say, until_told
from benchmarks.stats import timed
from benchmarks.subjects import Held, Subject

#: Round trips by which the machine's speed is told.
_PINGS = 200
#: Seconds after which a case is not repeated any more, once there are a few times.
_BUDGET, _FEWEST = 3.0, 3


class Attaching:
    """Measures one case after the other with one client."""

    def __init__(self, subject: Subject, device: str) -> None:
        self._subject = subject
        self._device = device

    def measure(self, call: list[Any], repeats: int) -> dict[str, Any]:
        """Return ``first`` (s), ``held`` and ``released`` (lists of s), ``grown`` (bytes), ``tensors`` and ``nbytes``."""
        before = self._memory()
        handles: list[Held] = []
        first = timed(lambda: handles.append(self._subject.attach(*call)))
        grown = {key: value - before[key] for key, value in self._memory().items() if key in before}
        parameters = list(handles[0].value.parameters())
        facts = {
            "first": first,
            "grown": grown,
            "tensors": len(parameters),
            "nbytes": sum(parameter.untyped_storage().nbytes() for parameter in parameters),
            # A read of the last tensor: it is there, and it is the right one.
            "right": float(parameters[-1].detach().flatten()[-1]) == 1 + (len(parameters) - 1) % 100,
        }
        del parameters
        held = self._repeated(call, repeats)
        handles.pop().release()
        return facts | {"held": held, "released": self._repeated(call, repeats)}

    def _repeated(self, call: list[Any], repeats: int) -> list[float]:
        times: list[float] = []
        while len(times) < repeats and (sum(times) < _BUDGET or len(times) < _FEWEST):
            times.append(self._again(call))
        return times

    def _again(self, call: list[Any]) -> float:
        handles: list[Held] = []
        seconds = timed(lambda: handles.append(self._subject.attach(*call)))
        handles.pop().release()
        return seconds

    def _memory(self) -> dict[str, int]:
        if self._device == "cpu":
            return {"private": private_bytes()}
        torch.cuda.synchronize()
        sizes = {"device": used(self._device)}
        nvml = gpu_bytes_of_process()
        return sizes if nvml is None else sizes | {"nvml": nvml}


def main() -> None:
    """Configuration: ``who``, ``socket``, ``device``, ``echo``, ``preload``, ``cases``, ``repeats``, ``hold``."""
    config = configuration()
    device: str = config["device"]
    if device != "cpu":
        torch.zeros(1, device=device)
        torch.cuda.synchronize()
    if config["preload"]:
        load_lazy_modules(device)
    subject: Subject = Ours(config["socket"]) if config["who"] == Ours.name else Peer(config["socket"], device)
    echo = Echo(config["echo"])
    say(ready=True)
    if next_command() is None:
        return
    attaching = Attaching(subject, device)
    results = []
    for call in config["cases"]:
        try:
            results.append(attaching.measure(call, config["repeats"]))
        except Exception as error:
            # One case that a side cannot do must not cost the others.
            results.append({"error": f"{type(error).__name__}: {error}"})
    kept = subject.attach(*config["cases"][0]) if config["hold"] else None
    say(results=results, echo=[timed(echo.ping) for _ in range(_PINGS)])
    until_told()
    del kept
    subject.close()
    echo.close()


if __name__ == "__main__":
    main()
