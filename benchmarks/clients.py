"""Calls a second, against the number of client processes: where a server has enough of them."""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks.options import Device, Json, chosen, numbers
from benchmarks.ours import Ours
from benchmarks.peer import Peer, missing
from benchmarks.report import Report
from benchmarks.servers import Servers
from benchmarks.throughput import throughput

__all__ = ["run"]


def run(
    device: Device = "auto",
    clients: Annotated[str, typer.Option(help="Client processes, ascending.")] = "1,2,4,8,16",
    rounds: Annotated[int, typer.Option(help="Turns that each side has, of half a second.")] = 5,
    json: Json = None,
) -> None:
    """Measure calls a second, against the number of client processes."""
    device = chosen(device)
    absent = missing(tensors=device)
    report = Report("clients", f"Calls a second, tensors on {device}", [*([Peer.name] if absent is None else []), Ours.name])
    report.note(absent)
    with Servers(device) as servers:
        addresses = {Peer.name: servers.peer().address} if absent is None else {}
        addresses[Ours.name] = servers.ours().address
        for count in numbers(clients):
            throughput(report, servers, addresses, device, count, rounds, judge=False)
    report.finish(json)
