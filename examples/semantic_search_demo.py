"""Demo of semantic_search.py with real weights: a server, two clients and an unshared process, some of which are killed.

Exits with code 1 if a check fails.
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
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shared_rpc import Client

APP = Path(__file__).with_name("semantic_search.py")
QUESTIONS = ("Which animal communicates by moving?", "How hot is a flash in a storm?", "What can you bake with microbes?")

console = Console(width=110, highlight=False)
failures: list[str] = []
BEGIN = time.monotonic()


def step(what: str) -> None:
    """Print an event, and the seconds since the start."""
    console.print(f"{time.monotonic() - BEGIN:5.1f} s  {what}")


def check(what: str, good: bool) -> None:
    """Print the outcome of a check."""
    step(f"{'[green]ok  [/]' if good else '[red]FAIL[/]'} {what}")
    if not good:
        failures.append(what)


class App(subprocess.Popen[str]):
    """A process that runs the app in a role, until its input is closed."""

    def __init__(self, role: str) -> None:
        environ = {**os.environ, "SHARED_TENSOR_ROLE": role}
        super().__init__([sys.executable, str(APP)], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.stdout is not None
        #: What ``load_model`` took: "ready as client after 0.274 s".
        self.seconds = float(self.stdout.readline().split()[-2])
        step(f"a process is ready: {role}, pid {self.pid}")

    def ask(self, *lines: str) -> list[str]:
        """Send lines, and return their answers."""
        assert self.stdin is not None and self.stdout is not None
        print(*lines, sep="\n", file=self.stdin, flush=True)
        return [self.stdout.readline().strip() for _ in lines]


def memory(pid: int) -> tuple[int, int]:
    """Return the private and the shared memory of a process, in MiB."""
    rollup = re.findall(r"^(Private|Shared)_\w+:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    private, shared = (sum(int(kib) for name, kib in rollup if name == kind) for kind in ("Private", "Shared"))
    return private >> 10, shared >> 10


def demo(stack: ExitStack) -> None:
    console.print("Real embedding weights in four processes, some of which are killed. About a minute on two cores.")
    console.rule("one model")
    command = [sys.executable, "-m", "shared_rpc.cli", "serve", str(APP), "--device", "cpu"]
    server = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
    stack.callback(server.terminate)
    assert server.stdout is not None
    step(server.stdout.readline().strip())
    alone, first, second = apps = [stack.enter_context(App(role)) for role in ("local", "client", "client")]
    answers = alone.ask(*QUESTIONS)
    for question, answer in zip(QUESTIONS, answers, strict=True):
        console.print(f"  [bold]{question}[/]\n    {answer}")
    same = first.ask(*QUESTIONS) == second.ask(*QUESTIONS) == answers
    check("the clients and the unshared process give the same answers", same)

    table = Table("process", "model ready after", "private memory", "shared memory", title="\ncost of a process", box=None)
    for name, app in zip(("unshared", "client 1, for which the server loads", "client 2"), apps, strict=True):
        app.ask("!scale 1")  # reads all weights
        private, shared = memory(app.pid)
        table.add_row(name, f"{app.seconds * 1000:,.0f} ms", f"{private} MiB", f"{shared} MiB")
    console.print(table)
    client = stack.enter_context(Client(timeout=60, device="cpu"))
    model = client.list_objects()[0]["nbytes"] >> 20
    saved = memory(alone.pid)[0] - max(memory(first.pid)[0], memory(second.pid)[0])
    check("attaching is faster than loading", second.seconds < min(alone.seconds, first.seconds))
    check(f"the model has {model} MiB; a client has {saved} MiB less private memory", saved > model / 2)

    console.rule("one memory")
    (before,), (written,), (seen,) = second.ask("!scale 1"), first.ask("!scale 2"), second.ask("!scale 1")
    change = f"{before.split()[-1]} to {written.split()[-1]}"
    check(f"client 2 sees a write of client 1 ({change}), without a call", seen == written != before)
    first.ask("!scale 0.5")

    console.rule("kill -9")
    second.kill()
    begin = time.monotonic()
    while (leases := client.list_objects()[0]["leases"]) > 1 and time.monotonic() < begin + 1:
        time.sleep(0.002)
    check(f"client 2 was killed, and its lease is gone after {(time.monotonic() - begin) * 1000:.0f} ms", leases == 1)

    importlib.import_module("sentence_transformers")  # the classes of the model, which every client needs
    worker = client.get_server_info()["workers"][0]["pid"]
    os.kill(worker, signal.SIGKILL)
    begin = time.monotonic()
    attached = client.call("load_model")
    took = (time.monotonic() - begin) * 1000
    check(f"the worker (pid {worker}) was killed, and another client attached after {took:.0f} ms", took < 10_000)
    check("client 1 answers as before", first.ask(*QUESTIONS) == answers)
    begin = time.monotonic()
    another = client.call("load_model", "loaded again")
    took = time.monotonic() - begin
    check(f"a new worker loaded the model once more within {took:.1f} s", another.object_id != attached.object_id)
    held = client.get_server_info()["nbytes"] >> 20
    console.print(f"  the server that holds {held} MiB of models has {memory(server.pid)[0]} MiB of its own, and no torch")

    server.kill()
    check("the server was killed, and client 1 answers as before", first.ask(*QUESTIONS) == answers)


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "SHARED_TENSOR_ENABLED": ""}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as processes:
        os.environ["SHARED_TENSOR_BASE_PATH"] = f"{scratch}/demo"
        demo(processes)
    if failures:
        raise SystemExit(f"{len(failures)} checks failed: {'; '.join(failures)}")
    console.print("\n[green]all checks passed[/]")
