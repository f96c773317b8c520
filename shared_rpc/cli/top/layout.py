"""A frame: which lines a terminal of a given size shows. Nothing here knows a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len, chop_cells
from rich.text import Text

from shared_rpc.cli.rendering import one_line, origin, size
from shared_rpc.cli.top.columns import clipped, joined, shares
from shared_rpc.cli.top.controls import HELP, selected_index
from shared_rpc.cli.top.sections import View, builds_of, clients_of, device_name, holders, lasted, objects, others
from shared_rpc.cli.top.snapshot import Snapshot

__all__ = ["Frame", "everything", "frame", "heights"]

#: Lines of the table of objects, its title included, before another table gets any.
_OBJECTS = 5
#: Lines of a terminal from which on the selected object is told of in full.
_DETAILED = 14
#: Of its lines, the part that this takes at most.
_OF_DETAIL = 4
#: Cells of the end of a path that tell something.
_PATH = 12


class Frame(NamedTuple):
    """The lines, at most as many and as wide as was asked for, and how many objects are seen."""

    lines: list[Text]
    page: int


def frame(view: View, width: int, height: int) -> Frame:
    """What is shown at this size."""
    head = _head(view, width)[: max(height - 1, 1)]
    foot = [clipped(_foot(view, width), width)] if height > len(head) else []
    room = height - len(head) - len(foot)
    page = 1
    if view.state.mode == "help":
        body = _help(width)[:room]
    elif view.snapshot is None:
        body = []
    else:
        detail = _detail(view, view.snapshot, width, height // _OF_DETAIL) if height >= _DETAILED else []
        body, page = _body(view, view.snapshot, width, room - len(detail))
        body += [Text()] * (room - len(detail) - len(body)) + detail
    body += [Text()] * (room - len(body))
    return Frame([*head, *body, *foot][:height], page)


def everything(view: View, width: int) -> list[Text]:
    """All rows of all tables, for what is no terminal."""
    lines = _head(view, width)
    if view.snapshot is not None:
        for section in [*others(view, view.snapshot), objects(view, view.snapshot)]:
            lines += [Text(), *section.draw(width, slice(None))]
    return lines


def heights(wanted: Sequence[int], wanted_objects: int, room: int) -> tuple[list[int], int]:
    """How many lines each table gets, and how many that of the objects.

    Objects have half of the room if they want it. Of the others the last ones go first, where not each of them can have a
    title and a row.
    """
    reserved = min(wanted_objects, max(room // 2, min(_OBJECTS, room)))
    count = len(wanted)
    while count and min(shares(wanted[:count], room - reserved)) < 2:
        count -= 1
    given = shares(wanted[:count], room - reserved) + [0] * (len(wanted) - count)
    return given, max(room - sum(given), 0)


def _body(view: View, snapshot: Snapshot, width: int, room: int) -> tuple[list[Text], int]:
    sections, table = others(view, snapshot), objects(view, snapshot)
    given, left = heights([section.rows + 1 for section in sections], table.rows + 1, room)
    lines: list[Text] = []
    for section, lines_given in zip(sections, given, strict=True):
        if lines_given:
            lines += section.draw(width, slice(0, lines_given - 1))
    page = max(left - 1, 0)
    if left:
        # What is selected stays in the middle, where the ends of the list allow that.
        middle = (selected_index(view.state, view.shown) or 0) - page // 2
        first = min(max(middle, 0), max(len(view.shown) - page, 0))
        lines += table.draw(width, slice(first, first + page))
    return lines, max(page, 1)


def _head(view: View, width: int) -> list[Text]:
    lines = []
    if view.snapshot is not None:
        lines = [_identity(view.snapshot, width), _totals(view, view.snapshot, width)]
    else:
        lines = [clipped(Text("shared-rpc top", "bold"), width)]
    if view.trouble:
        style = "bold red" if view.snapshot is not None else "yellow"
        lines += [clipped(Text(line, style), width) for line in _wrapped(one_line(view.trouble), width)]
    return lines


def _identity(snapshot: Snapshot, width: int) -> Text:
    server = snapshot.server
    pieces = [
        Text("shared-rpc top", "bold"),
        Text(f"pid {server['pid']}"),
        Text(device_name(server["device"])),
        Text(f"up {lasted(server['uptime'])}"),
    ]
    line, path = joined(pieces, width), one_line(server["socket_path"])
    room = width - line.cell_len - 2
    if cell_len(path) <= room:
        line.append(f"  {path}", "dim")
    elif room >= _PATH:  # the end of a path tells more than its beginning
        line.append(f"  …{path[1 - room :]}", "dim")
    return clipped(line, width)


def _totals(view: View, snapshot: Snapshot, width: int) -> Text:
    server = snapshot.server
    calls = sum(rate.calls for rate in view.rates.values())
    hits = sum(rate.hits for rate in view.rates.values())
    errors = server["failures"]
    builds, clients = builds_of(snapshot), clients_of(snapshot, view.pid)
    descriptors = server["descriptors"]
    waiting = server["tasks"]["pending"] + server["tasks"]["running"]
    pieces = [
        Text(f"{size(server['nbytes'])} in {_several(server['objects'], 'object')}", "bold"),
        Text(f"{calls:.1f} calls/s" if view.rates else _several(server["calls"], "call")),
        Text(_several(errors, "error"), "red" if errors else ""),
        Text(_several(server["leases"], "lease")),
        Text(_several(len(clients), "client")),
        Text(f"{min(hits / calls, 1.0):.0%} hits" if calls else "- hits"),
        Text(_several(len(builds), "build")),
        Text(_several(waiting, "task")),
        Text(
            "{used} of {limit} descriptors".format_map(descriptors),
            "red" if descriptors["used"] >= descriptors["limit"] else "",
        ),
    ]
    return joined(pieces, width)


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _detail(view: View, snapshot: Snapshot, width: int, most: int) -> list[Text]:
    """What the table has no room for, in as many lines as it needs, up to ``most``."""
    place = selected_index(view.state, view.shown)
    if place is None:
        return []
    item = view.shown[place]
    name = f"{item['object_id']}  {one_line(origin(item))}"
    held = holders(item, snapshot).plain or "nobody"
    facts = f"on {device_name(item['device'])}, generation {item['generation']}, held by {held}"
    lines = [*_wrapped(name, width), *_wrapped(facts, width)]
    lines[most - 1 :] = [" ".join(lines[most - 1 :])] if len(lines) > most else lines[most - 1 :]
    shown = [clipped(Text(line), width) for line in lines]
    shown[0].stylize("bold", 0, len(item["object_id"]))
    return shown


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of at most so many cells, broken between words where that goes."""
    width = max(width, 2)  # a character may take two
    return [piece for line in textwrap.wrap(text, width) for piece in chop_cells(line, width)] or [""]


def _help(width: int) -> list[Text]:
    lines = []
    for keys, meaning in HELP:
        text = Text.assemble((keys, "bold"), "  ", meaning)
        wrapped = textwrap.wrap(text.plain, max(width, 1), subsequent_indent="  " if width > 8 else "")
        lines += [Text(line) for line in wrapped]
        lines[-len(wrapped)].stylize("bold", 0, len(keys))
    return lines


def _foot(view: View, width: int) -> Text:
    state = view.state
    if state.mode == "confirm" and state.about is not None:
        return _question(view, width)
    if state.mode == "filter":
        return Text.assemble(("endpoints with: ", "bold yellow"), one_line(state.filter), ("_", "blink"))
    if state.mode == "help":
        return Text("any key: back", "dim")
    if state.notice:
        return Text(one_line(state.notice), "bold yellow")
    if view.snapshot is None:
        return Text("q quit", "dim")
    pieces = [
        Text(text, "dim") for text in ("q quit", "? help", f"s sort: {state.sort}", "r reverse", "i invalidate", "/ filter")
    ]
    if state.filter:
        pieces.insert(0, Text(f"endpoints with {one_line(state.filter)!r}, Esc: all", "yellow"))
    return joined(pieces, width)


def _question(view: View, width: int) -> Text:
    item = view.state.about
    assert item is not None and view.snapshot is not None, "what is confirmed is shown"
    if item["kind"] == "buffer":
        answers = ["y free it", "Esc leave it"]
        what = f"free buffer {item['object_id']}?"
    else:
        same = sum(one["endpoint"] == item["endpoint"] and one["cached"] for one in view.snapshot.objects)
        answers = ["y yes", f"e all {same} of {one_line(item['endpoint'])}", "Esc no"]
        what = f"invalidate {one_line(origin(item))}?"
    # The answers matter most: what it is about is selected, and seen anyway.
    pieces = [Text(answer, "bold yellow") for answer in answers]
    room = width - joined(pieces, width).cell_len - 2
    return joined([clipped(Text(what, "yellow"), room), *pieces], width) if room >= 12 else joined(pieces, width)
