"""Names of a source's tensors, turned into those of the model that takes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from shared_rpc.errors import ConfigurationError

__all__ = ["Rename", "matches", "renamer"]

#: A map of names and patterns, or a function: the model's name of a source's tensor, None to leave the tensor out.
Rename = Mapping[str, str | None] | Callable[[str], str | None]

_STARS = re.compile(r"\*\*|\*")


def renamer(rename: Rename | None) -> Callable[[str], str | None]:
    """The function that a ``rename`` stands for; see :func:`shared_rpc.materialize`.

    :raises ConfigurationError: for what it cannot be, and for a name that takes more than its pattern gives.
    """
    if rename is None:
        return lambda name: name
    if not isinstance(rename, Mapping):
        if not callable(rename):
            raise ConfigurationError(f"rename={rename!r}: use a dict of names and patterns, or a function of a name")
        return rename
    for name, target in rename.items():
        if not isinstance(name, str) or not isinstance(target, str | None):
            raise ConfigurationError(
                f"rename={{{name!r}: {target!r}}}: names and patterns are str, or None to leave a tensor out"
            )
    exact = {name: target for name, target in rename.items() if "*" not in name}
    patterns = [(_compiled(name), _template(name, target)) for name, target in rename.items() if "*" in name]
    for name, target in exact.items():
        _template(name, target)

    def renamed(name: str) -> str | None:
        if name in exact:
            return exact[name]
        for pattern, template in patterns:
            found = pattern.fullmatch(name)
            if found is not None:
                return None if template is None else template(found.groups())
        return name

    return renamed


def matches(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Whether a name fits one of these patterns.

    :raises ConfigurationError: for one pattern alone, whose letters would be taken for patterns, and for what is none.
    """
    if isinstance(patterns, str) or not isinstance(patterns, Iterable):
        raise ConfigurationError(f"own={patterns!r}: use a list of names and patterns, as own=[{patterns!r}]")
    patterns = list(patterns)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ConfigurationError(f"own=[..., {pattern!r}, ...]: names and patterns are str")
    compiled = [_compiled(pattern) for pattern in patterns]
    return lambda name: any(pattern.fullmatch(name) for pattern in compiled)


def _compiled(pattern: str) -> re.Pattern[str]:
    """``*`` is one part of a dotted name, ``**`` one or more of them; each is a group."""
    pieces, begin = [], 0
    for star in _STARS.finditer(pattern):
        pieces += [re.escape(pattern[begin : star.start()]), "(.+)" if star.group() == "**" else r"([^.]+)"]
        begin = star.end()
    return re.compile("".join([*pieces, re.escape(pattern[begin:])]))


def _template(pattern: str, target: str | None) -> Callable[[tuple[str, ...]], str] | None:
    """Puts what the stars of a pattern stood for in place of those of its target, in order."""
    if target is None:
        return None
    pieces = _STARS.split(target)
    given = len(_STARS.findall(pattern))
    if len(pieces) - 1 > given:
        raise ConfigurationError(
            f"rename={{{pattern!r}: {target!r}}}: the name has {len(pieces) - 1} stars and its pattern {given}, and each star "
            f"of a name stands for what one of the pattern stands for"
        )

    def fill(parts: tuple[str, ...]) -> str:
        return "".join(piece + part for piece, part in zip(pieces, [*parts[: len(pieces) - 1], ""], strict=True))

    return fill
