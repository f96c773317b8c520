"""Tensor parallelism: a server for each rank has that rank's part of a model, and nobody has a second copy.

    python examples/tensor_parallel/run.py [--ranks 2]

1. One client attaches to the servers of all ranks and computes with all parts, or puts them together.
2. One process for each rank attaches to its own server and computes with the others through ``torch.distributed``.

Both must give the logits of the unsharded model. With a GPU for each rank, the parts are on them and the ranks talk through
NCCL. With fewer GPUs the ranks share them, and without any all is on the host; then they talk through gloo.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from model import CONFIG, RULES, Transformer, device_of
from one_client import forward
from rich.console import Console

from shared_rpc import Client, Handle
from shared_rpc.errors import ConfigurationError
from shared_rpc.extras.sharding import gather_state_dict, shard_state_dict

HERE = Path(__file__).parent
#: Float32 sums in another order.
TOLERANCE = 1e-5

console = Console(width=110)
failures: list[str] = []


def check(what: str, good: bool) -> None:
    """Print one checked fact."""
    console.print(f"  [{'green' if good else 'red'}]{'ok  ' if good else 'FAIL'}[/] {what}", highlight=False)
    if not good:
        failures.append(what)


def agree(what: str, worst: float) -> None:
    """Check how far logits are from the unsharded model's."""
    check(f"{what}: at most {worst:.1e} from the unsharded model's logits", worst <= TOLERANCE)


class Process:
    """A Python process of this example; it is ended with the example, whatever happens."""

    def __init__(self, stack: ExitStack, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *words],
            cwd=HERE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            process_group=0,  # Ctrl-C is this program's, which ends the others
        )
        stack.callback(self.end)

    def read(self) -> str:
        """Its next line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(map(str, self.process.args))} ended with code {self.process.wait()}")
        return line.strip()

    def tell(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)

    def hang_up(self) -> None:
        """Close its standard input, which ends a rank."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def end(self) -> None:
        """SIGTERM, if it still runs."""
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(timeout=30)


def base_path(directory: Path, rank: int) -> str:
    """Where a rank's server listens. With a GPU each one base path would do: the device is a part of the socket's name."""
    return str(directory / f"rank{rank}")


def play(directory: Path, world: int) -> None:
    torch.manual_seed(0)
    whole = Transformer().requires_grad_(False).eval()
    checkpoint = directory / "model.pt"
    torch.save(whole.state_dict(), checkpoint)
    tokens = torch.randint(CONFIG.vocabulary, (2, 48))
    torch.save(tokens, directory / "tokens.pt")
    home = device_of(0)
    expected = whole.to(home)(tokens.to(home)).cpu()
    try:
        needs = sum(tensor.nbytes for tensor in shard_state_dict(whole.state_dict(), RULES, 0, world).values())
    except ConfigurationError as error:
        raise SystemExit(f"--ranks {world}: {error}") from None

    with ExitStack() as stack:
        console.rule(f"{world} servers, one for each rank")
        servers = []
        for rank in range(world):
            options = ("--base-path", base_path(directory, rank), "--device", device_of(rank))
            servers.append(Process(stack, "-m", "shared_rpc.cli", "serve", "shards.py", *options))
        for server in servers:
            console.print(f"  {server.read()}", highlight=False, soft_wrap=True)
        clients, handles = [], []
        for rank in range(world):
            clients.append(stack.enter_context(Client(base_path(directory, rank), device=device_of(rank), timeout=60)))
            handles.append(stack.enter_context(clients[rank].call("load_shard", str(checkpoint), rank, world)))
        has = sum(tensor.nbytes for tensor in whole.parameters())
        parts = [handle.get_object_info()["nbytes"] for handle in handles]
        check(
            f"the model has {has >> 10} KiB, and each server {max(parts) >> 10} KiB: a part, and what every rank needs",
            set(parts) == {needs},
        )

        console.rule("one client, all servers")
        with_one_client(handles, tokens, expected)
        console.rule("one client for each rank")
        ranks = [start_rank(stack, directory, rank, world) for rank in range(world)]
        with_one_client_each(directory, ranks, clients, handles, expected)


def with_one_client(handles: list[Handle[Transformer]], tokens: torch.Tensor, expected: torch.Tensor) -> None:
    """Compute with all parts where they are; and put them together."""
    ranks = [handle.value for handle in handles]
    agree("computing with all parts", (forward(ranks, tokens).cpu() - expected).abs().max().item())
    with torch.device("meta"):
        gathered = Transformer()
    home = device_of(0)
    gathered.load_state_dict(gather_state_dict([rank.state_dict() for rank in ranks], RULES, home), assign=True)
    agree("the parts, put together", (gathered(tokens.to(home)).cpu() - expected).abs().max().item())


def start_rank(stack: ExitStack, directory: Path, rank: int, world: int) -> Process:
    """One of the processes that compute together."""
    options = {
        "base-path": base_path(directory, rank),
        "checkpoint": directory / "model.pt",
        "store": directory / "store",
        "rank": rank,
        "world": world,
    }
    return Process(stack, "rank.py", *(f"--{name}={value}" for name, value in options.items()))


def with_one_client_each(
    directory: Path, ranks: list[Process], clients: list[Client], handles: list[Handle[Transformer]], expected: torch.Tensor
) -> None:
    """Have the ranks compute; write to what they compute with, and have them compute again."""
    for number, rank in enumerate(ranks):
        console.print(f"  rank {number}: {rank.read()}", highlight=False)
    holders = [{holder["pid"] for holder in client.list_objects()[0]["holders"]} for client in clients]
    check(
        "each server's part is held by its rank and by this process, and there is one of it",
        holders == [{os.getpid(), rank.process.pid} for rank in ranks],
    )
    worst = max((logits - expected).abs().max().item() for logits in computed(directory, ranks))
    agree("the ranks together", worst)
    for handle in handles:
        handle.value.norm.weight.mul_(2)
    synchronize()
    worst = max((logits / 2 - expected).abs().max().item() for logits in computed(directory, ranks))
    agree("this process doubled the last norm in place, and the ranks saw it", worst)
    for rank in ranks:  # all of them before one is waited for: NCCL ends a group only where every rank does
        rank.hang_up()
    check("the ranks ended well", [rank.process.wait(timeout=60) for rank in ranks] == [0] * len(ranks))


def computed(directory: Path, ranks: list[Process]) -> list[torch.Tensor]:
    """The logits that every rank computes of the tokens."""
    targets = [directory / f"logits{number}.pt" for number in range(len(ranks))]
    for rank, target in zip(ranks, targets, strict=True):
        rank.tell(f"{directory / 'tokens.pt'} {target}")
    for rank in ranks:
        rank.read()
    return [torch.load(target, weights_only=True) for target in targets]


def synchronize() -> None:
    """Wait until what was written to GPUs is there."""
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="servers, and processes that compute together")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends as Ctrl-C does: with all of its processes
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        try:
            play(Path(scratch), parser.parse_args().ranks)
        except KeyboardInterrupt:
            raise SystemExit(130) from None
    if failures:
        raise SystemExit(f"{len(failures)} checks failed: {'; '.join(failures)}")
    console.print(f"\n[green]all checks passed[/] in {time.perf_counter() - begin:.1f} s")
