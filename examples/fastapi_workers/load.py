"""Load on the embedding service: how many answers a second, how late, and what became of requests whose worker died.

    python load.py http://127.0.0.1:8000/embed --concurrency 8 --duration 5

Each user has one connection, and asks again as soon as the answer is there. A request whose connection breaks is sent again
over a new one, as may be done with what is idempotent.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import httpx

TEXTS = (
    "The waggle dance tells other bees where the flowers are.",
    "Lightning heats the air to five times the temperature of the sun's surface.",
    "Sourdough rises because of wild yeast and lactic acid bacteria.",
)
#: How often a request is sent, in all.
ATTEMPTS = 5
#: Seconds between the first requests of two users. Of connections that come at once, the worker that wakes first takes all.
RAMP = 0.05


@dataclass
class Report:
    """What users saw."""

    #: Seconds from the first attempt to the answer, of every request that was answered.
    latencies: list[float] = field(default_factory=list)
    #: Answers by worker.
    answers: Counter[int] = field(default_factory=Counter)
    #: Attempts whose connection broke, by the worker that it led to; None where that had not answered before.
    broken: Counter[int | None] = field(default_factory=Counter)
    #: Requests that were answered in the end, after an attempt that broke.
    retried: int = 0
    #: Requests that never were.
    lost: int = 0
    #: Answers that were no success, by status.
    refused: Counter[int] = field(default_factory=Counter)
    #: The worker to which each user is connected now.
    connected: dict[int, int | None] = field(default_factory=dict)
    #: When users ask no more, in terms of time.perf_counter(). May be moved meanwhile.
    until: float = 0.0
    seconds: float = 0.0

    def percentile(self, percent: float) -> float:
        """Of the latencies, in milliseconds."""
        ordered = sorted(self.latencies)
        return ordered[min(int(len(ordered) * percent / 100), len(ordered) - 1)] * 1000 if ordered else 0.0

    @property
    def rate(self) -> float:
        """Answers a second."""
        return len(self.latencies) / self.seconds if self.seconds else 0.0


async def load(url: str, concurrency: int, seconds: float, report: Report | None = None) -> Report:
    """Have that many users ask for so long. The report may be looked at meanwhile."""
    report = report or Report()
    async with AsyncExitStack() as stack:
        limits = httpx.Limits(max_connections=1)
        clients = [await stack.enter_async_context(httpx.AsyncClient(limits=limits, timeout=30)) for _ in range(concurrency)]
        begin = time.perf_counter()
        report.until = begin + seconds
        await asyncio.gather(*(_user(client, number, url, report) for number, client in enumerate(clients)))
        report.seconds = time.perf_counter() - begin
    return report


async def _user(client: httpx.AsyncClient, number: int, url: str, report: Report) -> None:
    await asyncio.sleep(number * RAMP)
    for text in itertools.cycle(TEXTS):
        await _request(client, number, url, text, report)
        if time.perf_counter() >= report.until:
            return


async def _request(client: httpx.AsyncClient, number: int, url: str, text: str, report: Report) -> None:
    begin = time.perf_counter()
    for attempt in range(ATTEMPTS):
        try:
            response = await client.post(url, json={"texts": [text]})
        except httpx.TransportError:
            report.broken[report.connected.get(number)] += 1
            report.connected[number] = None
            await asyncio.sleep(0.01 * 2**attempt)
            continue
        break
    else:
        report.lost += 1
        return
    if response.is_error:
        report.refused[response.status_code] += 1
        return
    worker = int(response.headers["x-worker"])
    report.connected[number] = worker
    report.answers[worker] += 1
    report.retried += attempt > 0
    report.latencies.append(time.perf_counter() - begin)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--duration", type=float, default=5.0, help="seconds")
    options = parser.parse_args()
    seen = asyncio.run(load(options.url, options.concurrency, options.duration))
    print(f"{len(seen.latencies)} answers in {seen.seconds:.1f} s, {seen.rate:.0f} a second, by {len(seen.answers)} workers")
    print("latency " + ", ".join(f"p{percent:g} {seen.percentile(percent):.0f} ms" for percent in (50, 90, 99)))
    print(f"{seen.broken.total()} attempts broke, {seen.retried} requests were sent again", end=", ")
    print(f"{seen.lost} lost, {seen.refused.total()} refused")
