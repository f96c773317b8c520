"""Prefill and decode in two processes, over one copy of the weights and one KV cache.

    python examples/prefill_decode/run.py                  # about 15 s, on the host or on a GPU
    python examples/prefill_decode/run.py --size large     # 7 GB of weights, for a GPU

It starts a server for the weights (weights.py) and two engines (engine.py). The prefill engine runs prompts and writes their
keys and values to a shared buffer; the decode engine generates from there. Tickets lead it to both. The tokens must be those
of one process that shares nothing, and neither engine may have the weights in memory of its own; else this exits with 1.
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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MIB = 1 << 20


class Process:
    """One of the example's processes, ended with the block that it belongs to."""

    def __init__(self, stack: ExitStack, environ: dict[str, str], *command: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *command],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for this program, which ends them
        )
        stack.callback(self.end)

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, **message: Any) -> None:
        try:
            print(json.dumps(message), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise SystemExit(f"{self._process.args} ended with {self._process.wait()}") from None

    def hear(self) -> dict[str, Any]:
        """The next message; ends this program where the process has ended before it."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args} ended with {self._process.wait()} before it answered")
        return json.loads(line)

    def end(self) -> None:
        self._process.terminate()
        self._process.communicate()


def pss(pid: int) -> int:
    """Bytes of a process in memory, each shared page in parts among those that have it."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in rollup if line.startswith("Pss:")) * 1024


def requests(count: int, new: int, vocabulary: int = 2048) -> list[dict[str, Any]]:
    numbers = random.Random(7)
    lengths = [numbers.randrange(5, 60) for _ in range(count)]
    return [
        {"request": number, "prompt": [numbers.randrange(vocabulary) for _ in range(length)], "new": new}
        for number, length in enumerate(lengths)
    ]


def serve(prefill: Process, decode: Process, asked: list[dict[str, Any]]) -> dict[int, list[int]]:
    """Send requests through both engines; they work at the same time."""
    answers: dict[int, list[int]] = {}

    def collect() -> None:
        while len(answers) < len(asked):
            answer = decode.hear()
            answers[answer["request"]] = answer["tokens"]
            prefill.tell(free=answer["blocks"])

    collector = threading.Thread(target=collect, daemon=True)
    collector.start()
    for request in asked:
        prefill.tell(**request)
    for _ in asked:
        decode.tell(**prefill.hear())
    collector.join()
    return answers


def play(options: argparse.Namespace, stack: ExitStack) -> list[str]:
    """The whole story; what of it was not as it should be."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    # One thread each: several processes on few cores would only wait for each other.
    environ = os.environ | {"SHARED_TENSOR_BASE_PATH": str(directory / "s"), "OMP_NUM_THREADS": "1"}
    engine = [str(HERE / "engine.py")]
    common = ["--size", options.size, "--blocks", str(options.blocks)]
    server = Process(stack, environ, "-m", "shared_rpc.cli", "serve", str(HERE / "weights.py"), "--idle-exit", "60")
    prefill = Process(stack, environ, *engine, "prefill", *common, "--directory", str(directory))
    decode = Process(stack, environ, *engine, "decode", *common, "--directory", str(directory))
    asked = requests(options.requests, options.new)

    first = prefill.hear()
    decode.tell(open=True)
    second = decode.hear()
    print("both engines are ready", flush=True)
    answers = serve(prefill, decode, asked)
    resident = {"prefill engine": pss(prefill.pid), "decode engine": pss(decode.pid)}
    resident["server and worker"] = sum(pss(pid) for pid in family(server.pid))

    single = Process(stack, environ, *engine, "alone", *common)
    alone = single.hear()
    for request in asked:
        single.tell(**request)
    expected = {answer["request"]: answer["tokens"] for answer in (single.hear() for _ in asked)}

    weights = first["weights"]
    print(f"{len(asked)} requests, {sum(map(len, answers.values()))} tokens, the first: {answers[0][:8]} ...")
    print(f"weights: {weights / MIB:.0f} MiB, in one copy that the server has")
    for name, facts in (("prefill engine", first), ("decode engine", second), ("one that shares nothing", alone)):
        print(f"  {name:<24} own memory grew by {facts['grown'] / MIB:7.1f} MiB, ready in {facts['seconds'] * 1e3:6.0f} ms")
    print("resident on the host, shared pages in parts (PSS):")
    for name, nbytes in (resident | {"one that shares nothing": pss(single.pid)}).items():
        print(f"  {name:<24} {nbytes / MIB:7.1f} MiB")
    saved = 2 * alone["grown"] - weights - first["grown"] - second["grown"]
    print(f"saved against two engines with weights of their own: {saved / MIB:.0f} MiB")

    claims = {
        "the tokens are those of one process that shares nothing": answers == expected,
        "the prefill engine has no copy of the weights": first["grown"] < weights / 4,
        "the decode engine has no copy of the weights": second["grown"] < weights / 4,
        "an engine that shares nothing has one": alone["grown"] > weights * 0.9,
    }
    for claim, good in claims.items():
        print(f"{'ok  ' if good else 'FAIL'} {claim}")
    return [claim for claim, good in claims.items() if not good]


def family(pid: int) -> list[int]:
    """A process and its children."""
    children = [
        int(child)
        for thread in Path(f"/proc/{pid}/task").iterdir()
        for child in (thread / "children").read_text(encoding="ascii").split()
    ]
    return [pid, *(each for child in children for each in family(child))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=["tiny", "small", "large"], default="small")
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--new", type=int, default=16, help="tokens to generate for each request")
    parser.add_argument("--blocks", type=int, default=12, help="blocks of the KV cache, 16 positions each")
    options = parser.parse_args()
    if min(options.requests, options.new, options.blocks) < 1:
        parser.error("--requests, --new and --blocks: at least 1")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends as Ctrl-C does: with all of its processes
    with ExitStack() as stack:
        try:
            return 1 if play(options, stack) else 0
        except KeyboardInterrupt:
            return 130


if __name__ == "__main__":
    sys.exit(main())
