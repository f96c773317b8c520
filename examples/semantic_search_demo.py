"""Demo of semantic_search.py with real processes, weights and kills.

Runs it as a server, two clients and alone, checks the answers, and kills some processes; then with a broker, whose worker is
killed while two clients search. Exits with code 1 if a check fails.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shared_rpc import Client

APP = Path(__file__).with_name("semantic_search.py")
QUESTIONS = ("Which animal communicates by moving?", "How hot is a flash in a storm?", "What can you bake with microbes?")

console = Console(width=110)
failures: list[str] = []
BEGIN = time.monotonic()


def step(what: str) -> None:
    """Print an event, and the seconds since the start."""
    console.print(f"{time.monotonic() - BEGIN:5.1f} s  {what}", highlight=False)


def check(what: str, good: bool) -> None:
    """Print the outcome of a check."""
    step(f"{'[green]ok  [/]' if good else '[red]FAIL[/]'} {what}")
    if not good:
        failures.append(what)


class App:
    """A process that runs the app in a role."""

    def __init__(self, role: str, environ: dict[str, str]) -> None:
        self.role = role
        self.process = subprocess.Popen(
            [sys.executable, str(APP)],
            env={**environ, "SHARED_TENSOR_ROLE": role},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        ready = self.read()
        match = re.search(r"after ([\d.]+) s", ready)
        if match is None:
            raise SystemExit(f"the {role} did not get ready: {ready!r}")
        self.seconds = float(match[1])
        step(f"a process is ready: {role}, pid {self.process.pid}")

    def read(self) -> str:
        """Return the next line of output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        """Send a line, and return the answer."""
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)
        return self.read()

    def memory(self) -> tuple[int, int]:
        """Return ``(private, shared)`` bytes, from smaps_rollup."""
        rollup = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text()
        sizes = {key: int(kib) * 1024 for key, kib in re.findall(r"^(\w+):\s+(\d+) kB", rollup, re.MULTILINE)}
        return (
            sizes["Private_Clean"] + sizes["Private_Dirty"],
            sizes["Shared_Clean"] + sizes["Shared_Dirty"],
        )

    def kill(self) -> None:
        """Kill the process by SIGKILL."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        """Close the input, which ends the main code; kill a server."""
        if self.process.poll() is None:
            self.process.communicate(timeout=60) if self.role != "server" else self.kill()


def within(seconds: float, condition: Callable[[], bool]) -> float | None:
    """Return the seconds until ``condition`` holds, None if it does not in time."""
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        if condition():
            return time.monotonic() - begin
        time.sleep(0.002)
    return None


def demo(directory: str) -> None:
    environ = _environ(directory)
    console.print("Real embedding weights in four processes, some of which are killed. About a minute on two cores.")
    console.rule("one file, three roles")
    alone = App("local", environ)
    server = App("server", environ)
    first, second = App("client", environ), App("client", environ)
    apps = {"alone": alone, "server": server, "client 1": first, "client 2": second}
    try:
        answers = {name: [app.ask(question) for question in QUESTIONS] for name, app in apps.items()}
        for question, answer in zip(QUESTIONS, answers["client 1"], strict=True):
            console.print(f"  [bold]{question}[/]\n    {answer}", highlight=False)
        check("both clients, the server and the unshared run give the same answers", len({*map(tuple, answers.values())}) == 1)

        table = Table("process", "model ready after", "private memory", "shared memory", title="\ncost of a process", box=None)
        for app in apps.values():
            app.ask("!scale 1")  # so that every process has read all weights
        memory = {name: app.memory() for name, app in apps.items()}
        for name, app in apps.items():
            private, shared = memory[name]
            table.add_row(name, f"{app.seconds * 1000:,.0f} ms", f"{private >> 20} MiB", f"{shared >> 20} MiB")
        console.print(table)
        model = _model_bytes(directory)
        ratio = server.seconds / first.seconds
        console.print(f"  the model has {model >> 20} MiB; attaching took {ratio:.1f} times less than loading and publishing")
        check("attaching is faster than loading", max(first.seconds, second.seconds) < server.seconds)
        saved = memory["alone"][0] - max(memory["client 1"][0], memory["client 2"][0])
        check(f"a client has {saved >> 20} MiB less private memory than the unshared run", saved > model * 0.5)

        console.rule("one memory")
        before = first.ask("!scale 1")
        written = server.ask("!scale 2")
        seen = {first.ask("!scale 1"), second.ask("!scale 1")}
        change = f"{before.split()[-1]} to {written.split()[-1]}"
        check(f"a write of the server ({change}) is seen by both clients, without a call", seen == {written} != {before})
        server.ask("!scale 0.5")

        console.rule("kill -9")
        with Client(f"{directory}/demo", device="cpu") as client:

            def leases() -> int:
                return client.list_objects()[0]["leases"]

            check(f"{leases()} processes hold the model", leases() == 3)
            second.kill()
            took = within(1.0, lambda: leases() == 2)
            check(f"client 2 was killed, and its lease is gone after {(took or 0) * 1000:.0f} ms", took is not None)
        server.kill()
        after = [first.ask(question) for question in QUESTIONS]
        check("the server was killed, and client 1 continues to answer as before", after == answers["alone"])
    finally:
        for app in apps.values():
            app.end()
    last_act(directory, answers["alone"])


def last_act(directory: str, answers: list[str]) -> None:
    """Kill a worker: attached clients continue, new clients attach, and the next build succeeds."""
    console.rule("kill -9 of what loads models")
    environ = {**_environ(directory), "SHARED_TENSOR_BASE_PATH": f"{directory}/broker"}
    words = [sys.executable, "-m", "shared_rpc.cli", "serve", str(APP)]
    broker = subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    apps: list[App] = []
    try:
        assert broker.stdout is not None
        broker.stdout.readline()
        apps += [App("client", environ), App("client", environ)]
        with Client(f"{directory}/broker", device="cpu", timeout=60) as client, ThreadPoolExecutor() as threads:
            worker = client.get_server_info()["workers"][0]["pid"]
            importlib.import_module("sentence_transformers")  # the classes of the model, which every client needs
            searches = [threads.submit(_search, app, 4) for app in apps]
            os.kill(worker, signal.SIGKILL)
            begin = time.perf_counter()
            attached = client.call("load_model")
            took = time.perf_counter() - begin

            def gone() -> bool:
                return worker not in [w["pid"] for w in client.get_server_info()["workers"] if w["state"] == "ready"]

            killed = within(10.0, gone) is not None
            check(f"the worker (pid {worker}) was killed, and a third client attached after {took * 1000:.0f} ms", killed)
            check("two clients searched, and answered as before", all(s.result() == answers * 4 for s in searches))
            begin = time.perf_counter()
            another = client.call("load_model", "built again")
            took = time.perf_counter() - begin
            check(f"a new worker built another one within {took:.1f} s", another.object_id != attached.object_id)
            with open(f"/proc/{broker.pid}/status", encoding="ascii") as status:
                resident = int(next(line for line in status if line.startswith("VmRSS")).split()[1]) >> 10
            held = client.get_server_info()["nbytes"] >> 20
            console.print(f"  the broker that holds {held} MiB of models has {resident} MiB of its own, and no torch")
    finally:
        for app in apps:
            app.end()
        broker.terminate()
        broker.wait()


def _search(app: App, rounds: int) -> list[str]:
    return [app.ask(question) for _ in range(rounds) for question in QUESTIONS]


def _environ(directory: str) -> dict[str, str]:
    environ = {
        **os.environ,
        "SHARED_TENSOR_BASE_PATH": f"{directory}/demo",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
    }
    environ.pop("SHARED_TENSOR_ENABLED", None)
    return environ


def _model_bytes(directory: str) -> int:
    with Client(f"{directory}/demo", device="cpu") as client:
        return int(client.list_objects()[0]["nbytes"])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        demo(scratch)
    if failures:
        raise SystemExit(f"{len(failures)} checks failed: {'; '.join(failures)}")
    console.print("\n[green]all checks passed[/]")
