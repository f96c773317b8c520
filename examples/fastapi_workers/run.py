"""One embedding model behind several web workers, under load, and one of them killed.

    python examples/fastapi_workers/run.py [--workers 2] [--concurrency 8]

Starts a server, uvicorn with workers that attach to it, and uvicorn with workers that load the model themselves. Then:
load on the first, load while one of its workers is killed with SIGKILL, and what a worker of either kind costs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from load import TEXTS, Report, load
from rich.console import Console
from rich.table import Table

from shared_rpc import Client

HERE = Path(__file__).parent
#: Seconds a process has to load torch and the model's code, on a busy machine.
PATIENCE = 180

console = Console(width=110)
failures: list[str] = []


def check(what: str, good: bool) -> None:
    """Print one checked fact."""
    console.print(f"  [{'green' if good else 'red'}]{'ok  ' if good else 'FAIL'}[/] {what}", highlight=False)
    if not good:
        failures.append(what)


class Process:
    """A process of this example, with its output in a file; it is ended with the example, whatever happens."""

    def __init__(self, stack: ExitStack, directory: Path, name: str, role: str | None, *words: str) -> None:
        environ = {
            **os.environ,
            "SHARED_TENSOR_BASE_PATH": str(directory / "s"),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        for variable in ("SHARED_TENSOR_ENABLED", "SHARED_TENSOR_ROLE"):
            environ.pop(variable, None)
        if role is not None:
            environ["SHARED_TENSOR_ROLE"] = role
        self.name, self.log = name, directory / f"{name}.log"
        self.began = time.monotonic()
        with self.log.open("w") as log:
            # Not in the terminal's process group: Ctrl-C is this program's, which ends the others in order.
            self.process = subprocess.Popen(
                [sys.executable, *words], cwd=HERE, env=environ, stdout=log, stderr=log, process_group=0
            )
        stack.callback(self.end)

    def wait_for(self, text: str, times: int = 1) -> float:
        """Wait until it has written that so often; the seconds since its start."""
        self.wait_until(lambda: len(re.findall(text, self.log.read_text())) >= times, text)
        return time.monotonic() - self.began

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait while it runs."""
        until = time.monotonic() + PATIENCE
        while not condition():
            if self.process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{self.name}: {what!r} did not come. It wrote:\n{self.log.read_text()}")
            time.sleep(0.02)

    def end(self) -> None:
        """SIGTERM, and wait; what does not end of it is killed, with its workers."""
        self.process.terminate()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            pass  # uvicorn does not end of it, if its workers were still starting
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


class Service(Process):
    """uvicorn with workers, in the ordinary way."""

    def __init__(self, stack: ExitStack, directory: Path, role: str | None, workers: int) -> None:
        # Port 0: the kernel chooses one that is free, and uvicorn says which.
        words = ["-m", "uvicorn", "app:app", "--workers", str(workers), "--port", "0", "--no-access-log"]
        # uvicorn kills a worker that does not answer it for so long, as when it imports torch on a busy machine. One that dies
        # instead of answering is noticed only then.
        words += ["--timeout-worker-healthcheck", "20"]
        super().__init__(stack, directory, role or "unshared", role, *words)
        self.count = workers
        self.ready = 0.0

    def wait_ready(self) -> None:
        """Wait until all workers serve."""
        self.ready = self.wait_for("Application startup complete", self.count)

    @property
    def url(self) -> str:
        """Where it listens."""
        found = re.search(r"running on (http://\S+)", self.log.read_text())
        assert found is not None
        return found[1]

    def ask_all(self) -> dict[int, dict[str, Any]]:
        """What each worker says of itself. A new connection for each request, so that every worker gets one of them."""
        found: dict[int, dict[str, Any]] = {}

        def ask() -> bool:
            facts = httpx.get(f"{self.url}/worker", timeout=30).json()
            found[facts["pid"]] = facts
            return len(found) == self.count

        self.wait_until(ask, "an answer of every worker")
        return found

    def numbers(self) -> list[float]:
        """Embeddings by some worker, all in one list."""
        answer = httpx.post(f"{self.url}/embed", json={"texts": TEXTS}, timeout=30).raise_for_status()
        return [number for vector in answer.json() for number in vector]


def memory(pid: int) -> tuple[int, int]:
    """``(private, proportional)`` bytes of a process, from smaps_rollup."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    sizes = {key: int(kib) * 1024 for key, kib in re.findall(r"^(\w+):\s+(\d+) kB", rollup, re.MULTILINE)}
    return sizes["Private_Clean"] + sizes["Private_Dirty"], sizes["Pss"]


async def kill_under_load(url: str, concurrency: int, seconds: float) -> tuple[Report, int]:
    """Kill the worker to which most users are connected, and let them go on for so long: what they saw, and which it was."""
    report = Report()
    asking = asyncio.create_task(load(url, concurrency, PATIENCE, report))
    while None in (workers := list(report.connected.values())) or len(workers) < concurrency:
        await asyncio.sleep(0.02)
        if asking.done():
            raise SystemExit(f"not all {concurrency} users had an answer within {PATIENCE} s")
    victim = Counter(workers).most_common(1)[0][0]
    assert victim is not None, "every user had an answer"
    os.kill(victim, signal.SIGKILL)
    report.until = time.perf_counter() + seconds
    return await asking, victim


def play(directory: Path, workers: int, concurrency: int, seconds: float) -> None:
    with ExitStack() as stack:
        console.rule(f"one model, {workers} workers of uvicorn")
        server = Process(stack, directory, "server", None, "-m", "shared_rpc.cli", "serve", "model.py")
        shared = Service(stack, directory, "client", workers)
        server.wait_for("serving load_model")
        shared.wait_ready()
        pids = set(shared.ask_all())
        client = stack.enter_context(Client(directory / "s", timeout=30))
        check(f"{len(holders(client))} workers hold one object of {model_bytes(client) >> 20} MiB", holders(client) == pids)

        console.rule("load, and kill -9")
        calm = asyncio.run(load(f"{shared.url}/embed", concurrency, seconds))
        stormy, victim = asyncio.run(kill_under_load(f"{shared.url}/embed", concurrency, seconds))
        console.print(load_table({"calm": calm, "one worker killed": stormy}, victim))
        check("without a kill no attempt broke", not calm.broken and not calm.lost and not calm.refused)
        check(
            f"worker {victim} was killed: {stormy.broken[victim]} requests were in it, at most one for each of its users",
            victim in pids and 0 < stormy.broken[victim] <= concurrency,
        )
        check("no attempt at another worker broke", set(stormy.broken) == {victim} and not stormy.refused)
        check(
            f"all {stormy.retried} were answered by another worker, and none of {len(stormy.latencies)} requests was lost",
            stormy.lost == 0 and stormy.retried == stormy.broken[victim],
        )

        # Meanwhile the killed worker's successor loads what it needs.
        unshared = Service(stack, directory, None, workers)
        shared.wait_until(lambda: len(holders(client) - {victim}) == workers, "a new worker")
        attached = shared.ask_all()
        (successor,) = set(attached) - pids
        check(
            f"uvicorn started worker {successor} in its place, and it holds the same object",
            holders(client) == set(attached) and victim not in attached and client.list_objects()[0]["generation"] == 1,
        )

        console.rule("what a worker costs")
        unshared.wait_ready()
        own = unshared.ask_all()
        worst = max(abs(one - other) for one, other in zip(shared.numbers(), unshared.numbers(), strict=True))
        check(f"shared and unshared workers compute the same vectors: they differ by {worst:.0e}", worst < 1e-3)
        asyncio.run(load(f"{unshared.url}/embed", concurrency, seconds / 2))  # so that all of them have read all their weights
        asyncio.run(load(f"{shared.url}/embed", concurrency, seconds / 2))
        console.print(cost_table({"shared": attached, "unshared": own}))
        compare_costs(attached, own, model_bytes(client))


def holders(client: Client) -> set[int]:
    """The processes that hold the model."""
    return {holder["pid"] for found in client.list_objects() for holder in found["holders"]}


def model_bytes(client: Client) -> int:
    """What the model has in memory."""
    return int(client.list_objects()[0]["nbytes"])


def load_table(reports: dict[str, Report], victim: int) -> Table:
    """What users saw."""
    columns = ("load", "answers", "a second", "p50", "p90", "p99", "broke in it", "elsewhere", "sent again", "lost", "workers")
    table = Table(*columns, box=None, header_style="bold")
    for name, report in reports.items():
        latencies = [f"{report.percentile(percent):.0f} ms" for percent in (50, 90, 99)]
        inside = report.broken[victim]
        numbers = (inside, report.broken.total() - inside, report.retried, report.lost, len(report.answers))
        table.add_row(name, str(len(report.latencies)), f"{report.rate:.0f}", *latencies, *map(str, numbers))
    return table


def cost_table(kinds: dict[str, dict[int, dict[str, Any]]]) -> Table:
    """The memory of each worker, while all of them run: what they share of torch's code they share alike."""
    table = Table("worker", "pid", "private", "proportional (PSS)", "its own on the GPU", box=None, header_style="bold")
    for kind, workers in kinds.items():
        for pid, facts in workers.items():
            sizes = (*memory(pid), facts["allocated"])
            table.add_row(kind, str(pid), *(f"{size >> 20} MiB" for size in sizes))
    return table


def compare_costs(shared: dict[int, dict[str, Any]], unshared: dict[int, dict[str, Any]], model: int) -> None:
    """An unshared worker has a model more, on the device that the model is on.

    Compared are the smallest workers of each kind: a worker that has answered more has more buffers of its own.
    """
    if next(iter(shared.values()))["device"] == "cpu":
        less = [min(memory(pid)[kind] for pid in unshared) - min(memory(pid)[kind] for pid in shared) for kind in (0, 1)]
        what = f"{less[0] >> 20} MiB less private memory, and {less[1] >> 20} MiB less proportional"
        good = less[0] > model / 2 and less[1] > 0
    else:
        own = min(facts["allocated"] for facts in unshared.values()) - max(facts["allocated"] for facts in shared.values())
        what, good = f"{own >> 20} MiB less GPU memory of its own", own > model / 2
    check(f"a worker that attaches has {what}; the model has {model >> 20} MiB", good)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="processes of either uvicorn")
    parser.add_argument("--concurrency", type=int, default=8, help="users that ask all the time")
    parser.add_argument("--seconds", type=float, default=1.5, help="how long the first load lasts")
    options = parser.parse_args()
    if options.workers < 2:
        parser.error("--workers: at least 2, so that one is left when one is killed")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends as Ctrl-C does: with all of its processes
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        try:
            play(Path(scratch), options.workers, options.concurrency, options.seconds)
        except KeyboardInterrupt:
            raise SystemExit(130) from None
    if failures:
        raise SystemExit(f"{len(failures)} checks failed: {'; '.join(failures)}")
    console.print(f"\n[green]all checks passed[/] in {time.perf_counter() - begin:.1f} s")
