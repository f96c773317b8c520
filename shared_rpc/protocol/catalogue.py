"""The catalogue of messages: their numbers on the wire, and the conversion between messages and bodies of frames."""

from __future__ import annotations

import zlib
from typing import Protocol

import msgspec

from shared_rpc.errors import ProtocolError
from shared_rpc.protocol import exported as x
from shared_rpc.protocol import generations as g
from shared_rpc.protocol import messages as m
from shared_rpc.protocol import records, specs, tasks
from shared_rpc.protocol import sources as s
from shared_rpc.protocol import tiers as t
from shared_rpc.protocol import worker as w


class Encoded(Protocol):
    """The parts of a frame that make its message."""

    kind: int
    body: bytes


_MODULES = (m, g, x, s, t, w)
#: Classes of fields that several messages have.
_BASES = (m.Message, m.Query, m.RecordBody)
#: The messages by kind byte, in the order of their definitions.
_KINDS: dict[int, type[m.Message]] = dict(
    enumerate(
        (
            kind
            for module in _MODULES
            for kind in vars(module).values()
            if isinstance(kind, type)
            and issubclass(kind, m.Message)
            and kind.__module__ == module.__name__
            and kind not in _BASES
        ),
        start=1,
    )
)
#: The kind byte by the message's class.
NUMBERS = {kind: number for number, kind in _KINDS.items()}


def _version() -> int:
    """Return a digest of the messages and of their parts: peers with others cannot understand each other."""
    structs = [
        (name, kind.__struct_fields__, kind.__annotations__)
        for module in (*_MODULES, records, specs, tasks)
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    ]
    return zlib.crc32(repr(structs).encode()) & 0xFF


#: The version in every header.
VERSION = _version()
#: Decoders by kind byte, each made on first use: to make all of them takes some milliseconds of an import.
_decoders: dict[int, msgspec.msgpack.Decoder[m.Message]] = {}
_encode = msgspec.msgpack.Encoder().encode


def encode_message(message: m.Message) -> tuple[int, bytes]:
    """Return ``(kind, body)`` for a frame.

    :raises ProtocolError: for values that MessagePack cannot hold, such as a text with surrogates.
    """
    try:
        return NUMBERS[type(message)], _encode(message)
    except (UnicodeEncodeError, OverflowError, TypeError) as error:
        raise ProtocolError(f"cannot encode a {type(message).__name__} message: {error}") from error


def decode_message(frame: Encoded) -> m.Message:
    """Decode the message of a frame.

    :raises ProtocolError: for an unknown kind, or a body of another kind.
    """
    decoder = _decoders.get(frame.kind)
    if decoder is None:
        if frame.kind not in _KINDS:
            raise ProtocolError(f"unknown message kind {frame.kind}")
        decoder = _decoders[frame.kind] = msgspec.msgpack.Decoder(_KINDS[frame.kind])
    try:
        return decoder.decode(frame.body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"cannot decode a {_KINDS[frame.kind].__name__} message: {error}") from error
