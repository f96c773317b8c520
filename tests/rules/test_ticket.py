"""Files of tickets: whole, private, and trusted only if no other user may have written them."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from shared_rpc import Ticket
from shared_rpc.errors import ConfigurationError, TicketError

TICKET = Ticket(
    socket_path="/run/s-cpu.sock",
    server_id="0123456789abcdef",
    object_id="0" * 24,
    kind="result",
    endpoint="load",
    cache_key="load()",
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a ticket."""
    return tmp_path / "model.ticket"


def test_files_are_private_and_complete(path: Path) -> None:
    """0600 whatever the umask, and readers never see a partial file during a rewrite."""
    previous = os.umask(0)
    try:
        TICKET.write(path)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            TICKET.write(path)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(200):
            assert Ticket.read(path).object_id == TICKET.object_id
    finally:
        stop.set()
        writer.join()
    assert os.listdir(path.parent).count(path.name) == 1
    assert not [name for name in os.listdir(path.parent) if name.endswith(".part")]


def test_a_failed_write_is_reported(tmp_path: Path) -> None:
    """With the file's name, and nothing is left in its directory."""
    with pytest.raises(ConfigurationError, match=r"cannot write the ticket .*missing/model\.ticket"):
        TICKET.write(tmp_path / "missing" / "model.ticket")
    (tmp_path / "directory").mkdir()
    with pytest.raises(ConfigurationError, match="cannot write"):
        TICKET.write(tmp_path / "directory")
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".part")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00", "is no complete ticket"),
        (b"{}", "is no complete ticket"),
        (b"[" * 100_000, "is no complete ticket"),
        (b'{"version": 3, "new": true}', "is no complete ticket of this release"),
    ],
)
def test_malformed_tickets_are_refused(path: Path, content: bytes, message: str) -> None:
    """With the problem and the remedy."""
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(TicketError, match=message) as caught:
        Ticket.read(path)
    assert caught.value.reason == "malformed"
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("changes", [{"object_id": "a" * 101}, {"cache_key": 1}, {"kind": "model"}, {"extra": 1}], ids=str)
def test_fields_of_another_type(path: Path, changes: dict[str, Any]) -> None:
    """Every field is checked before it is used."""
    TICKET.write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(TicketError) as caught:
        Ticket.read(path)
    assert caught.value.reason == "malformed"


def test_missing_files_are_reported(path: Path) -> None:
    """And other kinds of files, without waiting for a pipe."""
    with pytest.raises(TicketError, match="cannot read the ticket") as caught:
        Ticket.read(path)
    assert caught.value.reason == "unreadable"
    os.mkfifo(path, 0o600)
    with pytest.raises(TicketError, match="no regular file") as caught:
        Ticket.read(path)
    assert caught.value.reason == "unreadable"
    with pytest.raises(TicketError, match=f"cannot read the ticket {path.parent}: Is a directory$"):
        Ticket.read(path.parent)


@pytest.mark.parametrize("mode", [0o602, 0o620])
def test_files_writable_by_others_are_refused(path: Path, mode: int) -> None:
    """Even if they are this user's."""
    TICKET.write(path)
    path.chmod(mode)
    with pytest.raises(TicketError, match=f"mode {mode:04o}.*chmod 600") as caught:
        Ticket.read(path)
    assert caught.value.reason == "untrusted"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_files_of_another_user_are_refused(path: Path) -> None:
    """The error names both users."""
    TICKET.write(path)
    os.chown(path, 12345, -1)
    with pytest.raises(TicketError, match=r"belongs to uid 12345, but this process has uid 0") as caught:
        Ticket.read(path)
    assert caught.value.reason == "untrusted"
