"""Named tensors through a channel to another process, compared with two copies of as many bytes in one process."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from benchmarks.processes import Process, process_counts
from benchmarks.runner import OURS, PATIENCE, Device, Json, Run, Sample, Times, chosen, timed
from shared_rpc import Client, TensorChannel

COPIES = "two copies"
#: Bytes of one of the large tensors, and elements of the small one.
_LARGE, _SMALL = 64 << 20, 1024


def run(
    device: Device = "auto",
    megabytes: Annotated[int, typer.Option(help="MiB of a message; by default 16,384 on a GPU and 1,024 on the host.")] = 0,
    slot: Annotated[int, typer.Option(help="MiB of a slot; by default 1,024 on a GPU and 256 on the host.")] = 0,
    slots: Annotated[int, typer.Option(help="Slots of the channel.")] = 3,
    rounds: Annotated[int, typer.Option(help="Large messages, each measured in turn with two copies.")] = 7,
    syncs: Annotated[int, typer.Option(help="Small messages, each acknowledged before the next one.")] = 10_000,
    json: Json = None,
) -> None:
    """Measure a channel: a large message compared with two copies, small messages, and the resources that they leave."""
    device, _ = chosen(device)
    megabytes = megabytes or (16 << 10 if device == "cuda" else 1 << 10)
    slot = slot or (1 << 10 if device == "cuda" else 256)
    title = f"{megabytes} MiB of bf16 through {slots} slots of {slot} MiB on {device}"
    tensors = {name: tensor.fill_(1) for name, tensor in _empty(megabytes, device).items()}
    with Run("channel", title, [COPIES, OURS], device, json, base=COPIES) as run, run.broker() as client:
        reader = run.process(Reader, cores=run.server_cores)
        reader.tell("receive", address=client.socket_path, device=device, megabytes=megabytes)
        with client.create_channel("weights", slot << 20, slots, device=device) as channel:
            _measure_large(run, channel, tensors, rounds)
            _measure_small(run, channel, reader, syncs)
        reader.read()
        run.note("a message is complete when its reader has copied it to tensors of its own and acknowledged it")


def _empty(megabytes: int, device: str) -> dict[str, torch.Tensor]:
    nbytes = min(_LARGE, megabytes << 20)
    return {
        f"layers.{number}.weight": torch.empty(nbytes // 2, dtype=torch.bfloat16, device=device)
        for number in range((megabytes << 20) // nbytes)
    }


def _measure_large(run: Run, channel: TensorChannel, tensors: dict[str, torch.Tensor], rounds: int) -> None:
    # The intermediate copy has as many bytes as the channel.
    in_between = channel.nbytes * channel.slots // next(iter(tensors.values())).nbytes
    middle = [torch.empty_like(tensor) for tensor in list(tensors.values())[: max(in_between, 1)]]
    ends = [torch.empty_like(tensor) for tensor in tensors.values()]
    name = "large: all of it, to the reader's tensors"
    times = Times()
    for number in range(rounds + 2):
        if number == 2:  # the first rounds touch the pages
            times.clear()
        with times.of(name):
            channel.send(tensors, timeout=PATIENCE)
            channel.flush(timeout=PATIENCE)
        with times.of(name, COPIES):
            for place, (tensor, end) in enumerate(zip(tensors.values(), ends, strict=True)):
                end.copy_(middle[place % len(middle)].copy_(tensor))
            if run.device == "cuda":
                torch.cuda.synchronize()
    channel.send({}, "small")
    run.row(name, times.samples(name), goal=1.3, of=COPIES)


def _measure_small(run: Run, channel: TensorChannel, reader: Process, syncs: int) -> None:
    tensors = {"x": torch.ones(_SMALL, dtype=torch.bfloat16, device=run.device)}

    def sync() -> None:
        channel.send(tensors, timeout=PATIENCE)
        channel.flush(timeout=PATIENCE)

    for _ in range(max(syncs // 10, 1)):
        sync()
    before = process_counts(reader.pid)
    times = Sample(timed(sync) for _ in range(syncs))
    grown = {key: count - before[key] for key, count in process_counts(reader.pid).items()}
    run.row("small: a message of 2 KiB, acknowledged", times, goal=200e-6)
    run.row("… growth of the reader's descriptors and mappings", grown["fds"] + grown["mappings"], "number", 0)
    run.row("… growth of its memory", grown["memory"], "bytes")


class Reader:
    """The reading process."""

    def receive(self, address: str, device: str, megabytes: int) -> None:
        """Copy large messages to tensors of this process, then small ones, until the channel is closed."""
        targets = _empty(megabytes, device)
        small = {"x": torch.zeros(_SMALL, dtype=torch.bfloat16, device=device)}
        with Client(socket_path=address) as client, client.open_channel("weights", timeout=PATIENCE) as channel:
            for message in channel:
                if message.meta == "small":
                    targets = small
                message.copy_to(targets)
