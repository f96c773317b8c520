"""What travels between the router and a worker: msgpack, in frames with 4 bytes of length before it."""

from __future__ import annotations

import msgspec


class Request(msgspec.Struct):
    """A model's name, and its input: bytes in C order."""

    model: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Answer(msgspec.Struct):
    """The logits, or what was wrong; and which generation of the weights they come from, 0 for weights of one's own.

    The first one that a worker sends says that it is ready, or why it will not be.
    """

    generation: int = 0
    logits: list[float] = []
    error: str = ""


def frame(message: Request | Answer) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body
