"""What keys do: from what is shown, and a key, to what is shown next and what is asked of the server. No terminal here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from shared_rpc.cli.rendering import origin

__all__ = ["HELP", "ORDERS", "Action", "State", "arranged", "press"]

Facts = dict[str, Any]


class Order(NamedTuple):
    """What objects are sorted by."""

    key: Callable[[Facts], Any]
    descending: bool


ORDERS: dict[str, Order] = {
    "size": Order(lambda item: item["nbytes"], True),
    "age": Order(lambda item: -item["created_at"], True),
    "leases": Order(lambda item: item["leases"], True),
    "name": Order(lambda item: origin(item).casefold(), False),
    "access": Order(lambda item: item["last_accessed_at"], True),
}

HELP = (
    ("up, down, j, k", "select an object"),
    ("page up, page down, home, end", "the same, further"),
    ("s, S", f"sort by the next, the previous of {', '.join(ORDERS)}"),
    ("r", "reverse the order"),
    ("/, f", "show objects of some endpoints only; Esc shows all"),
    ("i", "invalidate what is selected, or its endpoint; free a buffer. It asks first"),
    ("?, h", "this help"),
    ("q", "quit"),
)


class Action(NamedTuple):
    """What is asked of the server. ``target`` is the id of an object or a buffer, or the name of an endpoint."""

    kind: Literal["object", "endpoint", "buffer"]
    target: str
    label: str


@dataclass(frozen=True)
class State:
    """What the keys have changed. ``selected`` is an object's id, so that it stays selected wherever it is sorted to."""

    sort: str = "size"
    reverse: bool = False
    filter: str = ""
    selected: str = ""
    mode: Literal["list", "filter", "confirm", "help", "quit"] = "list"
    notice: str = ""
    #: The filter there was before the one that is being typed.
    former_filter: str = ""
    #: What a confirmation is about: it stays the same, whatever is selected when the list changes meanwhile.
    about: Facts | None = None


def arranged(objects: Sequence[Facts], state: State) -> list[Facts]:
    """The objects that are shown, in their order."""
    order, wanted = ORDERS[state.sort], state.filter.casefold()
    shown = [item for item in objects if wanted in (item["endpoint"] or "buffer").casefold()]
    # By id first, so that equal ones do not change places.
    shown.sort(key=lambda item: str(item["object_id"]))
    shown.sort(key=order.key, reverse=order.descending != state.reverse)
    return shown


def press(state: State, key: str, shown: Sequence[Facts], page: int = 10) -> tuple[State, Action | None]:
    """What a key does.

    :param shown: the objects in the order they are shown in.
    :param page: how many of them are seen at once.
    """
    if state.mode == "filter":
        return _typed(state, key), None
    if state.mode == "confirm":
        return _answered(state, key)
    if state.mode == "help":
        return replace(state, mode="quit" if key == "q" else "list"), None
    state = replace(state, notice="")
    if key in _MOVES:
        return _moved(state, key, shown, page), None
    handler = _KEYS.get(key)
    return (handler(state, shown) if handler is not None else state), None


def selected_index(state: State, shown: Sequence[Facts]) -> int | None:
    """Which of the objects is selected."""
    return next((number for number, item in enumerate(shown) if item["object_id"] == state.selected), None)


def kept_selected(state: State, before: Sequence[Facts], shown: Sequence[Facts]) -> State:
    """The state for another list: what is selected and has gone is followed by what has taken its place."""
    if not state.selected or selected_index(state, shown) is not None:
        return state
    place = selected_index(state, before)
    if place is None or not shown:
        return replace(state, selected="")
    return replace(state, selected=shown[min(place, len(shown) - 1)]["object_id"])


_MOVES = {"up", "down", "k", "j", "page up", "page down", "home", "end", "g", "G"}


def _moved(state: State, key: str, shown: Sequence[Facts], page: int) -> State:
    if not shown:
        return state
    last = len(shown) - 1
    place = selected_index(state, shown)
    if place is None:
        place = last if key in ("end", "G") else 0
    else:
        steps = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -page, "page down": page}
        place = 0 if key in ("home", "g") else last if key in ("end", "G") else min(max(place + steps[key], 0), last)
    return replace(state, selected=shown[place]["object_id"])


def _sorted_by(step: int) -> Callable[[State, Sequence[Facts]], State]:
    def sort(state: State, shown: Sequence[Facts]) -> State:
        names = list(ORDERS)
        return replace(state, sort=names[(names.index(state.sort) + step) % len(names)], reverse=False)

    return sort


def _ask(state: State, shown: Sequence[Facts]) -> State:
    place = selected_index(state, shown)
    if place is None:
        return replace(state, notice="select an object first, with up and down")
    item = shown[place]
    if not item["cached"]:
        return replace(state, notice=f"{origin(item)} is not in the cache: it goes with its last holder")
    return replace(state, mode="confirm", about=item)


def _answered(state: State, key: str) -> tuple[State, Action | None]:
    item = state.about
    assert item is not None, "a confirmation is about something"
    done = replace(state, mode="list", about=None)
    if key == "y" and item["kind"] == "buffer":
        return done, Action("buffer", item["object_id"], f"buffer {item['object_id']}")
    if key == "y":
        return done, Action("object", item["object_id"], origin(item))
    if key == "e" and item["kind"] != "buffer":
        return done, Action("endpoint", item["endpoint"], item["endpoint"])
    return replace(done, notice="left as it is"), None


def _typed(state: State, key: str) -> State:
    if key == "enter":
        return replace(state, mode="list")
    if key == "escape":
        return replace(state, mode="list", filter=state.former_filter)
    if key == "backspace":
        return replace(state, filter=state.filter[:-1])
    if key == "delete line":
        return replace(state, filter="")
    return replace(state, filter=state.filter + key) if len(key) == 1 else state


_KEYS: dict[str, Callable[[State, Sequence[Facts]], State]] = {
    "q": lambda state, shown: replace(state, mode="quit"),
    "?": lambda state, shown: replace(state, mode="help"),
    "h": lambda state, shown: replace(state, mode="help"),
    "s": _sorted_by(1),
    "S": _sorted_by(-1),
    "r": lambda state, shown: replace(state, reverse=not state.reverse),
    "/": lambda state, shown: replace(state, mode="filter", former_filter=state.filter),
    "f": lambda state, shown: replace(state, mode="filter", former_filter=state.filter),
    "escape": lambda state, shown: replace(state, filter="", selected="" if not state.filter else state.selected),
    "i": _ask,
}
