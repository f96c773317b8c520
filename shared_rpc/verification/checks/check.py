"""What a check is, and what it works with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from shared_rpc.verification.clients import RemoteClient
from shared_rpc.verification.gauges import Gauge
from shared_rpc.verification.stage import Stage
from shared_rpc.verification.verdict import Verdict

__all__ = ["SEED", "SMALL", "Bench", "Check", "all_of"]

#: Bytes of a model for what is about processes, and not about bytes: to read a large one would take most of the time.
SMALL = 16 << 20
#: Of the model that most checks share, so that it is built once.
SEED = 1


@dataclass(frozen=True)
class Check:
    """``name`` is for programs and the command line, ``title`` for people."""

    name: str
    title: str
    run: Callable[[Bench, Verdict], None]


@dataclass
class Bench:
    """What all checks work with.

    :param device: as torch names it in the client processes.
    :param protects: whether read-only memory is enforced, by the mechanism that the server shares with.
    :param nbytes: of the model.
    :param together: how many of many client processes run at the same time.
    """

    stage: Stage
    gauge: Gauge
    device: str
    protects: bool
    workers: int
    nbytes: int
    lifetimes: int
    cycles: int
    together: int
    _seeds: Iterator[int] = field(default_factory=lambda: itertools.count(SEED + 1))

    def new_seed(self) -> int:
        """Of a model that nobody has asked for."""
        return next(self._seeds)

    def drop(self, seed: int, endpoint: str = "model") -> None:
        """Have the server list a model no more: who holds it keeps it."""
        self.stage.client().invalidate_call_cache(endpoint, self.nbytes, seed)

    @contextmanager
    def attached(self, count: int, *, seed: int = SEED, nbytes: int | None = None) -> Iterator[list[RemoteClient]]:
        """Client processes that have attached to the model, or to one of that size, at the same time."""
        with self.stage.clients(count) as clients:
            all_of(clients, "attach", nbytes=nbytes or self.nbytes, seed=seed)
            yield clients


def all_of(clients: list[RemoteClient], do: str, **options: Any) -> list[dict[str, Any]]:
    """Every client's answer to one command, which they carry out at the same time."""
    for client in clients:
        client.tell(do, **options)
    return [client.answer() for client in clients]
