"""Very many calls: what a client and its server hold in the end is what they held after the first hundred."""

from __future__ import annotations

import gc
import os
import time
from typing import Any

from benchmarks.memory import private_bytes, process_counts, used
from benchmarks.ours import Ours
from benchmarks.processes import configuration, next_command, say
from benchmarks.report import Report, Row, Unit, shown
from benchmarks.servers import Servers, Started
from benchmarks.targets import GOALS

__all__ = ["many_calls"]

#: Calls after which nothing is to grow any more.
_FIRST = 100
#: Readings, a call before each, of which the lowest counts: what a call leaves may go with the next one.
_READINGS = 20
#: Seconds that the readings at the end may take to come down to those at the beginning.
_SETTLED = 5.0

Counts = dict[str, int]


def many_calls(report: Report, servers: Servers, ours: Started, device: str, calls: int) -> None:
    """Make calls that take and return a small tensor, from a process of their own."""
    client = servers.client("long_run", socket=ours.address, server=ours.process.pid, device=device, calls=calls)
    client.read()
    result = client.ask(go=True)
    client.close()
    before, after = result["before"], result["after"]
    name = f"{calls:,} calls, 4 KiB there and back"
    report.add(Row(f"{name}: a call", {Ours.name: result["seconds"] / calls}))
    kind = "GPU memory in use" if device == "cuda" else "shared memory"
    report.add(_row(f"… {kind}", ("memory",), before, after, "bytes"))
    report.add(_row("… descriptors of client, server", ("client fds", "server fds"), before, after))
    report.add(_row("… mappings of client, server", ("client mappings", "server mappings"), before, after))
    # Python's allocator and the C library's take and keep what they like: printed, and not judged.
    for who in ("client", "server"):
        report.add(_row(f"… private host memory of the {who}", (f"{who} private",), before, after, "bytes", judge=False))


def _row(name: str, keys: tuple[str, ...], before: Counts, after: Counts, unit: Unit = "number", *, judge: bool = True) -> Row:
    text = ", ".join(f"{shown(before[key], unit)} → {shown(after[key], unit)}" for key in keys)
    grown = sum(max(after[key] - before[key], 0) for key in keys)
    return Row(
        name,
        {},
        unit,
        goal=GOALS["long_run"] if judge else None,
        judged=grown if judge else None,
        texts={Ours.name: text},
        extra={"before": {key: before[key] for key in keys}, "after": {key: after[key] for key in keys}},
    )


# In the process that calls.


class _Caller:
    """A client that calls, and counts what it and its server hold."""

    def __init__(self, socket: str, server: int, device: str) -> None:
        self._client = Ours(socket)
        self._server = server
        self._device = device

    def call(self, count: int) -> None:
        """Make so many calls, with a new argument for each."""
        import torch

        from benchmarks.workload import SMALL

        for _ in range(count):
            self._client.call("plus_one", torch.ones(SMALL, device=self._device))

    def lowest(self, wanted: Counts | None = None) -> Counts:
        """Return the lowest of several readings.

        :param wanted: read on, for a while, until nothing is above it.
        """
        end = time.monotonic() + _SETTLED
        lowest = self._read()
        for _ in range(_READINGS):
            lowest = _least(lowest, self._read())
        while wanted is not None and any(lowest[key] > wanted[key] for key in wanted) and time.monotonic() < end:
            lowest = _least(lowest, self._read())
        return lowest

    def _read(self) -> Counts:
        self.call(1)
        gc.collect()
        pids = {"client": os.getpid(), "server": self._server}
        counts = {who: process_counts(pid) for who, pid in pids.items()}
        memory = used(self._device) if self._device == "cuda" else sum(each["shared"] for each in counts.values())
        return {
            "memory": memory,
            **{f"{who} {key}": each[key] for who, each in counts.items() for key in ("fds", "mappings")},
            **{f"{who} private": private_bytes(pid) for who, pid in pids.items()},
        }


def _least(one: Counts, other: Counts) -> Counts:
    return {key: min(value, other[key]) for key, value in one.items()}


def main() -> None:
    """Configuration: ``socket``, ``server`` (its pid), ``device``, ``calls``. Waits for a line before it begins."""
    config: dict[str, Any] = configuration()
    caller = _Caller(config["socket"], config["server"], config["device"])
    caller.call(1)
    say(ready=True)
    if next_command() is None:
        return
    caller.call(_FIRST)
    gc.collect()
    gc.freeze()  # what is imported stays: the readings need not look at it again
    before = caller.lowest()
    begin = time.perf_counter()
    caller.call(config["calls"])
    seconds = time.perf_counter() - begin
    say(seconds=seconds, before=before, after=caller.lowest(before))


if __name__ == "__main__":
    main()
