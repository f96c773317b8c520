"""A child process as an event loop watches it, and the delays before its successor."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from contextlib import suppress

import pytest

from shared_rpc.execution.child import Backoff, Child


@pytest.mark.parametrize(("command", "how"), [("exit 3", "exited with code 3"), ("kill -9 $$", "was killed by SIGKILL")])
def test_exit_status_and_last_output_are_reported(command: str, how: str) -> None:
    """Its code or signal, and its last output, when its end is reported."""

    process = subprocess.Popen(["sh", "-c", f"echo last words >&2; {command}"], stderr=subprocess.PIPE, bufsize=0)

    async def watch() -> tuple[str, str]:
        ended = asyncio.Event()
        child = Child(process, process.stderr, ended.set, passes_on=False)
        await asyncio.wait_for(ended.wait(), 30)
        return child.how(), child.last_output()

    assert asyncio.run(watch()) == (how, "last words")


def test_a_child_that_does_not_end_when_asked_is_killed() -> None:
    """When its grace is over, and its end is not reported then."""
    words = ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 60; done"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, process_group=0)
    reports: list[str] = []

    async def end() -> str:
        child = Child(process, process.stderr, lambda: reports.append("ended"), passes_on=False)
        assert process.stdout is not None
        with process.stdout as output:
            assert output.readline() == b"ready\n"
        child.terminate()
        child.end(time.monotonic())
        await asyncio.sleep(0)
        return child.how()

    try:
        assert (asyncio.run(end()), reports) == ("was killed by SIGKILL", [])
    finally:
        with suppress(ProcessLookupError):  # its sleep may not have begun
            os.killpg(process.pid, signal.SIGKILL)


def test_the_end_is_reported_despite_an_open_pipe() -> None:
    """A grandchild may keep writing to it for hours."""
    process = subprocess.Popen(
        ["sh", "-c", "sleep 600 & echo last words >&2"], stderr=subprocess.PIPE, bufsize=0, process_group=0
    )

    async def watch() -> tuple[str, str]:
        ended = asyncio.Event()
        child = Child(process, process.stderr, ended.set, passes_on=False)
        await asyncio.wait_for(ended.wait(), 30)
        return child.how(), child.last_output()

    try:
        assert asyncio.run(watch()) == ("exited with code 0", "last words")
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_pauses_double_for_children_that_end_soon() -> None:
    """Up to a limit; one that lived longer is followed by the first pause again."""
    pauses, found = Backoff(first=1.0, longest=5.0, soon=10.0), []
    for lived in (3.0, 3.0, 3.0, 3.0, 60.0, 3.0):
        pauses.note(lived)
        found.append(pauses.pause)
    assert found == [1.0, 2.0, 4.0, 5.0, 1.0, 1.0]
