"""A process of a broker, as its loop watches it."""

from __future__ import annotations

import asyncio
import subprocess

import pytest

from shared_rpc.broker.child import Child


@pytest.mark.parametrize(("command", "how"), [("exit 3", "exited with code 3"), ("kill -9 $$", "was killed by SIGKILL")])
def test_how_a_child_ended_is_known(command: str, how: str) -> None:
    """Its code or signal, and what it wrote last, when its end is reported."""

    process = subprocess.Popen(["sh", "-c", f"echo last words >&2; {command}"], stderr=subprocess.PIPE, bufsize=0)

    async def watch() -> tuple[str, str]:
        ended = asyncio.Event()
        child = Child(process, ended.set, passes_on=False)
        await asyncio.wait_for(ended.wait(), 30)
        return child.how(), child.last_output()

    assert asyncio.run(watch()) == (how, "last words")
