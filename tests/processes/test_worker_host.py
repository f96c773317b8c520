"""A worker's side of its connection to the broker, without a broker."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from shared_rpc import Provider
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.messages import Error
from shared_rpc.settings import ServeOptions
from shared_rpc.worker.host import Hosted, WorkerHost
from tests.kit.raw import Raw

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[WorkerHost, Raw]]:
    """A worker without endpoints, and the broker's end of the connection."""
    monkeypatch.setattr(MAPPINGS, "keeps", MAPPINGS.keeps)  # a worker's process keeps mappings
    mine, theirs = socket.socketpair()
    host = WorkerHost(theirs.detach(), ServeOptions(), 0)
    host.start()
    with Raw(mine, hello=False) as broker:
        yield host, broker
    host.wait()


def test_memory_that_cannot_be_sent_is_reported(worker: tuple[WorkerHost, Raw], monkeypatch: pytest.MonkeyPatch) -> None:
    """At its limit of files, the worker answers with the reason and keeps no descriptor."""
    host, broker = worker
    send = host._stream.send

    def at_the_limit(message: Any, number: int = 0, payload: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        if fds:
            raise OSError(errno.EMFILE, "Too many open files")
        send(message, number, payload, fds)

    monkeypatch.setattr(host._stream, "send", at_the_limit)
    answer = broker.ask(w.Allocate("cpu", 4096))
    assert isinstance(answer, Error) and "OSError: [Errno 24] Too many open files" in answer.text


def test_memory_without_a_thread_is_refused(worker: tuple[WorkerHost, Raw], monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker answers with the reason."""
    host, broker = worker
    monkeypatch.setattr(host._memory._threads, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    answer = broker.ask(w.Allocate("cpu", 4096))
    assert isinstance(answer, Error) and "can't start new thread" in answer.text


def test_runs_without_a_thread_are_refused(worker: tuple[WorkerHost, Raw], monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker answers with the reason, and continues."""
    host, broker = worker
    provider = Provider(device="cpu", execution_mode="local")
    provider.share("f")(lambda: None)
    hosted = host._hosted["key"] = Hosted("key", provider, None)
    monkeypatch.setattr(hosted.executor, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    for number in (1, 2):
        answer = broker.ask(w.StartRun("f", key="key"), number)
        assert isinstance(answer, w.RunFailed) and "can't start new thread" in answer.text
