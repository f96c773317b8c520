"""Messages: each side reads what the other writes, and refuses anything else."""

from __future__ import annotations

import enum
import types
import typing
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_rpc.errors import ProtocolError
from shared_rpc.protocol import catalogue
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.catalogue import NUMBERS, decode_message, encode_message
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.messages import Message


def below(kind: type[Message]) -> list[type[Message]]:
    """Return all subclasses of a class."""
    return [found for child in kind.__subclasses__() for found in (child, *below(child))]


#: All messages, without the structs of their common fields.
KINDS = [kind for kind in below(Message) if kind not in (m.RecordBody, m.Query)]
numbers = st.integers(-(2**63), 2**64 - 1)
plain: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | numbers | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def values_of(annotation: Any) -> st.SearchStrategy[Any]:
    """Generate values of a field. Add new field types here."""
    if annotation in PLAIN:
        return PLAIN[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return st.sampled_from(list(annotation))
    if origin is typing.Annotated:
        return values_of(arguments[0])
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values_of(argument) for argument in arguments])
    if origin is list:
        return st.lists(values_of(arguments[0]), max_size=3)
    if origin is tuple:
        return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=3)
    if typing.is_typeddict(annotation):
        keys = {key: values_of(kind) for key, kind in typing.get_type_hints(annotation).items()}
        optional = {key: keys.pop(key) for key in annotation.__optional_keys__}
        return st.fixed_dictionaries(keys, optional=optional)
    return structs(annotation)


def structs(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Generate instances of a struct, with every field set."""
    return st.builds(kind, **{field.name: values_of(field.type) for field in msgspec.structs.fields(kind)})


PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(max_size=5),
    int: numbers,
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
    type(None): st.none(),
    bytes: st.binary(max_size=5),
    Any: plain,
    msgspec.Raw: plain.map(msgspec.msgpack.encode).map(msgspec.Raw),
}


def frame_of(message: Message) -> Frame:
    """Return a message's frame."""
    kind, body = encode_message(message)
    return Frame(kind, 1, body)


def comparable(message: Message) -> Any:
    """Return all fields, with memory views as bytes."""
    return [type(message), *(bytes(v) if isinstance(v, msgspec.Raw) else v for v in msgspec.structs.astuple(message))]


def any_message() -> st.SearchStrategy[Message]:
    """Generate instances of any message."""
    return st.sampled_from(KINDS).flatmap(structs)


@given(any_message())
def test_every_message_round_trips(message: Message) -> None:
    """With every field filled in."""
    assert comparable(decode_message(frame_of(message))) == comparable(message)


def test_every_message_has_one_kind_byte() -> None:
    """None is missing, and no two share a number."""
    assert sorted(kind.__name__ for kind in catalogue._KINDS.values()) == sorted(kind.__name__ for kind in KINDS)
    assert all(1 <= number <= 255 for number in catalogue._KINDS)


@pytest.mark.parametrize("kind", [0, max(catalogue._KINDS) + 1, 255])
def test_an_unknown_kind_is_named(kind: int) -> None:
    """A kind byte without a message."""
    with pytest.raises(ProtocolError, match=f"unknown message kind {kind}"):
        decode_message(Frame(kind, 1, b"\x90"))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "truncated"),
        (b"\x80", "Expected `array`"),
        (b"\xc0", "Expected `array`"),
        (b"\xdd\xff\xff\xff\xff", ""),
        (b"\x91" * 100_000, ""),
        (b"\x9f" + b"\x81\xa1k" * 100_000, ""),
        (b"\xc1", ""),
    ],
    ids=["empty", "map", "nil", "4 Gi items", "deep lists", "deep maps", "reserved byte"],
)
def test_malformed_bodies_name_their_message(body: bytes, reason: str) -> None:
    """Structures that no sender writes, for every kind of message."""
    for kind in KINDS:
        with pytest.raises(ProtocolError, match=rf"cannot decode a {kind.__name__} message: .*{reason}"):
            decode_message(Frame(NUMBERS[kind], 1, body))


@given(any_message(), plain, st.data())
def test_bodies_that_are_longer_or_shorter_are_refused(message: Message, surplus: Any, data: st.DataObject) -> None:
    """By a field, as of a later protocol, by bytes after the message, or by an end at any byte."""
    kind, body = encode_message(message)
    further = msgspec.msgpack.encode([*msgspec.msgpack.decode(body), surplus])
    followed = body + data.draw(st.binary(min_size=1, max_size=4))
    for wrong in (further, followed, body[: data.draw(st.integers(0, len(body) - 1))]):
        with pytest.raises(ProtocolError, match=type(message).__name__):
            decode_message(Frame(kind, 1, wrong))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=settings.default.max_examples // 20)
@given(data=st.data())
def test_fields_of_another_type_are_refused(kind: type[Message], data: st.DataObject) -> None:
    """No field is converted."""
    number, body = encode_message(data.draw(structs(kind)))
    for index, field in enumerate(msgspec.structs.fields(kind)):
        if field.type is msgspec.Raw:  # which the reader decodes
            continue
        items = msgspec.msgpack.decode(body)
        items[index] = msgspec.msgpack.Ext(100, b"")
        with pytest.raises(ProtocolError, match=rf"cannot decode a {kind.__name__} message: .*at `\$\[{index}\]"):
            decode_message(Frame(number, 1, msgspec.msgpack.encode(items)))


@given(any_message(), st.data())
def test_damaged_messages_are_protocol_errors_or_others(message: Message, data: st.DataObject) -> None:
    """One wrong byte, including text that is not UTF-8."""
    kind, body = encode_message(message)
    damaged = bytearray(body)
    damaged[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    with suppress(ProtocolError):
        assert type(decode_message(Frame(kind, 1, bytes(damaged)))) is type(message)


@pytest.mark.parametrize(
    "message",
    [m.GetObjectInfo("\udc80"), m.ListRuns(1 << 64), m.Result(object(), [])],
    ids=["surrogate", "large", "no data"],
)
def test_values_without_an_encoding_are_refused_by_the_sender(message: Message) -> None:
    """MessagePack has no surrogates, no integers of more than 64 bits, and no objects."""
    with pytest.raises(ProtocolError, match=f"cannot encode a {type(message).__name__} message: "):
        encode_message(message)
