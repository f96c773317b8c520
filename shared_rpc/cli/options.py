"""Options and arguments shared by several commands, and amounts of memory in human notation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from shared_rpc.errors import ConfigurationError
from shared_rpc.memory.devices import check_name

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

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(?:i?B)?)?", re.IGNORECASE)
_UNITS = {None: 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_FRACTION = re.compile(r"\d*\.\d+")


class Misuse(ConfigurationError):
    """Invalid options or arguments of a command. ``status`` is the command's exit code."""

    status = 2


@contextmanager
def as_misuse() -> Iterator[None]:
    """Raise an error about the value of an option, or the arguments of a call, as :class:`Misuse`."""
    try:
        yield
    except (ConfigurationError, TypeError) as error:
        raise Misuse(str(error)) from error


def is_list(context: typer.Context) -> bool:
    """Return True if a command with subcommands must print a list, because none of them is given.

    :raises Misuse: for options before a subcommand, which has its own.
    """
    if (command := context.invoked_subcommand) is None:
        return True
    defaults = {option.name: (option.opts[0], option.get_default(context)) for option in context.command.params}
    for name, value in context.params.items():
        if value != defaults[name][1]:
            raise Misuse(f"{defaults[name][0]} is of the list: write the options of {command!r} after it")
    return False


def keywords(arguments: Arguments) -> dict[str, Any]:
    """Parse keyword arguments of a call, each ``key=value``. A value that is not a Python literal is a string.

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


def in_bytes(option: str, text: str) -> int:
    """Return ``512``, ``512M`` or ``1.5GiB`` in bytes.

    :param option: the option with its value, for the error.
    :raises ConfigurationError: for an invalid size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigurationError(f"{option}: use a number of bytes, or one with K, M, G or T")
    number, unit = match.groups()
    return int(float(number) * _UNITS[unit and unit.upper()])


def amount_of(option: str, text: str) -> int | float:
    """Parse bytes, or a fraction: a number with a point and no unit is a fraction, any other is a size, see :func:`in_bytes`.

    :param option: the option with its value, for the error.
    :raises ConfigurationError: for an invalid amount.
    """
    if not _FRACTION.fullmatch(text.strip()):
        return in_bytes(option, text)
    if 0 < float(text) <= 1:
        return float(text)
    raise ConfigurationError(f"{option}: a fraction is more than 0 and at most 1.0; bytes are whole, or have a unit")


def quotas_of(texts: Iterable[str]) -> dict[str, int | float]:
    """Parse ``quotas`` of a server, from texts like ``cuda:0=0.8`` and ``cpu=8GiB``.

    :raises ConfigurationError: for another form, see :func:`amount_of`, and for a device that is named twice.
    """
    quotas: dict[str, int | float] = {}
    for text in texts:
        option = f"--quota {text}"
        device, equals, amount = (part.strip() for part in text.partition("="))
        if not equals or not device:
            raise ConfigurationError(f"{option}: write device=amount, as in cuda:0=0.8 or cpu=8GiB")
        if device in quotas:
            raise ConfigurationError(f"{option}: {device} has a quota already")
        check_name(device)
        quotas[device] = amount_of(option, amount)
    return quotas
