"""The exception tree: the drawing in its docstring, the fields that are sent, and the errors on the other side."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest

from shared_rpc import errors
from shared_rpc.errors import (
    BufferNotFound,
    ChannelClosed,
    RecordError,
    RemoteError,
    SharedRPCError,
    StaleHandleError,
    StateMismatchError,
    TaskError,
    TicketError,
    UpdateInterrupted,
    WorkerCrashed,
    from_wire,
    to_wire,
)
from shared_rpc.protocol.catalogue import decode_message, encode_message
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.messages import Error


def tree(root: type[SharedRPCError]) -> list[type[SharedRPCError]]:
    """Return a class and all its subclasses."""
    return [root, *(found for child in root.__subclasses__() for found in tree(child))]


TREE = [kind for kind in tree(SharedRPCError) if kind.__module__ == errors.__name__]

SPECIMENS = {
    BufferNotFound: BufferNotFound("buffer 1 was freed", reason="freed"),
    RemoteError: RemoteError("no such file", type_name="app.LoadError", traceback="Traceback (most recent call last): ..."),
    ChannelClosed: ChannelClosed("it was killed", reason="ended", pid=17),
    UpdateInterrupted: UpdateInterrupted("it was killed", revision=3, pid=17),
    StaleHandleError: StaleHandleError("the object is gone", reason="server_changed"),
    WorkerCrashed: WorkerCrashed("the worker (pid 7) was killed", signal="SIGSEGV", stderr="Fatal Python error"),
    StateMismatchError: StateMismatchError("they do not fit", missing=["a.b", "c"], mismatched=["d is (1,) in one"]),
    TicketError: TicketError("kv.json is no ticket", reason="malformed"),
    RecordError: RecordError("load.record is no record", reason="malformed"),
    TaskError: TaskError("task 1 has expired", reason="expired"),
}


def specimen(kind: type[SharedRPCError]) -> SharedRPCError:
    """Return an error of that class with every attribute that it can have."""
    return SPECIMENS.get(kind) or kind(f"a {kind.__name__} at /run/s.sock")


def travelled(error: BaseException) -> Exception:
    """Return the error as raised on the other side."""
    kind, body = encode_message(Error(*to_wire(error)))
    message = decode_message(Frame(kind, 1, body))
    assert isinstance(message, Error)
    return from_wire(message.code, message.text, message.detail)


@pytest.mark.parametrize("kind", TREE)
def test_every_class_round_trips(kind: type[SharedRPCError]) -> None:
    """Type, text and attributes."""
    error = specimen(kind)
    arrived = travelled(error)
    assert type(arrived) is kind
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)


@pytest.mark.parametrize("kind", TREE)
@pytest.mark.parametrize("duplicate", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy], ids=["pickle", "copy"])
def test_every_class_can_be_pickled(kind: type[SharedRPCError], duplicate: Callable[[Exception], Exception]) -> None:
    """For errors raised in a user's process pool."""
    error = specimen(kind)
    again = duplicate(error)
    assert (type(again), str(again), vars(again)) == (kind, str(error), vars(error))


def test_every_class_has_a_code_of_its_own() -> None:
    """With its parent's code, it would arrive as its parent, or the parent as the class."""
    assert all("code" in vars(kind) for kind in TREE)
    assert len({kind.code for kind in TREE}) == len(TREE)


def test_an_unknown_code_is_the_root_class() -> None:
    """A server of a later release may raise an error unknown here; ``except SharedRPCError`` catches it."""
    error = from_wire("of-a-later-release", "the moon is full", {"phase": "1.0"})
    assert type(error) is SharedRPCError
    assert str(error) == "the moon is full"


def test_other_errors_name_their_type() -> None:
    """A defect of the library arrives as such, and not as the caller's error."""
    assert str(travelled(KeyError("table"))) == "KeyError: 'table'"
    assert type(travelled(TypeError("'NoneType' object is not iterable"))) is SharedRPCError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (errors.ConfigurationError("/models/\udcff.pt is no file"), r"/models/\udcff.pt is no file"),
        (RemoteError("\udcff", type_name="OSError", traceback="File '\udcff'"), r"OSError: \udcff"),
        (ValueError("\udcff"), r"ValueError: \udcff"),
    ],
)
def test_texts_that_are_not_unicode_are_escaped(error: Exception, text: str) -> None:
    """Such as file names that are not UTF-8."""
    assert str(travelled(error)) == text


class Unprintable(Exception):
    """An exception whose description fails."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_errors_without_a_text_round_trip() -> None:
    """Sending an error never raises another."""
    assert str(travelled(Unprintable())) == "Unprintable: <its __str__ raised RuntimeError>"
