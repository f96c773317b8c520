"""Named tensors through a channel to another process, beside two copies of as many bytes in one process."""

from __future__ import annotations

import time
from typing import Annotated

import torch
import typer

from benchmarks.memory import process_counts
from benchmarks.runner import OURS, Device, Json, Report, Sample, chosen
from benchmarks.servers import Process, Servers
from shared_rpc import Client, TensorChannel

#: Seconds that anything here may take.
_PATIENCE = 300.0
#: A server without endpoints.
APP = "from shared_rpc import Provider\n\nprovider = Provider(device={device!r})\n"

COPIES = "two copies"
#: Bytes of one of the large tensors, and elements of the small one.
_LARGE, _SMALL = 64 << 20, 1024


def run(
    device: Device = "auto",
    megabytes: Annotated[int, typer.Option(help="MiB of a message; by default 16,384 on a GPU and 1,024 on the host.")] = 0,
    slot: Annotated[int, typer.Option(help="MiB of a slot; by default 1,024 on a GPU and 256 on the host.")] = 0,
    slots: Annotated[int, typer.Option(help="Slots of the channel.")] = 2,
    rounds: Annotated[int, typer.Option(help="Messages, each beside two copies.")] = 7,
    syncs: Annotated[int, typer.Option(help="Small messages, each of which is acknowledged before the next one.")] = 10_000,
    json: Json = None,
) -> None:
    """Measure a channel: many bytes against two copies of them, a small message, and what ten thousand of these leave."""
    device, _ = chosen(device)
    megabytes = megabytes or (16 << 10 if device == "cuda" else 1 << 10)
    slot = slot or (1 << 10 if device == "cuda" else 256)
    report = Report("channel", f"{megabytes} MiB of bf16 through {slots} slots of {slot} MiB on {device}", [OURS, COPIES])
    tensors = {name: tensor.fill_(1) for name, tensor in _empty(megabytes, device).items()}
    with (
        Servers(device) as servers,
        servers.broker(APP.format(device=device)) as (socket, _),
        Client(socket_path=socket, timeout=_PATIENCE) as client,
    ):
        reader = servers.client("channel:Reader", servers.server_cores)
        reader.tell("receive", socket=socket, device=device, megabytes=megabytes)
        with client.create_channel("weights", slot << 20, slots, device=device) as channel:
            _measure_large(report, channel, tensors, device, rounds)
            _measure_small(report, channel, reader, device, syncs)
        reader.read()
    report.note("a message is over when its reader has copied all of it to tensors of its own, and has acknowledged it")
    report.finish(json)


def _empty(megabytes: int, device: str) -> dict[str, torch.Tensor]:
    nbytes = min(_LARGE, megabytes << 20)
    return {
        f"layers.{number}.weight": torch.empty(nbytes // 2, dtype=torch.bfloat16, device=device)
        for number in range((megabytes << 20) // nbytes)
    }


def _settled(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _measure_large(report: Report, channel: TensorChannel, tensors: dict[str, torch.Tensor], device: str, rounds: int) -> None:
    # As many bytes in between as the channel has.
    in_between = channel.nbytes * channel.slots // next(iter(tensors.values())).nbytes
    middle = [torch.empty_like(tensor) for tensor in list(tensors.values())[: max(in_between, 1)]]
    ends = [torch.empty_like(tensor) for tensor in tensors.values()]
    ours, copies = [], []
    for number in range(rounds + 2):  # the first ones touch the pages
        _settled(device)
        begin = time.perf_counter()
        channel.send(tensors, timeout=_PATIENCE)
        channel.flush(timeout=_PATIENCE)
        sent = time.perf_counter()
        for place, (tensor, end) in enumerate(zip(tensors.values(), ends, strict=True)):
            end.copy_(middle[place % len(middle)].copy_(tensor))
        _settled(device)
        if number > 1:
            ours.append(sent - begin)
            copies.append(time.perf_counter() - sent)
    channel.send({}, "small")
    found = {OURS: Sample([ours]), COPIES: Sample([copies])}
    ratio = found[OURS].p50 / found[COPIES].p50
    report.row("large: all of it, to the reader's tensors", found, goal="channel", judged=ratio)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    report.row("… in GB/s", {name: nbytes / 1e9 / sample.p50 for name, sample in found.items()}, "number")


def _measure_small(report: Report, channel: TensorChannel, reader: Process, device: str, syncs: int) -> None:
    tensors = {"x": torch.ones(_SMALL, dtype=torch.bfloat16, device=device)}
    times: list[float] = []
    counts: list[dict[str, int]] = []
    for number in range(syncs + 1):
        begin = time.perf_counter()
        channel.send(tensors, number, timeout=_PATIENCE)
        channel.flush(timeout=_PATIENCE)
        times.append(time.perf_counter() - begin)
        if number in (syncs // 10, syncs):
            counts.append(process_counts(reader.pid))
    taken = Sample([times[syncs // 10 :]])
    report.row("small: a message of 2 KiB, acknowledged", {OURS: taken}, goal="bucket", judged=taken.p50)
    before, after = counts
    left = after["fds"] - before["fds"] + after["mappings"] - before["mappings"]
    report.row(
        "… the reader's descriptors and mappings, more than after a tenth", {OURS: left}, "number", goal="syncs", judged=left
    )
    report.row("… its memory, more than then", {OURS: after["memory"] - before["memory"]}, "bytes")


class Reader:
    """The reading process."""

    def receive(self, socket: str, device: str, megabytes: int) -> None:
        """Receive large messages to tensors of its own, then small ones, until the channel is closed."""
        targets = _empty(megabytes, device)
        small = {"x": torch.zeros(_SMALL, dtype=torch.bfloat16, device=device)}
        with Client(socket_path=socket) as client, client.open_channel("weights", timeout=_PATIENCE) as channel:
            for message in channel:
                if message.meta == "small":
                    targets = small
                message.copy_to(targets)
