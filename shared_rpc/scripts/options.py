"""The words of ``shared-rpc run``, read without the library that reads those of all other commands: that takes too long."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["IDLE_EXIT", "MODULE", "PRELOAD", "Script", "parse"]

PRELOAD, IDLE_EXIT, MODULE = "--preload", "--idle-exit", "-m"


class Script(NamedTuple):
    """The program that is to be run.

    :param name: the path of a script, of a directory or archive with a ``__main__.py``; or a module's name.
    :param arguments: the words behind it.
    :param module: whether it is a module.
    :param preload: modules that the zygote imports besides its usual ones.
    :param idle_exit: seconds after which the zygote ends if nothing was run; None for the default.
    """

    name: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    preload: tuple[str, ...] = ()
    idle_exit: float | None = None

    @property
    def words(self) -> list[str]:
        """The command line for the interpreter, behind its own name and options."""
        return [*([MODULE] if self.module else []), self.name, *self.arguments]


def parse(words: list[str]) -> Script | None:
    """Read the words behind ``run``; None for misuse and ``--help``, which need an explanation."""
    values: dict[str, list[str]] = {PRELOAD: [], IDLE_EXIT: []}
    module = False
    position = 0
    while position < len(words) and words[position].startswith("-") and words[position] != "-":
        word = words[position]
        position += 1
        if word == "--":
            break
        name, equals, value = word.partition("=")
        if word == MODULE:
            module = True
        elif name in values and (equals or position < len(words)):
            if not equals:
                value = words[position]
                position += 1
            values[name].append(value)
        else:
            return None
    if position == len(words):
        return None
    try:
        seconds = [float(value) for value in values[IDLE_EXIT]]
    except ValueError:
        return None
    if any(not value >= 0 for value in seconds):
        return None
    return Script(
        words[position], tuple(words[position + 1 :]), module, tuple(values[PRELOAD]), seconds[-1] if seconds else None
    )
