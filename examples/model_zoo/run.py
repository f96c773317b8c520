"""Ten models and memory for three: requests for random ones, from several processes, all answered.

    python examples/model_zoo/run.py                                    # about 20 s, on the host
    python examples/model_zoo/run.py --device cuda --megabytes 4096     # ten models of 4 GiB on a GPU, with room for three

It starts a server (zoo.py) whose device may hold three of the models, and workers (worker.py) that each have handles of all ten
and suspend what they do not compute with. The server evicts what nobody has active, and restores what somebody needs. Every
answer must have the bits of a process that has weights of its own and shares nothing, else this exits with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from rich.console import Console
from rich.table import Table

from shared_rpc import Client

HERE = Path(__file__).parent
MIB = 1 << 20

console = Console(width=110, highlight=False)
failures: list[str] = []


def check(what: str, good: bool) -> None:
    """Print one checked fact."""
    console.print(f"  [{'green' if good else 'red'}]{'ok  ' if good else 'FAIL'}[/] {what}")
    if not good:
        failures.append(what)


class Process:
    """A process of this example, which talks in lines; it is ended with the example, whatever happens."""

    def __init__(self, stack: ExitStack, environ: dict[str, str], *words: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *words],
            cwd=HERE,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            process_group=0,  # Ctrl-C is this program's, which ends the others
        )
        stack.callback(self.end)

    def line(self) -> str:
        """Its next line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args} ended with code {self._process.wait()}")
        return line.strip()

    def ask(self, **message: Any) -> dict[str, Any]:
        print(json.dumps(message), file=self._process.stdin, flush=True)
        return json.loads(self.line())

    def end(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)


def drawn(options: argparse.Namespace) -> list[dict[str, int]]:
    """Requests: some models are asked for more often than others, as in life."""
    chance = random.Random(options.seed)
    often = [1 / (rank + 1) for rank in range(options.models)]
    numbers = chance.choices(range(options.models), often, k=options.requests)
    # Each model is asked for at least once.
    for number, place in enumerate(chance.sample(range(options.requests), min(options.models, options.requests))):
        numbers[place] = number
    return [{"request": request, "model": number, "seed": chance.randrange(50)} for request, number in enumerate(numbers)]


class Gauge:
    """The most that the server had on its device, as it is seen several times a second and once at the end."""

    def __init__(self, client: Client) -> None:
        self.most, self.limit = 0, 0
        self._client, self._stopped = client, threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        stopped = False
        while not stopped:
            stopped = self._stopped.wait(0.05)
            device = next(device for device in self._client.list_devices() if device["limit"] is not None)
            self.most, self.limit = max(self.most, device["used"]), device["limit"] or 0

    def __enter__(self) -> Gauge:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()


def answered(workers: list[Process], asked: list[dict[str, int]]) -> dict[int, dict[str, Any]]:
    """Have the workers answer, each one request after the other."""
    waiting: SimpleQueue[dict[str, int]] = SimpleQueue()
    for request in asked:
        waiting.put(request)
    answers: dict[int, dict[str, Any]] = {}

    def work(worker: Process) -> None:
        while True:
            try:
                request = waiting.get_nowait()
            except Empty:
                return
            answers[request["request"]] = worker.ask(**request)

    threads = [threading.Thread(target=work, args=[worker]) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def play(options: argparse.Namespace, stack: ExitStack) -> None:
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    device = "cuda:0" if options.device == "cuda" else "cpu"
    environ = os.environ | {"SHARED_TENSOR_BASE_PATH": str(directory / "s"), "ZOO_DEVICE": device}
    common = ["--megabytes", str(options.megabytes), "--device", device]
    # What a model is rounded up to, a few more bytes: a tenth of one will do.
    room = int((options.room + 0.1) * options.megabytes * MIB)
    budget = ["--quota", f"{device}={room}", "--when-full", "evict", "--spill-dir", str(directory)]
    server = Process(stack, environ, "-m", "shared_rpc.cli", "serve", "zoo.py", *budget)
    workers = [Process(stack, environ, "worker.py", "attached", *common) for _ in range(options.workers)]
    server.line()
    for worker in workers:
        worker.line()

    asked = drawn(options)
    console.rule(f"{options.models} models of {options.megabytes} MiB, room for {options.room}, {options.workers} workers")
    began = time.perf_counter()
    with Client(f"{directory}/s", device=device) as client, Gauge(client) as gauge:
        answers = answered(workers, asked)
        seconds = time.perf_counter() - began
        tiers = [item["tier"] for item in client.list_objects()]
    if len(answers) < len(asked):
        raise SystemExit("a worker has ended; see above")

    console.print(table(asked, answers))
    here = f"{tiers.count('device')} of {len(tiers)} models are on the device"
    console.print(f"  {len(asked)} requests in {seconds:.1f} s; at the end {here}")
    expected = own_weights(stack, environ, common, asked)
    wrong = [request for request, answer in answers.items() if answer["digest"] != expected[request]]
    check(f"all {len(asked)} answers have the bits of a process with weights of its own", not wrong)
    check(f"the server keeps all {options.models} models", len(tiers) == options.models)
    most = f"{gauge.most / MIB:,.0f} of {gauge.limit / MIB:,.0f} MiB"
    check(f"the device was never over its quota: at most {most}", 0 < gauge.most <= gauge.limit)
    if options.models > options.room:
        check("models were evicted, and came back", any(found_cold(answer) for answer in answers.values()))


def found_cold(answer: dict[str, Any]) -> bool:
    """Whether the model had to be brought back."""
    return answer["found"] in ("host", "file")


def table(asked: list[dict[str, int]], answers: dict[int, dict[str, Any]]) -> Table:
    """By model: how often it was on the device, how often it had to be brought back, and how long requests took."""
    by_model: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for request in asked:
        by_model[request["model"]].append(answers[request["request"]])
    shown = Table(box=None, header_style="bold")
    for column in ("model", "requests", "first", "hits", "wakes", "p50 of hits", "p99 of hits", "p50 of wakes", "p99 of wakes"):
        shown.add_column(column, justify="right")
    everything = [answer for found in by_model.values() for answer in found]
    for name, found in [*((str(number), by_model[number]) for number in sorted(by_model)), ("all", everything)]:
        hits = [answer["seconds"] for answer in found if answer["found"] == "device"]
        wakes = [answer["seconds"] for answer in found if found_cold(answer)]
        counts = [len(found), len(found) - len(hits) - len(wakes), len(hits), len(wakes)]
        shown.add_row(name, *map(str, counts), *(quantile(times, share) for times in (hits, wakes) for share in (0.5, 0.99)))
    return shown


def quantile(times: list[float], share: float) -> str:
    return f"{sorted(times)[min(int(share * len(times)), len(times) - 1)] * 1e3:,.1f} ms" if times else "-"


def own_weights(stack: ExitStack, environ: dict[str, str], common: list[str], asked: list[dict[str, int]]) -> dict[int, str]:
    """The answers of a process that shares nothing, by request."""
    single = Process(stack, environ, "worker.py", "alone", *common)
    single.line()
    in_order = sorted(asked, key=lambda request: request["model"])  # it has memory for one model
    return {request["request"]: single.ask(**request)["digest"] for request in in_order}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--models", type=int, default=10)
    parser.add_argument("--room", type=int, default=3, help="models that the device may hold")
    parser.add_argument("--megabytes", type=int, default=16, help="MiB of a model")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    if min(options.models, options.room, options.megabytes, options.workers, options.requests) < 1:
        parser.error("all numbers are at least 1")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends as Ctrl-C does: with all of its processes
    with ExitStack() as stack:
        try:
            play(options, stack)
        except KeyboardInterrupt:
            return 130
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
