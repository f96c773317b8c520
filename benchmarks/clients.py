"""Calls a second, against the number of client processes: where a server has enough of them."""

from __future__ import annotations

from pathlib import Path

from benchmarks.ours import Ours
from benchmarks.peer import Peer, missing
from benchmarks.report import Report
from benchmarks.servers import Servers
from benchmarks.throughput import throughput

__all__ = ["run"]


def run(*, device: str, clients: list[int], rounds: int, path: Path | None) -> None:
    """Measure, print, write.

    :param device: ``"auto"``, ``"cpu"`` or ``"cuda"``; shared-tensor takes part where it can serve tensors, on a GPU.
    """
    import torch

    chosen = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    absent = missing(tensors=chosen)
    report = Report("clients", f"Calls a second, tensors on {chosen}", [*([Peer.name] if absent is None else []), Ours.name])
    report.note(absent)
    with Servers(chosen) as servers:
        addresses = {Peer.name: servers.peer().address} if absent is None else {}
        addresses[Ours.name] = servers.ours().address
        for count in clients:
            throughput(report, servers, addresses, chosen, count, rounds, judge=False)
    report.finish(path)
