"""Arguments as plain data: lossless both ways, one text for equal values, and clear errors for all others."""

from __future__ import annotations

import datetime
import enum
import struct
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_rpc.errors import CapabilityError, ProtocolError
from shared_rpc.protocol import messages as m
from shared_rpc.protocol import values as values_module
from shared_rpc.protocol.catalogue import decode_message, encode_message
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.values import (
    DtypeRef,
    SkeletonRef,
    TensorRef,
    canonical,
    decode,
    decode_call,
    encode_call,
    lift,
    lower,
    lower_call,
    refuse,
)

#: Containers within containers that a call may have.
DEPTH = 64


class Memory:
    """A placeholder of a tensor."""


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(2**60, 2**70)
    | st.integers(-(2**2000), 2**2000)
    | st.floats()
    | st.complex_numbers()
    | st.text(max_size=8)
    | st.binary(max_size=8)
)


def trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Generate nested lists, tuples and dicts."""
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.lists(inner, max_size=4).map(tuple)
            | st.dictionaries(st.text(max_size=4), inner, max_size=4)
        ),
        max_leaves=12,
    )


def exact(value: Any) -> Any:
    """Return the same for values of the same types and bits: 1, 1.0 and True differ, nan equals itself, dicts have no order."""
    kind = type(value)
    if kind is float:
        return kind, struct.pack("d", value)
    if kind is complex:
        return kind, struct.pack("dd", value.real, value.imag)
    if kind in (list, tuple):
        return kind, tuple(exact(item) for item in value)
    if kind is dict:
        return kind, frozenset((key, exact(item)) for key, item in value.items())
    return kind, value


def travelled(lowered: Any) -> Any:
    """Return the argument as the server sees it."""
    kind, body = encode_message(m.Call("f", *encode_call([lowered], {"named": lowered})))
    call = decode_message(Frame(kind, 1, body))
    assert isinstance(call, m.Call)
    (positional,), named = decode_call(call.args, call.kwargs)
    assert exact(positional) == exact(named["named"])
    return positional


@given(trees(scalars | st.just(DtypeRef("bfloat16"))))
def test_plain_data_round_trips(value: Any) -> None:
    """Including types, signs of zero, nan and large integers; the order of a dict; and the text, from which keys are made."""
    lowered = lower(value, "x", lambda item, path: item)
    arrived = travelled(lowered)
    assert exact(arrived) == exact(value)
    assert repr(arrived) == repr(value)
    assert canonical(arrived) == canonical(value)


@given(trees(scalars | st.builds(Memory)))
def test_memory_travels_by_reference(value: Any) -> None:
    """Everything except plain data is replaced by a reference on one side and restored on the other, at any depth."""
    sent: list[Any] = []

    def leaf(item: Any, path: str) -> TensorRef | SkeletonRef:
        sent.append(item)
        return (TensorRef, SkeletonRef)[len(sent) % 2](len(sent) - 1)

    lowered = lower(value, "x", leaf)
    arrived = lift(travelled(lowered), lambda reference: sent[reference.number])
    assert exact(arrived) == exact(value)
    assert (canonical(travelled(lowered)) is None) == bool(sent)


#: Values that are easily confused with one another, and texts in the form of another value.
LOOKALIKES: list[Any] = [
    None, True, False, 0, 1, -1, 0.0, -0.0, 1.0, 1j, 0j, complex(0.0, -0.0), float("nan"), float("inf"), 2**300, -(2**300),
    "", "None", "True", "1", "1.0", "nan", "'1'", "1, 1", "[1]", "(1,)", "torch.int8", "a': 1, 'b", hex(2**300),
    b"", b"1", "b'1'", DtypeRef("int8"), DtypeRef("int16"),
    [], (), {}, [1], (1,), [1, 1], (1, 1), ["1, 1"], ["1", "1"], [[1], 1], [[1, 1]], [[]], ([],), [()], [None], [True], [1.0],
    {"": 1}, {"a": 1}, {"a": 1.0}, {"a": True}, {"a": 1, "b": 1}, {"a': 1, 'b": 1}, {"a": [1]}, {"a": (1,)}, {"a": {"b": 1}},
]  # fmt: skip


@given(trees(st.sampled_from(LOOKALIKES)), trees(st.sampled_from(LOOKALIKES)))
def test_equal_text_means_equal_values(one: Any, other: Any) -> None:
    """In both directions, for values made of easily confused parts."""
    assert (canonical(one) == canonical(other)) == (exact(one) == exact(other))


class Level(enum.IntEnum):
    """A subclass of int."""

    LOW = 1


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((object(),), {}, r"argument 0 is a builtins\.object: pass None, bool, int, .*tensors and modules"),
        ((1, [2, {"model": {3}}]), {}, r"argument 1\[1\]\['model'\] is a builtins\.set"),
        ((), {"config": ((), {"when": datetime.datetime(2024, 1, 1)})}, r"argument 'config'\[1\]\['when'\] is a datetime"),
        ((Level.LOW,), {}, r"argument 0 is a .*\.Level"),
        (([{1: 2}],), {}, r"argument 0\[0\] has the key 1: use strings as keys of a dict in a call"),
        ((["ok", "\udcff.pt"],), {}, r"argument 0\[1\] is no text: '\\udcff\.pt' has a surrogate at position 0"),
        (({"\ud800": 1},), {}, r"a key of argument 0 is no text"),
        ((), {"\ud800": 1}, r"an argument's name is no text"),
    ],
)
def test_refusals_name_the_place(args: tuple[Any, ...], kwargs: dict[str, Any], message: str) -> None:
    """The argument, the path in it, the value, and the allowed types."""
    with pytest.raises(CapabilityError, match=message):
        lower_call(args, kwargs, refuse)


NESTS: list[Callable[[Any], Any]] = [lambda inner: [inner], lambda inner: (inner,), lambda inner: {"k": inner}]


def nested(levels: int, nest: Callable[[Any], Any]) -> Any:
    """Nest a scalar in ``levels`` containers."""
    value: Any = 1
    for _ in range(levels):
        value = nest(value)
    return value


@pytest.mark.parametrize("nest", NESTS, ids=["list", "tuple", "dict"])
def test_the_deepest_value_round_trips(nest: Callable[[Any], Any]) -> None:
    """The server accepts the caller's limit, with memory at the bottom."""
    value = nested(DEPTH, nest)
    assert travelled(lower(value, "x", refuse)) == value
    assert canonical(value) is not None
    lower(nested(DEPTH - 1, nest), "x", refuse)
    assert lower(nest(nested(DEPTH - 1, lambda inner: [Memory()])), "x", lambda item, path: TensorRef(0))


@pytest.mark.parametrize("nest", NESTS, ids=["list", "tuple", "dict"])
def test_a_deeper_value_is_refused_on_both_sides(nest: Callable[[Any], Any]) -> None:
    """By the caller with the path, and by the server if the caller does not."""
    value = nested(DEPTH + 1, nest)
    with pytest.raises(CapabilityError, match=rf"argument 0\[.* is nested deeper than {DEPTH} levels"):
        lower_call([value], {}, refuse)
    with pytest.raises(ProtocolError, match=f"nested deeper than {DEPTH} levels"):
        travelled(value)


def test_recursive_lists_are_refused() -> None:
    """It has no end."""
    value: list[Any] = []
    value.append(value)
    with pytest.raises(CapabilityError, match="or contains itself"):
        lower_call([value], {}, refuse)


def ext(code: int, data: bytes) -> Any:
    """Return an extension value as decoded from a message."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.msgpack.Ext(code, data)))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({1: 2}, "keys that are not strings"),
        ([{b"k": 2}], "keys that are not strings"),
        (datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC), "an argument is a datetime"),
        (ext(99, b""), "unknown extension type 99"),
        (ext(1, b"\x01"), "a tuple argument has no list"),
        (ext(1, b"\x91\xa1\xff"), "cannot decode"),
        (ext(1, b"\x91" * 100_000), "cannot decode"),
        (ext(3, b"\x92\x01\xa1x"), "cannot decode"),
        (ext(4, b"\x91\xa1x"), "cannot decode"),
        (ext(6, msgspec.msgpack.encode(["int8, y=2"])), "'int8, y=2' cannot name a dtype"),
    ],
)
def test_malformed_arguments_are_refused(value: Any, message: str) -> None:
    """With a ProtocolError that describes it."""
    with pytest.raises(ProtocolError, match=message):
        decode(value)


@given(
    trees(
        scalars.filter(lambda value: type(value) not in (int, complex))
        | st.integers(-(2**63), 2**64 - 1)
        | st.datetimes(timezones=st.just(datetime.UTC))
        | st.builds(msgspec.msgpack.Ext, st.integers(-1, 9), st.binary(max_size=12))
        | st.dictionaries(st.integers(0, 9) | st.binary(max_size=2), st.none(), max_size=2)
    )
)
def test_any_message_pack_is_an_argument_or_a_protocol_error(value: Any) -> None:
    """Any input becomes plain data that has a text or contains a reference, or an error."""
    try:
        data = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
    except msgspec.DecodeError:
        return
    try:
        decoded = decode(data)
    except ProtocolError:
        return
    assert exact(travelled(decoded)) == exact(decoded)


def refuse_memory(value: Any, path: str) -> Any:
    """Refuse memory: these tests have none."""
    raise AssertionError(path)


@pytest.mark.parametrize(
    ("args", "kwargs", "where"),
    [
        ([[[1, 2]] * 3_000_000], {}, "argument 0 has 3,000,000 values"),
        ([1], {"pairs": [[1, 2]] * 70_000}, r"argument 'pairs'\[\d+\] has 2 values"),
        ([[0] * 150_000, {str(number): 0 for number in range(50_001)}], {}, "argument 1 has 50,001 values"),
    ],
    ids=["at once", "in all", "in several arguments"],
)
def test_arguments_with_too_many_values_are_refused_before_they_are_sent(
    args: list[Any], kwargs: dict[str, Any], where: str
) -> None:
    """The error names the excessive container, and the remedy."""
    with pytest.raises(
        CapabilityError, match=f"{where}, and the arguments of a call at most 200,000 in all: pass them as a tensor"
    ):
        lower_call(args, kwargs, refuse_memory)


#: Lengths with forms of their own, and numbers.
LENGTHS = [0, 1, 2, 3, 4, 8, 15, 16, 17, 31, 32, 255, 256, 65_535, 65_536]
INTEGERS = [0, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, 2**64 - 1, -1, -32, -33, -128, -129, -(2**15), -(2**31)]


def test_every_form_of_a_value_counts_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers, text, bytes and extensions of all lengths; containers count their contents too, and keys."""
    monkeypatch.setattr(values_module, "_UNCOUNTED", 0)
    one: list[Any] = [None, True, 1.5, *INTEGERS, -(2**31) - 1]
    one += [make(length) for length in LENGTHS for make in ("x".__mul__, bytes, lambda n: msgspec.msgpack.Ext(5, bytes(n)))]
    encoded = [(msgspec.msgpack.encode([value, 1]), 3) for value in one]
    encoded += [(b"\x92\xca\0\0\0\0\1", 3)]  # a float of 32 bits, as other programs write it
    encoded += [(msgspec.msgpack.encode([[0] * length, 1]), 3 + length) for length in LENGTHS]
    encoded += [(msgspec.msgpack.encode([dict.fromkeys(map(str, range(n))), 1]), 3 + 2 * n) for n in LENGTHS]
    for data, count in encoded:
        for limit in (count, count - 1):
            monkeypatch.setattr(values_module, "MAX_VALUES", (limit - 1) / 2)
            with pytest.raises(ProtocolError) if limit < count else nullcontext():
                values_module._check_values(data)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [([(1, 2, 3, 4)], {}), ([{"a": 1, "b": 2, "c": 3, "d": 4}], {}), ([[1], (2,)], {"a": {"k": []}})],
    ids=["tuple", "dict", "in all"],
)
def test_values_of_a_call_are_limited_where_it_arrives(
    monkeypatch: pytest.MonkeyPatch, args: list[Any], kwargs: dict[str, Any]
) -> None:
    """All of them together, in containers of every kind, with the arguments themselves."""
    encoded = encode_call(args, kwargs)
    total = 5 + ("k" in str(kwargs))
    monkeypatch.setattr(values_module, "MAX_VALUES", total)
    assert decode_call(*encoded) == (args, kwargs)
    monkeypatch.setattr(values_module, "MAX_VALUES", total - 1)
    with pytest.raises(ProtocolError, match=r"have more than . values: pass them as a tensor"):
        decode_call(*encoded)
