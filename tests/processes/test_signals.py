"""Signals end a server: in any thread, any number of them, and whatever blocks the exit."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shared_rpc import errors
from tests.kit.brokers import BrokerApp, begun
from tests.kit.deep import repetitions
from tests.kit.forks import start_zygote, stop_zygote
from tests.kit.processes import Child, eventually, python

#: Of each kind; a thousand in all.
STORMS = repetitions(3, 250)
KINDS = ("server role", "broker", "broker that loads")


@pytest.fixture
def app(broker_app: BrokerApp) -> BrokerApp:
    """An app, not served yet, with an endpoint that sends its own thread a signal."""
    broker_app.write("""
        import signal, threading

        @provider.share(cache=False)
        def take(number):
            signal.pthread_kill(threading.get_ident(), number)
    """)
    return broker_app


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start children as forks, whatever the environment: their start does not matter here."""
    if os.environ.get("SHARED_RPC_TESTS") != "fresh":
        yield
        return
    monkeypatch.delenv("SHARED_RPC_TESTS")
    start_zygote()
    yield
    stop_zygote()


def begin(kind: str, app: BrokerApp, **options: Any) -> Child:
    """Start a process that serves, or is about to."""
    if kind == "server role":
        return app.start_script()
    if kind != "broker that loads":
        return app.start(**options)
    broker = app.begin()
    eventually(begun(app.file.parent / "never"), 40.0)
    return broker


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_a_storm_of_signals_ends_every_server(kind: str, app: BrokerApp, forks: None) -> None:
    """With exit code 0, for one to three signals at random moments, half of them at once."""
    if kind == "broker that loads":
        app.write(f"wait({str(app.file.parent / 'never')!r})")
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    numbers = [signal.SIGTERM, signal.SIGINT] + ([signal.SIGHUP] if kind.startswith("broker") else [])
    for _ in range(STORMS):
        server = begin(kind, app)
        # SIGHUP reloads: another signal ends the process.
        storm = [chance.choice(numbers) for _ in range(chance.randint(0, 2))] + [chance.choice(numbers[:2])]
        chance.shuffle(storm)
        waits = [chance.choice([0.0, chance.uniform(0, 0.3)])] + [
            chance.choice([0.0, 0.0, chance.uniform(0, 0.1)]) for _ in storm
        ]
        for number, seconds in zip(storm, waits, strict=False):
            time.sleep(seconds)
            with suppress(ProcessLookupError):
                server.process.send_signal(number)
        code, said = server.close()
        assert (code, "Traceback" in said) == (0, False), f"{storm}, {waits}: {code}, {said}"
        app.world.children.remove(server)
        for path in app.file.parent.glob("never-*"):
            path.unlink()


def test_signals_taken_by_another_thread_are_handled(app: BrokerApp) -> None:
    """Although they do not interrupt the main thread's wait."""
    server = app.start_script()
    client = app.connect()
    with suppress(errors.ConnectionClosed):
        client.call("take", int(signal.SIGTERM))
    code, said = server.close()
    assert (code, "Traceback" in said) == (0, False)


def test_signals_taken_by_a_brokers_loop_thread_are_handled(app: BrokerApp, tmp_path: Path) -> None:
    """That of its loop."""
    (tmp_path / "hooks.py").write_text(
        "import signal, threading\n"
        "from shared_rpc.observability.events import CallStarted\n"
        "def hook(event):\n"
        "    if isinstance(event, CallStarted):\n"
        "        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)\n"
    )
    broker = app.start(hooks=("hooks:hook",))
    with suppress(errors.ConnectionClosed, errors.WorkerCrashed):
        app.connect().call("plain")
    assert broker.close()[0] == 0


# The exit.

#: A function that never returns.
BLOCKS = """
import atexit, shared_rpc.lifecycle.signals, threading
shared_rpc.lifecycle.signals._GRACE = 0.3
def left():
    threading.Event().wait()
"""
#: By the kind of server: what its process leaves, and how the last line of its output names that.
LEFT = {
    "server role": ("atexit.register(left)", "exit callbacks (atexit)"),
    "broker": ("threading.Thread(target=left, name='saves logs').start()", "thread 'saves logs'"),
}


@pytest.mark.parametrize("kind", LEFT)
def test_a_blocked_exit_is_forced(kind: str, app: BrokerApp) -> None:
    """After a grace period, with a line that names what blocks it: a thread, or an exit callback."""
    leaves, named = LEFT[kind]
    code = f"{BLOCKS}{leaves}\n"
    options: dict[str, Any] = {}
    if kind == "broker":
        (app.file.parent / "hooks.py").write_text(f"{code}def hook(event):\n    pass\n")
        options = {"hooks": ("hooks:hook",)}
    else:
        app.write(code)
    server = begin(kind, app, **options)
    status, said = server.close(signal.SIGTERM)
    assert status == 0 and named in said.splitlines()[-1] and "Traceback" not in said


def test_programs_started_by_exit_callbacks_take_signals() -> None:
    """Although the ending server itself ignores them: what it ignored would be ignored by them too."""
    server = python(
        """
        import atexit, os, signal, subprocess
        from shared_rpc.lifecycle.signals import wait_for_signal

        def end() -> None:
            program = subprocess.Popen(["sleep", "3"])
            os.kill(os.getpid(), signal.SIGTERM)
            program.terminate()
            print("ended with", program.wait())

        atexit.register(end)
        wait_for_signal(lambda: os.kill(os.getpid(), signal.SIGTERM) or True, last=True)
        """,
        fresh=True,
    )
    assert server.expect("ended with") == f"ended with {-signal.SIGTERM}"
    assert server.close() == (0, "")
