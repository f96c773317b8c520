"""Arguments as typed data, which the server can compare, print and cache by without unpickling anything.

Scalars, bytes, and (nested) lists, tuples and string-keyed dicts are sent as MessagePack. Types missing in MessagePack have an
extension type; memory is sent as a reference into the call's tensor table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import msgspec

from shared_rpc.errors import CapabilityError, ProtocolError
from shared_rpc.protocol.records import NO_KWARGS

#: Maximum depth of nesting: deeper arguments are a mistake, and recursion is limited.
_DEPTH = 64

#: Maximum number of values in the arguments of one call, including those in containers. A server's loop decodes them in 0.2 s.
MAX_VALUES = 200_000

#: Bytes of encoded arguments that may be decoded before their values are counted: each byte may be an empty list.
_UNCOUNTED = 1 << 20

#: Maximum bytes of all tuples of a call, with their contents: every level of nesting copies its contents.
_MAX_NESTED = 256 << 20

#: Integers of more bits are written in hexadecimal: Python refuses to write long ones in decimal, and is slow at it.
_DECIMAL_BITS = 256

_TUPLE, _INT, _COMPLEX, _TENSOR, _SKELETON, _DTYPE = range(1, 7)


class TensorRef(msgspec.Struct, frozen=True, array_like=True):
    """Tensor number ``number`` of the call's table."""

    number: int


class SkeletonRef(msgspec.Struct, frozen=True, array_like=True):
    """Skeleton number ``number`` of the call: a module, or a tensor other than a plain strided one."""

    number: int


class DtypeRef(msgspec.Struct, frozen=True, array_like=True):
    """A ``torch.dtype`` by name."""

    name: str

    def __repr__(self) -> str:
        return f"torch.{self.name}"


Leaf = Callable[[Any, str], Any]


#: Maximum characters of a path in an error.
_PATH = 120
_TOO_MANY = f"and the arguments of a call at most {MAX_VALUES:,} in all: pass them as a tensor"


def lower(value: Any, path: str, leaf: Leaf) -> Any:
    """Replace everything in ``value`` other than plain data by the result of ``leaf(item, path)``.

    :raises CapabilityError: for a value that cannot be sent, is nested too deeply or has too many values, naming it.
    """
    return _Lowering(leaf).lower(value, path, 0)


class _Lowering:
    """Lowering of the arguments of one call, up to the limits."""

    def __init__(self, leaf: Leaf, values: int = 0) -> None:
        self._leaf = leaf
        self._values = values

    def lower(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, bytes, complex):
            return value
        if kind is str:
            return _text(value, path)
        if kind in (list, tuple, dict):
            if depth >= _DEPTH:
                raise CapabilityError(
                    f"{_shortened(path)} is nested deeper than {_DEPTH} levels, the limit of an argument, or contains itself: "
                    f"pass a flat list, or a module"
                )
            self._values += len(value)
            if self._values > MAX_VALUES:
                raise CapabilityError(f"{_shortened(path)} has {len(value):,} values, {_TOO_MANY}")
        if kind is list or kind is tuple:
            return kind(self.lower(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value))
        if kind is dict:
            for key in value:
                if type(key) is not str:
                    raise CapabilityError(f"{path} has the key {key!r}: use strings as keys of a dict in a call")
                _text(key, f"a key of {path}")
            return {key: self.lower(item, f"{path}[{key!r}]", depth + 1) for key, item in value.items()}
        return self._leaf(value, path)


def _shortened(path: str) -> str:
    return path if len(path) <= _PATH else f"{path[:_PATH]}…"


def _text(value: str, path: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise CapabilityError(
                f"{path} is no text: {value!r} has a surrogate at position {error.start}; pass os.fsencode(...) of a file name"
            ) from None
    return value


def lower_call(args: Sequence[Any], kwargs: dict[str, Any], leaf: Leaf) -> tuple[list[Any], dict[str, Any]]:
    """Lower all arguments of a call."""
    lowering = _Lowering(leaf, len(args) + len(kwargs))
    return (
        [lowering.lower(value, f"argument {index}", 0) for index, value in enumerate(args)],
        {_text(name, "an argument's name"): lowering.lower(value, f"argument {name!r}", 0) for name, value in kwargs.items()},
    )


def lift(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Replace references in a lowered value by the results of ``leaf(reference)``."""
    kind = type(value)
    if kind in (TensorRef, SkeletonRef, DtypeRef):
        return leaf(value)
    if kind is list or kind is tuple:
        return kind(lift(item, leaf) for item in value)
    if kind is dict:
        return {key: lift(item, leaf) for key, item in value.items()}
    return value


def refuse(value: Any, path: str) -> NoReturn:
    """Refuse a leaf, for calls with plain data only."""
    raise CapabilityError(
        f"{path} is a {type(value).__module__}.{type(value).__name__}: pass None, bool, int, float, complex, str, "
        f"bytes, torch.dtype, tensors and modules, and lists, tuples and string-keyed dicts of them"
    )


def canonical(value: Any) -> str | None:
    """Return one text for equal values, None for a value that is or contains memory.

    The type counts: ``1``, ``1.0`` and ``True`` differ. The order of a dict does not.
    """
    kind = type(value)
    if kind is int and value.bit_length() > _DECIMAL_BITS:
        return hex(value)
    if value is None or kind in (bool, int, float, complex, str, bytes):
        return repr(value)
    if kind is DtypeRef:
        return str(value)
    if kind is dict:
        pairs = [(key, canonical(item)) for key, item in sorted(value.items())]
        return None if any(text is None for _, text in pairs) else "{%s}" % ", ".join(f"{k!r}: {t}" for k, t in pairs)
    if kind is list or kind is tuple:
        texts = [canonical(item) for item in value]
        known = [text for text in texts if text is not None]
        if len(known) < len(texts):
            return None
        return "[%s]" % ", ".join(known) if kind is list else "(%s)" % "".join(f"{text}, " for text in known).rstrip()
    return None


def encode(value: Any) -> Any:
    """Convert a lowered value to types of MessagePack."""
    kind = type(value)
    if kind is int and not -(1 << 63) <= value < (1 << 64):
        return _ext(_INT, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
    if kind is list:
        return [encode(item) for item in value]
    if kind is dict:
        return {key: encode(item) for key, item in value.items()}
    if kind is tuple:
        return _ext(_TUPLE, msgspec.msgpack.encode([encode(item) for item in value]))
    if kind is complex:
        return _ext(_COMPLEX, msgspec.msgpack.encode((value.real, value.imag)))
    if kind in _REFERENCES:
        return _ext(_REFERENCES[kind], msgspec.msgpack.encode(value))
    return value


def encode_call(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[msgspec.Raw, msgspec.Raw]:
    """Return the lowered arguments of a call in MessagePack.

    :raises ProtocolError: for values that MessagePack cannot hold.
    """
    try:
        return (
            msgspec.Raw(_write([encode(value) for value in args])),
            msgspec.Raw(_write({name: encode(value) for name, value in kwargs.items()})) if kwargs else NO_KWARGS,
        )
    except (UnicodeEncodeError, OverflowError, TypeError) as error:
        raise ProtocolError(f"cannot encode the arguments of a call: {error}") from error


def _ext(code: int, data: bytes) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, data)


_REFERENCES: dict[type, int] = {TensorRef: _TENSOR, SkeletonRef: _SKELETON, DtypeRef: _DTYPE}
_references: dict[int, msgspec.msgpack.Decoder[Any]] = {
    code: msgspec.msgpack.Decoder(kind) for kind, code in _REFERENCES.items()
}
_write = msgspec.msgpack.Encoder().encode
_read_args, _read_kwargs = msgspec.msgpack.Decoder(list[Any]).decode, msgspec.msgpack.Decoder(dict[str, Any]).decode
_pairs = msgspec.msgpack.Decoder(tuple[float, float])


def decode(value: Any) -> Any:
    """Return the lowered value written by :func:`encode`.

    :raises ProtocolError: for any other input, or one that exceeds the limits.
    """
    return _Reader().read(value, 0)


def decode_call(args: msgspec.Raw, kwargs: msgspec.Raw) -> tuple[list[Any], dict[str, Any]]:
    """Return the lowered arguments written by :func:`encode_call`; all of them share the limits of :func:`decode`.

    :raises ProtocolError: see :func:`decode`.
    """
    try:
        _check_values(args)
        _check_values(kwargs)
        values, named = _read_args(args), _read_kwargs(kwargs)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"cannot decode the arguments of a call: {error}") from error
    if not values and not named:
        return values, named
    reader = _Reader()
    reader.count(len(values) + len(named))
    return [reader.read(value, 0) for value in values], {name: reader.read(value, 0) for name, value in named.items()}


def count_args(args: msgspec.Raw, kwargs: msgspec.Raw) -> int | None:
    """Return the number of positional arguments of a call without others, if their encoding shows it; None otherwise."""
    first = bytes(memoryview(args)[:1])
    # A "fixarray" of MessagePack: up to 15 elements, with their number in the first byte.
    return first[0] & 0x0F if first and first[0] & 0xF0 == 0x90 and kwargs == NO_KWARGS else None


def _too_many() -> ProtocolError:
    return ProtocolError(f"the arguments of a call have more than {MAX_VALUES:,} values: pass them as a tensor")


@functools.cache
def _heads() -> list[tuple[int, int]]:
    """Return, by a value's first byte, the size of the value without the contents of a container, and the number of following
    bytes that encode a length.
    """
    sizes = {code: code - 0x9F for code in range(0xA0, 0xC0)}
    sizes |= {0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}
    sizes |= {0xD4: 3, 0xD5: 4, 0xD6: 6, 0xD7: 10, 0xD8: 18, 0xDC: 3, 0xDD: 5, 0xDE: 3, 0xDF: 5}
    lengths = {0xC4: (2, 1), 0xC5: (3, 2), 0xC6: (5, 4), 0xC7: (3, 1), 0xC8: (4, 2), 0xC9: (6, 4)}
    lengths |= {0xD9: (2, 1), 0xDA: (3, 2), 0xDB: (5, 4)}
    return [lengths.get(code, (sizes.get(code, 1), 0)) for code in range(256)]


def _check_values(data: msgspec.Raw | bytes) -> None:
    """Check, before anything is built, that encoded values are not too many. Short input is not checked.

    :raises ProtocolError: if there are too many.
    """
    view = memoryview(data)
    place, end, left = 0, len(view), 2 * MAX_VALUES + 1  # a dict has keys too, and all of it is one more
    if end <= _UNCOUNTED:
        return
    heads = _heads()
    while place < end:
        size, length = heads[view[place]]
        if length:
            size += int.from_bytes(view[place + 1 : place + 1 + length], "big")
        place += size
        left -= 1
        if left < 0:
            raise _too_many()


class _Reader:
    """Reader of encoded values, up to the limits."""

    def __init__(self) -> None:
        self._values = 0
        self._nested = 0

    def count(self, values: int) -> None:
        self._values += values
        if self._values > MAX_VALUES:
            raise _too_many()

    def read(self, value: Any, depth: int) -> Any:
        if value is None or isinstance(value, (bool, int, float, str, bytes)):
            return value
        if isinstance(value, msgspec.msgpack.Ext):
            return self._read_ext(value, depth)
        self._check_depth(depth)
        if isinstance(value, list):
            self.count(len(value))
            return [self.read(item, depth + 1) for item in value]
        if isinstance(value, dict):
            self.count(len(value))
            if not all(isinstance(key, str) for key in value):
                raise ProtocolError("an argument has a dict with keys that are not strings")
            return {key: self.read(item, depth + 1) for key, item in value.items()}
        raise ProtocolError(f"an argument is a {type(value).__name__}")

    def _check_depth(self, depth: int) -> None:
        if depth >= _DEPTH:
            raise ProtocolError(f"an argument is nested deeper than {_DEPTH} levels")

    def _read_ext(self, ext: msgspec.msgpack.Ext, depth: int) -> Any:
        data = bytes(ext.data)
        self._nested += len(data)
        if self._nested > _MAX_NESTED:
            raise ProtocolError("tuples with too much data are nested too deeply")
        try:
            if ext.code == _TUPLE:
                self._check_depth(depth)
                _check_values(data)
                items = msgspec.msgpack.decode(data)
                if not isinstance(items, list):
                    raise ProtocolError("a tuple argument has no list")
                self.count(len(items))
                return tuple(self.read(item, depth + 1) for item in items)
            if ext.code == _INT:
                return int.from_bytes(data, "big", signed=True)
            if ext.code == _COMPLEX:
                return complex(*_pairs.decode(data))
            if ext.code in _references:
                reference = _references[ext.code].decode(data)
                if isinstance(reference, DtypeRef) and not reference.name.isidentifier():
                    raise ProtocolError(f"{reference.name!r} cannot name a dtype")
                return reference
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise ProtocolError(f"cannot decode an argument: {error}") from error
        raise ProtocolError(f"an argument has the unknown extension type {ext.code}")
