"""The example of a weight manager: the whole story, and what its router does with workers that die, hang or never come."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.kit.processes import PYTHONPATH, ROOT, eventually

pytest.importorskip("safetensors")
#: Seconds. Each starts several processes with torch, on a machine that may be busy.
pytestmark = pytest.mark.timeout(150)

EXAMPLE = ROOT / "examples" / "weight_manager"
#: The story in small: 6 MiB of weights, workers that live for ten requests.
SMALL = ("--device", "cpu", "--scale", "0.25", "--requests", "24", "--life", "10", "--image", "16")
#: The same on a GPU: 1.3 GiB of weights, so that what contexts and caches take more or less does not matter.
LARGE = ("--device", "cuda", "--scale", "4", "--requests", "60", "--life", "100", "--image", "64")


def started(script: Path, *arguments: str) -> subprocess.Popen[str]:
    """A program, in a session of its own."""
    environ = {**os.environ, "PYTHONPATH": f"{PYTHONPATH}{os.pathsep}{EXAMPLE}"}
    return subprocess.Popen(
        [sys.executable, "-u", str(script), *arguments],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def of_session(pid: int) -> list[str]:
    """The processes of a session that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(")")
        except OSError:
            continue
        state, _, _, session, *_ = rest.split()
        if int(session) == pid and state != "Z":
            found.append(name)
    return found


@pytest.mark.parametrize("options", [SMALL, pytest.param(LARGE, marks=pytest.mark.gpu)], ids=["cpu", "cuda"])
@pytest.mark.timeout(400)
def test_the_whole_story(options: tuple[str, ...]) -> None:
    """A worker is killed, v2 takes v1's place under load, v3 is damaged, all die and come back; and every claim holds."""
    program = started(EXAMPLE / "run.py", *options)
    text, _ = program.communicate(timeout=380)
    assert program.returncode == 0, text
    assert "FAIL" not in text
    for claim in (
        r"\d+ requests, all with the bits of the single process",
        "a worker was killed under load, and no request failed",
        "every answer is v1's or v2's, to the last bit",
        r"\d+ requests that were sent after the swap: all are v2's",
        r"v1's memory was given back \d+ ms after it was retired",
        r"the error names the file and the tensor",
        "the manager was killed, and the workers answer on",
        "all workers are dead, and a request is told why",
        r"the manager is back, and so are the workers",
    ):
        assert re.search(rf"ok +{claim}", text), (claim, text)
    eventually(lambda: not of_session(program.pid), 5, "nothing is left running")


def test_ctrl_c_leaves_nothing() -> None:
    """However many processes there are when it comes."""
    program = started(EXAMPLE / "run.py", *SMALL)
    assert program.stdout is not None
    assert any("llama v1 was loaded" in line for line in program.stdout)
    assert len(of_session(program.pid)) >= 5
    os.killpg(program.pid, signal.SIGINT)
    program.communicate(timeout=60)
    assert program.returncode != 0
    eventually(lambda: not of_session(program.pid), 5, "nothing is left running")


def test_ctrl_c_while_weights_are_made() -> None:
    """They are not made to the end first."""
    program = started(EXAMPLE / "run.py", "--device", "cpu", "--scale", "2")

    def making() -> bool:
        words = [Path(f"/proc/{pid}/cmdline") for pid in children_of(program.pid)]
        return any(b"make_weights" in line.read_bytes() for line in words)

    eventually(making, 60)
    os.killpg(program.pid, signal.SIGINT)
    text, _ = program.communicate(timeout=60)
    assert program.returncode == 130, text
    assert "model.safetensors" not in text
    eventually(lambda: not of_session(program.pid), 5, "nothing is left running")


def children_of(pid: int) -> list[int]:
    """The processes that it has started, in whichever of its threads."""
    lists = Path("/proc").glob(f"{pid}/task/*/children")
    return [int(child) for children in lists for child in children.read_text(encoding="ascii").split()]


@pytest.mark.parametrize("option", ["--workers", "--requests", "--life", "--threads"])
def test_options_that_leave_nothing_to_do(option: str) -> None:
    """They are refused before anything is started: without workers requests would wait for minutes."""
    program = started(EXAMPLE / "run.py", option, "0")
    text, _ = program.communicate(timeout=60)
    assert (program.returncode, "at least 1" in text) == (2, True), text


#: Workers that compute nothing, and a router over them: each act prints one line.
ACTS = """
import asyncio, json, os, signal, socket, sys, time
from messages import Answer, Request, frame
from router import Limits, NoWorkers, Overloaded, RequestFailed, Router
import msgspec

def work(peer, folder):
    if os.path.exists(f"{folder}/closed"):
        peer.sendall(frame(Answer(error="there is no more work")))
        return
    peer.sendall(frame(Answer()))
    stream = peer.makefile("rb")
    while size := stream.read(4):
        request = msgspec.msgpack.decode(stream.read(int.from_bytes(size, "big")), type=Request)
        if request.model == "once" and not os.path.exists(f"{folder}/once"):
            open(f"{folder}/once", "w").close()
            os._exit(3)
        if request.model == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if request.model == "wait":
            while not os.path.exists(f"{folder}/go"):
                time.sleep(0.005)
        if request.model == "wrong":
            peer.sendall(frame(Answer(error="no such model")))
            continue
        if request.model == "garbage":
            peer.sendall(bytes([0, 0, 0, 1, 255]))
            continue
        peer.sendall(frame(Answer(logits=[os.getpid()])))

def asked(model):
    return Request(model, "", (), b"")

async def fails(asking):
    try:
        return str(await asking)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

async def main(folder):
    def router(workers=1, **limits):
        return Router("__main__:work", (folder,), workers, Limits(**limits))

    async with router(requests=4) as r:
        pids = [(await r.ask(asked("pid"))).logits[0] for _ in range(20)]
        print(json.dumps({"act": "life", "workers": len(set(pids)), "most": max(map(pids.count, pids)), "died": r.counts.died}))
    async with router(seconds=0.2) as r:
        first = (await r.ask(asked("pid"))).logits
        while (await r.ask(asked("pid"))).logits == first:
            await asyncio.sleep(0.01)
        print(json.dumps({"act": "seconds", "died": r.counts.died}))
    async with router() as r:
        answer = await r.ask(asked("once"))
        print(json.dumps({"act": "once", "retried": r.counts.retried, "died": r.counts.died}))
    async with router(attempts=2) as r:
        said = await fails(r.ask(asked("kill")))
        after = await r.ask(asked("pid"))
        print(json.dumps({"act": "poison", "said": said, "died": r.counts.died, "answered": r.counts.answered}))
    async with router() as r:
        said = await fails(r.ask(asked("wrong")))
        print(json.dumps({"act": "wrong", "said": said, "died": r.counts.died}))
    async with router(patience=2, attempts=1) as r:
        said = [await fails(r.ask(asked("wait"))), await fails(r.ask(asked("garbage")))]
        print(json.dumps({"act": "patience", "said": said, "died": r.counts.died}))
    async with router(queue=2) as r:
        waiting = [asyncio.create_task(r.ask(asked("wait")))]
        while not r.workers or r._queue.qsize():
            await asyncio.sleep(0.005)
        waiting += [asyncio.create_task(r.ask(asked("pid"))) for _ in range(2)]
        await asyncio.sleep(0)
        said = await fails(r.ask(asked("pid")))
        waiting[1].cancel()
        open(f"{folder}/go", "w").close()
        outcome = await asyncio.gather(*waiting, return_exceptions=True)
        print(json.dumps({"act": "queue", "said": said, "outcome": [type(one).__name__ for one in outcome]}))
    async with router(2, starts=3) as r:
        await r.ask(asked("pid"))
        while len(r.workers) < 2:
            await asyncio.sleep(0.005)
        open(f"{folder}/closed", "w").close()
        idle = [worker.pid for worker in r.workers]
        for pid in idle:
            os.kill(pid, signal.SIGKILL)
        said = [await fails(r.ask(asked("pid"))), await fails(r.ask(asked("pid")))]
        died = r.counts.died
        os.unlink(f"{folder}/closed")
        while "NoWorkers" in (again := await fails(r.ask(asked("pid")))):
            await asyncio.sleep(0.01)
        print(json.dumps({"act": "luck", "said": said, "died": died, "again": again}))
    r = router(grace=0.1)
    async with r:
        os.unlink(f"{folder}/go")
        waiting = [asyncio.create_task(fails(r.ask(asked("wait")))) for _ in range(3)]
        while not r.workers:
            await asyncio.sleep(0.005)
        begin = time.monotonic()
    print(json.dumps({"act": "close", "said": await asyncio.gather(*waiting), "seconds": time.monotonic() - begin}))

if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def acts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each act came to."""
    folder = tmp_path_factory.mktemp("acts")
    script = folder / "acts.py"
    script.write_text(textwrap.dedent(ACTS))
    program = started(script, str(folder))
    text, _ = program.communicate(timeout=140)
    assert program.returncode == 0, text
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return {line["act"]: line for line in lines}


def test_workers_live_for_some_requests(acts: dict[str, dict[str, Any]]) -> None:
    """About four each, a quarter more or less; none of them died."""
    assert acts["life"]["workers"] >= 4
    assert acts["life"]["most"] <= 5
    assert acts["life"]["died"] == 0


def test_workers_live_for_some_time(acts: dict[str, dict[str, Any]]) -> None:
    """And are replaced while nobody asks, too."""
    assert acts["seconds"]["died"] == 0


def test_a_request_whose_worker_died_is_tried_again(acts: dict[str, dict[str, Any]]) -> None:
    """Whoever asked sees nothing of it."""
    assert acts["once"] == {"act": "once", "retried": 1, "died": 1}


def test_a_request_that_kills_is_not_tried_for_ever(acts: dict[str, dict[str, Any]]) -> None:
    """It fails with how the last worker ended, and the next request has a worker."""
    assert re.fullmatch(
        r"RequestFailed: 2 workers have died of it, at last: worker \d+ was killed by SIGKILL", acts["poison"]["said"]
    )
    assert (acts["poison"]["died"], acts["poison"]["answered"]) == (2, 1)


def test_what_a_model_raises_is_told(acts: dict[str, dict[str, Any]]) -> None:
    """And ends no worker."""
    assert acts["wrong"] == {"act": "wrong", "said": "RequestFailed: wrong: no such model", "died": 0}


def test_a_worker_that_hangs_or_talks_nonsense_is_killed(acts: dict[str, dict[str, Any]]) -> None:
    """There is no other way to end what it does."""
    hung, garbage = acts["patience"]["said"]
    assert re.search(r"worker \d+ was killed, because it did not answer for 2 s", hung)
    assert re.search(r"worker \d+ was killed, because it sent what is no answer", garbage)
    assert acts["patience"]["died"] == 2


def test_the_queue_is_bounded(acts: dict[str, dict[str, Any]]) -> None:
    """Too many are told so at once; who stops waiting keeps nobody else from an answer."""
    assert acts["queue"]["said"] == "Overloaded: 2 requests wait already, for 1 workers"
    assert acts["queue"]["outcome"] == ["Answer", "CancelledError", "Answer"]


def test_all_workers_dead(acts: dict[str, dict[str, Any]]) -> None:
    """Those who wait, and those who ask later, are told why; and once workers can be started again they are."""
    why = r"NoWorkers: all workers are dead, and the last \d+ did not get ready: there is no more work"
    assert all(re.fullmatch(why, said) for said in acts["luck"]["said"])
    assert acts["luck"]["died"] == 2
    assert acts["luck"]["again"].startswith("Answer(")


def test_a_router_that_is_closed_lets_nobody_wait(acts: dict[str, dict[str, Any]]) -> None:
    """Nor a worker live that is in the middle of something."""
    assert acts["close"]["said"] == ["NoWorkers: the router was closed"] * 3
    assert acts["close"]["seconds"] < 10
