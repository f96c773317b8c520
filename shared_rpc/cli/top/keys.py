"""From the bytes that a terminal sends to keys."""

from __future__ import annotations

import codecs
import re

__all__ = ["KeyReader"]

#: What comes after the escape character, for the keys that are of use here. Terminals differ, and have modes.
_SEQUENCES = {
    "[A": "up", "[B": "down", "[C": "right", "[D": "left", "[H": "home", "[F": "end",
    "OA": "up", "OB": "down", "OC": "right", "OD": "left", "OH": "home", "OF": "end",
    "[1~": "home", "[4~": "end", "[7~": "home", "[8~": "end", "[5~": "page up", "[6~": "page down", "[3~": "delete",
}  # fmt: skip
_CONTROLS = {"\r": "enter", "\n": "enter", "\x7f": "backspace", "\x08": "backspace", "\t": "tab", "\x15": "delete line"}
#: A whole sequence of a terminal, and the beginning of one.
_WHOLE = re.compile(r"\[[0-9;?<>=]*[@-~]|O[ -~]")
_BEGUN = re.compile(r"\[[0-9;?<>=]*|O|")


class KeyReader:
    """Takes bytes as they come, and tells keys: ``"up"``, ``"enter"``, or the character itself."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    @property
    def undecided(self) -> bool:
        """Whether an escape character came last: the key of that name, or the beginning of a sequence."""
        return bool(self._rest)

    def feed(self, data: bytes) -> list[str]:
        """The keys that are whole with these bytes. Sequences of other keys, and of what is no key, are passed over."""
        text, self._rest = self._rest + self._decoder.decode(data), ""
        keys: list[str] = []
        while text:
            if text[0] != "\x1b":
                keys += [_CONTROLS[text[0]]] if text[0] in _CONTROLS else [text[0]] if text[0].isprintable() else []
                text = text[1:]
            elif whole := _WHOLE.match(text, 1):
                keys += [_SEQUENCES[whole[0]]] if whole[0] in _SEQUENCES else []
                text = text[whole.end() :]
            elif _BEGUN.fullmatch(text, 1):
                self._rest, text = text, ""
            else:  # the key itself, and something else after it
                keys.append("escape")
                text = text[1:]
        return keys

    def decide(self) -> list[str]:
        """Nothing came after the escape character: the keys that it was."""
        rest, self._rest = self._rest, ""
        return ["escape"] if rest == "\x1b" else []
