"""Options and arguments that several commands take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from shared_rpc.errors import ConfigurationError

BasePath = Annotated[
    str | None,
    typer.Option("--base-path", help="Only servers of this base path; by default all in its directory."),
]
Socket = Annotated[str | None, typer.Option("--socket", help="The server's socket, if several are alive.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Timeout = Annotated[
    float | None,
    typer.Option("--timeout", metavar="SECONDS", min=0, help="Maximum time to wait; 0 does not wait, no limit by default."),
]
Arguments = list[str] | None


class Misuse(ConfigurationError):
    """Options or arguments of a command that cannot be used; its exit code is 2."""


@contextmanager
def as_misuse() -> Iterator[None]:
    """Raise a :class:`ConfigurationError` about the value of an option as :class:`Misuse`."""
    try:
        yield
    except ConfigurationError as error:
        raise Misuse(str(error)) from error


def keywords(arguments: Arguments) -> dict[str, Any]:
    """Parse keyword arguments of a call, each ``key=value``. A value that is no Python literal is a string.

    :raises Misuse: for a text of another form.
    """
    return dict(_argument(text) for text in arguments or ())


def _argument(text: str) -> tuple[str, Any]:
    import ast

    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise Misuse(f"{text!r} is no argument: write key=value")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value
