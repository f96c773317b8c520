"""Goals: one table of them all."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GOALS", "Goal"]


@dataclass(frozen=True)
class Goal:
    """An upper limit, or a lower one.

    ``text`` is what people read; ``limit`` is in the unit of what is judged: seconds, bytes, a ratio, a number.
    """

    text: str
    limit: float
    #: Whether the limit itself is too much.
    below: bool = False
    #: Whether the limit is the least that is good enough.
    least: bool = False

    def met(self, measured: float) -> bool:
        """Return whether a measurement meets the goal."""
        if self.least:
            return measured >= self.limit
        return measured < self.limit if self.below else measured <= self.limit


_MIB = 1 << 20

GOALS = {
    "attach_first": Goal("≤ 8 ms (16 GB, GPU)", 8e-3),
    "attach_again": Goal("≤ 4 ms (16 GB, GPU)", 4e-3),
    # "Flat" as a number: the machine's own noise is allowed for.
    "attach_bytes": Goal("flat: ≤ 1.25 x", 1.25),
    "attach_tensor": Goal("≤ 25 µs a tensor", 25e-6),
    "publish_peak": Goal("≤ 3 GiB + largest tensor", 3 << 30),
    "client_memory": Goal("< 4 MiB (GPU)", 4 * _MIB, below=True),
    "ping": Goal("≤ 2 x raw echo", 2.0),
    "small_tensor": Goal("≤ 120 µs (GPU)", 120e-6),
    "large_argument": Goal("≤ 0.5 ms (64 MiB, GPU)", 0.5e-3),
    "task": Goal("≤ 6 x raw echo", 6.0),
    "concurrent": Goal("≤ 1/3 of one by one", 1 / 3),
    "throughput": Goal("≥ 4 x shared-tensor (GPU)", 4.0, least=True),
    "long_run": Goal("as after the first 100", 0),
    "tasks_memory": Goal("10,000 of them < 30 MiB", 30 * _MIB, below=True),
    "import": Goal("≤ 60 ms", 60e-3),
    "ls": Goal("≤ 0.2 s", 0.2),
    "idle": Goal("≤ 1.5 x of none", 1.5),
    "one_copy": Goal("one copy: < 5 % of it each", 0.05, below=True),
    "attach_gap": Goal("none", 0),
    "attach_p99": Goal("≤ 2 x before", 2.0),
    "worker": Goal("≤ own imports + 0.4 s", 0.4),
    # Beyond the start of an interpreter that does nothing.
    "start": Goal("≤ python + 0.3 s (host)", 0.3),
    "start_gpu": Goal("≤ python + 0.8 s (GPU)", 0.8),
    "cluster_move": Goal("≤ 2 x Ray's", 2.0),
    "sleep": Goal("≤ 20 ms (16 GB, GPU)", 20e-3),
    "wake": Goal("≤ 1.15 x a plain copy (GPU)", 1.15),
    "wake_forward": Goal("as before", 0),
    # "Flat" as a share of one copy: what each engine adds.
    "engines": Goal("flat: < 5 % of a copy each", 0.05, below=True),
    "broker": Goal("≤ 40 MiB", 40 * _MIB),
    "broker_gpu": Goal("none: no GPU memory", 0),
    "killed": Goal("as before", 0),
    # Python's allocator keeps some of what the connections needed, for the next ones.
    "given_back": Goal("all given back", 0),
    "killed_memory": Goal("as before, ± 1 MiB", _MIB),
}
