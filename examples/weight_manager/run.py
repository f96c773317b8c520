"""The whole story of a weight manager and its short-lived inference workers, checked as it goes::

    python run.py [--workers 4] [--device cuda --scale 6]

A manager loads v1 of two models, workers answer requests, one is killed, v2 takes v1's place under load, a damaged v3 does
not, the manager is killed, and at last there is nobody left. Exits with 1 where something that is claimed is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from deploy import deploy, retire
from messages import Answer, Request
from rich.console import Console
from rich.progress import Progress as Bars
from rich.table import Table
from router import Limits, NoWorkers, Router, RouterError, warm

from shared_rpc import Client
from shared_rpc.errors import CheckpointError

HERE = Path(__file__).parent
MODELS = ("resnet18", "llama")
#: Different inputs for each model, and how many users ask at the same time.
INPUTS, USERS = 4, 6

console = Console(width=110, highlight=False)
failures: list[str] = []


def check(what: str, good: bool) -> None:
    """Print one checked fact."""
    console.print(f"  [{'green' if good else 'red'}]{'ok  ' if good else 'FAIL'}[/] {what}")
    if not good:
        failures.append(what)


def inputs(image: int) -> list[Request]:
    """Images and tokens, the same ones in every run."""
    chance = random.Random(7)
    images = [array("f", (chance.gauss(0, 1) for _ in range(3 * image * image))) for _ in range(INPUTS)]
    texts = [array("q", (chance.randrange(4096) for _ in range(32))) for _ in range(INPUTS)]
    return [Request("resnet18", "float32", (1, 3, image, image), pixels.tobytes()) for pixels in images] + [
        Request("llama", "int64", (1, 32), tokens.tobytes()) for tokens in texts
    ]


@dataclass
class Asked:
    """A request that users have sent, and what came of it."""

    number: int
    sent: float
    answer: Answer | RouterError


class Users:
    """They ask and ask, until they are stopped, and note what comes back."""

    def __init__(self, router: Router, requests: list[Request]) -> None:
        self.asked: list[Asked] = []
        self._router, self._requests = router, requests
        self._stopped = False

    async def __aenter__(self) -> Users:
        self._tasks = [asyncio.create_task(self._ask(first)) for first in range(USERS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopped = True
        await asyncio.gather(*self._tasks)

    async def answered(self, count: int) -> None:
        """Wait for so many more."""
        enough = len(self.asked) + count
        if await within(300, lambda: len(self.asked) >= enough) is None:
            raise SystemExit(f"{count} requests were not answered within 300 s")

    async def _ask(self, number: int) -> None:
        while not self._stopped:
            number, sent = (number + 1) % len(self._requests), time.monotonic()
            try:
                outcome: Answer | RouterError = await self._router.ask(self._requests[number])
            except RouterError as error:
                outcome = error
                await asyncio.sleep(0.05)  # who asks again at once would keep everybody else from the loop
            self.asked.append(Asked(number, sent, outcome))


class Story:
    """What all acts share."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.weights = folder / "weights"
        self.requests = inputs(options.image)
        #: By version: the logits that a single process computes with weights of its own.
        self.expected: dict[str, list[list[float]]] = {}
        self.manager = self.start_manager()
        self.client = Client(device=options.device, connect_timeout=60)

    def start_manager(self) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "shared_rpc.cli", "serve", str(HERE / "manager.py")]
        environ = {**os.environ, "WEIGHTS": str(self.weights), "DEVICE": self.options.device}
        # Not in the terminal's process group: Ctrl-C is this process's, which ends the others in order.
        return subprocess.Popen(words, env=environ, stdout=subprocess.DEVNULL, text=True, process_group=0)

    async def make_weights(self) -> None:
        words = [sys.executable, str(HERE / "make_weights.py"), str(self.weights), "--scale", str(self.options.scale)]
        process = await asyncio.create_subprocess_exec(*words, process_group=0)
        try:
            if await process.wait():
                raise SystemExit(f"{' '.join(words)} ended with {process.returncode}")
        finally:
            if process.returncode is None:  # Ctrl-C, which is not to wait for gigabytes
                process.kill()
                await process.wait()

    def router(self, main: str, workers: int, limits: Limits | None = None, *more: object) -> Router:
        return Router(main, (self.options.device, self.options.threads, *more), workers, limits)

    async def deploy(self, name: str, version: str) -> float:
        """Swap a model's version: the seconds until it was served."""
        begin = time.perf_counter()
        with Bars(console=console, transient=True, disable=not console.is_terminal) as bars:
            bar = bars.add_task(f"{name} {version}", total=None)
            await asyncio.to_thread(
                deploy, self.client, name, version, lambda p: bars.update(bar, completed=p.done, total=p.total)
            )
        return time.perf_counter() - begin

    def version_of(self, asked: Asked) -> str:
        """Whose answer it is, to the last bit; "" for nobody's."""
        if isinstance(asked.answer, RouterError):
            return ""
        return next((name for name, all_of in self.expected.items() if all_of[asked.number] == asked.answer.logits), "")

    def kept(self) -> int:
        """Bytes that the manager accounts for."""
        device = self.client.get_server_info()["device"]
        return next(int(facts["used"]) for facts in self.client.list_devices() if facts["id"] == device)

    def taken(self, router: Router) -> int:
        """Bytes of shared weights that the system really has in use, whoever holds them; on a GPU all that is in use there."""
        info = self.client.get_server_info()
        if info["device"] != "cpu":
            return next(f["total"] - f["free"] for f in self.client.list_devices() if f["id"] == info["device"])
        return shared_bytes([self.manager.pid, *(w["pid"] for w in info["workers"]), *(w.pid for w in router.workers)])

    def close(self) -> None:
        self.client.close()
        self.manager.terminate()
        self.manager.wait()


def shared_bytes(pids: Iterable[int]) -> int:
    """The memory of all segments that some process has mapped or open, each once."""
    sizes: dict[int, int] = {}
    for pid in pids:
        try:
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if "/memfd:shared-rpc-" in line:
                    span, _, _, _, inode, *_ = line.split()
                    first, last = (int(address, 16) for address in span.split("-"))
                    sizes[int(inode)] = last - first
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                if os.readlink(descriptor).startswith("/memfd:shared-rpc-"):
                    facts = descriptor.stat()
                    sizes[facts.st_ino] = facts.st_size
        except OSError:
            continue  # it has ended meanwhile
    return sum(sizes.values())


def private_bytes(pid: int) -> int:
    """A process's proportional set size, without the segments."""
    total, counted = 0, True
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            counted = "/memfd:shared-rpc-" not in line
        elif counted and line.startswith("Pss:"):
            total += int(line.split()[1]) * 1024
    return total


async def within(seconds: float, condition: Callable[[], bool]) -> float | None:
    """The seconds until it holds, None if it does not in time."""
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        if condition():
            return time.monotonic() - begin
        await asyncio.sleep(0.02)
    return None


def mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"


async def play(story: Story) -> None:
    options, facts = story.options, Table("", box=None, show_header=False)
    limits = Limits(requests=options.life, queue=4 * USERS)
    await asyncio.gather(story.make_weights(), asyncio.to_thread(warm))
    async with AsyncExitStack() as stack:
        console.rule("one process for each version, with weights of its own: what the answers must be")
        single = {
            version: await stack.enter_async_context(story.router("worker:alone", 1, None, str(story.weights), version))
            for version in ("v1", "v2")
        }
        for version, router in single.items():
            story.expected[version] = [(await router.ask(request)).logits for request in story.requests]
        differ = all(one != two for one, two in zip(*story.expected.values(), strict=True))
        check(f"v1 and v2 give different answers to all {len(story.requests)} requests", differ)

        console.rule(f"v1: a manager, and {options.workers} workers that live for {options.life} requests")
        for name in MODELS:
            console.print(f"  {name} v1 was loaded and is served after {await story.deploy(name, 'v1'):.2f} s")
        weights = story.kept()
        router = await stack.enter_async_context(story.router("worker:attached", options.workers, limits, *MODELS))
        async with Users(router, story.requests) as users:
            await users.answered(options.requests)
            await within(10, lambda: bool(router.workers))
            os.kill(next(iter(router.workers)).pid, signal.SIGKILL)
            await users.answered(options.requests)
            if options.device == "cpu":
                await memory(story, router, next(iter(single["v1"].workers)).pid, weights, facts)
        check(f"{len(users.asked)} requests, all with the bits of the single process", versions(story, users.asked) == {"v1"})
        check("a worker was killed under load, and no request failed", router.counts.died == 1 <= router.counts.started)
        for other in single.values():
            await other.close()
        await within(60, lambda: len(router.workers) == options.workers)
        before = story.taken(router)
        if options.device != "cpu":
            facts.add_row(f"GPU memory in use, with {options.workers} workers and their contexts", mib(before))
            facts.add_row("the same, if each had a copy of the weights", mib(before + (options.workers - 1) * weights))

        await swap(story, router, weights, before, facts)
        await damaged(story, router)
    await bad_luck(story)
    counts = router.counts
    facts.add_row("requests answered / tried again", f"{counts.answered} / {counts.retried}")
    facts.add_row("workers started / lived out / died", f"{counts.started} / {counts.retired} / {counts.died}")
    console.print(facts)


def versions(story: Story, asked: Iterable[Asked]) -> set[str]:
    return {story.version_of(one) for one in asked}


async def memory(story: Story, router: Router, single: int, weights: int, facts: Table) -> None:
    """What the workers take on the host, beside as many processes with copies."""
    await within(60, lambda: len(router.workers) == story.options.workers)
    mine = [private_bytes(worker.pid) for worker in router.workers]
    copies = len(mine) * private_bytes(single)
    shared = sum(mine) + weights
    facts.add_row(f"memory of {len(mine)} workers, the weights once (PSS)", mib(shared))
    facts.add_row(f"memory of {len(mine)} processes with copies (PSS)", mib(copies))
    saved = (len(mine) - 1) * weights
    check(f"{len(mine)} workers take {mib(copies - shared)} less than {len(mine)} copies", copies - shared > saved / 2)


async def swap(story: Story, router: Router, weights: int, before: int, facts: Table) -> None:
    console.rule("v2 takes v1's place, under load")
    async with Users(router, story.requests) as users:
        await users.answered(story.options.requests // 4)
        seconds = [await story.deploy(name, "v2") for name in MODELS]
        swapped = time.monotonic()
        both = story.kept()
        await users.answered(story.options.requests // 2)
        held = [one for name in MODELS for one in await asyncio.to_thread(retire, story.client, name, "v1")]
        took = await within(10, lambda: story.taken(router) < before + weights / 2)
        await users.answered(story.options.requests // 4)
    leases = sum(one["leases"] for one in held)
    late = [one for one in users.asked if one.sent > swapped]
    check(f"{len(users.asked)} requests, and none failed", not any(isinstance(one.answer, RouterError) for one in users.asked))
    check("every answer is v1's or v2's, to the last bit", versions(story, users.asked) == {"v1", "v2"})
    check(f"{len(late)} requests that were sent after the swap: all are v2's", versions(story, late) == {"v2"})
    check(f"for a while there were {mib(both)} of weights, and after retiring v1 {mib(story.kept())}", story.kept() == weights)
    check(f"v1's memory was given back {(took or 0) * 1000:.0f} ms after it was retired", took is not None)
    facts.add_row("v2 loaded and served, under load", " and ".join(f"{one * 1000:,.0f} ms" for one in seconds))
    facts.add_row(
        "leases on v1 when it was retired, and when they were gone",
        f"{leases}, {(took or 0) * 1000:.0f} ms",
    )


async def damaged(story: Story, router: Router) -> None:
    console.rule("v3 is damaged")
    source, target = (story.weights / "llama" / version for version in ("v2", "v3"))
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    whole = (source / "model.safetensors").read_bytes()
    (target / "model.safetensors").write_bytes(whole[: len(whole) * 2 // 3])
    async with Users(router, story.requests) as users:
        try:
            await story.deploy("llama", "v3")
            said = "nothing"
        except CheckpointError as error:
            said = str(error)
        await users.answered(story.options.requests // 4)
    console.print(f"  {said}")
    check("the error names the file and the tensor", "v3/model.safetensors is truncated: tensor '" in said)
    check("v2 is served as before", versions(story, users.asked) == {"v2"})


async def bad_luck(story: Story) -> None:
    console.rule("everybody dies")
    async with story.router("worker:attached", story.options.workers, None, *MODELS) as router:
        async with Users(router, story.requests) as users:
            await users.answered(story.options.requests // 4)
            await within(60, lambda: len(router.workers) == story.options.workers)
            story.manager.kill()
            story.manager.wait()
            await users.answered(story.options.requests // 4)
        check("the manager was killed, and the workers answer on", versions(story, users.asked) == {"v2"})
        for worker in router.workers:
            os.kill(worker.pid, signal.SIGKILL)
        try:
            await asyncio.wait_for(router.ask(story.requests[0]), 60)
            said = ""
        except NoWorkers as error:
            said = str(error)
        console.print(f"  {said}")
        check("all workers are dead, and a request is told why", "all workers are dead" in said and "ConnectError" in said)

        story.manager = story.start_manager()
        for name in MODELS:
            await story.deploy(name, "v1")
        took = await within(60, lambda: len(router.workers) == story.options.workers)
        again = Asked(0, 0, await router.ask(story.requests[0]))
        whole = took is not None and story.version_of(again) == "v1"
        check("the manager is back, and so are the workers, by themselves", whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--scale", type=float, default=1.0, help="of the models' widths; 1 is 100 MiB of weights")
    parser.add_argument("--image", type=int, default=32, help="pixels in a row")
    parser.add_argument("--requests", type=int, default=60, help="how many an act waits for")
    parser.add_argument("--life", type=int, default=30, help="requests in a worker's life")
    parser.add_argument("--threads", type=int, default=1, help="of a worker on the host")
    options = parser.parse_args()
    if min(options.workers, options.requests, options.life, options.threads) < 1:
        parser.error("--workers, --requests, --life and --threads: at least 1")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends as Ctrl-C does: with all of its processes
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["SHARED_TENSOR_BASE_PATH"] = f"{scratch}/manager"
        try:
            if options.device == "auto":
                import torch

                options.device = "cuda" if torch.cuda.is_available() else "cpu"
            story = Story(options, Path(scratch))
            try:
                asyncio.run(play(story))
            finally:
                story.close()
        except KeyboardInterrupt:
            raise SystemExit(130) from None
    if failures:
        raise SystemExit(f"{len(failures)} claims are false: {'; '.join(failures)}")
    console.print(f"\n[green]all of it is so[/], after {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
