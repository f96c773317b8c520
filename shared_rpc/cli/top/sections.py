"""What is shown of a snapshot, as tables: each function is one of them, and draws as many rows as there is room for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.text import Text

from shared_rpc.cli.rendering import one_line, origin, percent, size, steps
from shared_rpc.cli.top.bars import Glyphs, bar, sparkline
from shared_rpc.cli.top.columns import Column, clipped, table
from shared_rpc.cli.top.controls import State, selected_index
from shared_rpc.cli.top.snapshot import Rates, Snapshot
from shared_rpc.protocol.tasks import Progress

__all__ = ["Section", "View", "builds_of", "clients_of", "device_name", "lasted", "objects", "others"]

Facts = dict[str, Any]

_TITLE = "bold reverse"
#: Seconds. A run that takes less, and says nothing, is no build to look at.
_SHORT = 0.25
#: Cells of a bar where there is room.
_BAR = 40
#: Cells of an endpoint's name beside a key, which begins with it.
_NAME = 20


@dataclass(frozen=True)
class View:
    """All that a frame is made of.

    :param shown: the snapshot's objects that are shown, in their order.
    :param history: calls a second, of all endpoints, the latest last.
    :param trouble: why there is no snapshot, or no newer one.
    :param pid: of the process that looks, which is a client too.
    """

    snapshot: Snapshot | None
    rates: Mapping[str, Rates]
    state: State
    shown: Sequence[Facts]
    glyphs: Glyphs
    history: Sequence[float] = ()
    trouble: str = ""
    pid: int = 0


class Section(NamedTuple):
    """A table: how many rows it has, and its lines at a width, for rows from one number to before another."""

    rows: int
    draw: Callable[[int, slice], list[Text]]


def others(view: View, snapshot: Snapshot) -> list[Section]:
    """The tables beside that of the objects, the most important first; none that is empty."""
    sections = [part(view, snapshot) for part in (_memory, _builds, _calls, _workers, _clients)]
    return [section for section in sections if section.rows]


def objects(view: View, snapshot: Snapshot) -> Section:
    """The table of objects."""

    def draw(width: int, rows: slice) -> list[Text]:
        items = view.shown[rows]
        order = f"by {view.state.sort}{', reversed' if view.state.reverse else ''}"
        found = f"{len(view.shown)}/{len(snapshot.objects)}" if view.state.filter else str(len(view.shown))
        columns = [
            Column(f"objects {found} {order}", [_text(origin(item)) for item in items], 0, least=14),
            Column("size", [Text(size(item["nbytes"])) for item in items], 1, right=True),
            Column("held", [Text(str(item["leases"]), "green" if item["leases"] else "dim") for item in items], 2, right=True),
            Column("age", [Text(lasted(snapshot.wall - item["created_at"])) for item in items], 3, right=True),
            Column("state", [_state_of(item) for item in items], 4),
            Column("device", [Text(device_name(item["device"])) for item in items], 6),
            Column("gen", [Text(str(item["generation"])) for item in items], 7, right=True),
            Column("used", [Text(lasted(snapshot.wall - item["last_accessed_at"])) for item in items], 5, right=True),
            Column("endpoint", [clipped(_text(item["endpoint"]), _NAME) for item in items], 9, least=8),
            Column("held by", [holders(item, snapshot) for item in items], 8, least=16),
        ]
        selected = selected_index(view.state, items)
        return table(columns, width, _TITLE, selected)

    return Section(max(len(view.shown), 1), draw)


def holders(item: Facts, snapshot: Snapshot) -> Text:
    """The processes that hold an object."""
    return Text(", ".join(_holder(holder, snapshot) for holder in item["holders"]))


def lasted(seconds: float) -> str:
    """A time for people, in few characters: ``"3m"``."""
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "m"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{max(seconds, 0) / divisor:.0f}{unit}"
    return f"{seconds / 86400:.0f}d"


def device_name(device: str) -> str:
    """A device in few characters: of a GPU's UUID the part by which sockets are named too."""
    return one_line(device[: len("GPU-") + 8] if device.startswith("GPU-") else device)


def builds_of(snapshot: Snapshot) -> list[Facts]:
    """The runs to look at: those that take a while, say how far they are, or are tasks."""
    return [
        run for run in snapshot.runs if run["tasks"] or run["progress"] or snapshot.wall - run["created_at"] >= _SHORT
    ]  # fmt: skip


def clients_of(snapshot: Snapshot, pid: int) -> list[Facts]:
    """The sessions of others, those that hold most first."""
    return sorted(
        (one for one in snapshot.sessions if one["pid"] != pid), key=lambda one: (-one["leases"], one["since"], one["session"])
    )


def _state_of(item: Facts) -> Text:
    if item["kind"] == "buffer":
        return Text("" if item["state"] == "listed" else str(item["state"]), "yellow")
    if item["stale"]:
        return Text("stale", "red")
    if not item["current"]:
        return Text("old", "yellow")
    return Text("" if item["cached"] else "uncached", "dim")


def _memory(view: View, snapshot: Snapshot) -> Section:
    buffers: Counter[str] = Counter()
    for item in snapshot.objects:
        if item["kind"] == "buffer":
            buffers[item["device"]] += item["nbytes"]

    def draw(width: int, rows: slice) -> list[Text]:
        items = snapshot.devices[rows]

        def paint(row: int, cells: int) -> Text:
            item = items[row]
            mine = min(buffers[item["id"]], item["used"])
            parts = [(item["used"] - mine, "green"), (mine, "cyan")]
            if item["limit"] is None and item["free"] is not None:
                parts.append((max(item["total"] - item["free"] - item["used"], 0), "yellow"))
            return bar(parts, item["total"] if item["limit"] is None else item["limit"], cells, view.glyphs)

        first, second, third = view.glyphs.parts
        kept = [min(buffers[item["id"]], item["used"]) for item in items]
        columns = [
            Column("memory", [Text(device_name(item["id"])) for item in items], 0),
            Column(
                f"{first} objects {second} buffers {third} others", [Text(" " * _BAR)] * len(items), 1, least=8, paint=paint
            ),
            Column("objects", [Text(size(item["used"] - kept[row])) for row, item in enumerate(items)], 2, right=True),
            Column("buffers", [Text(size(nbytes)) for nbytes in kept], 4, right=True),
            Column("quota", [_size(item["limit"], "none") for item in items], 5, right=True),
            Column("free", [_size(item["free"], "-") for item in items], 3, right=True),
            Column("total", [Text(size(item["total"])) for item in items], 6, right=True),
        ]
        return table(columns, width, _TITLE)

    return Section(len(snapshot.devices), draw)


def _builds(view: View, snapshot: Snapshot) -> Section:
    builds = builds_of(snapshot)

    def draw(width: int, rows: slice) -> list[Text]:
        items = builds[rows]
        told = [Progress(**run["progress"]) if run["progress"] is not None else None for run in items]

        def paint(row: int, cells: int) -> Text:
            return bar([(percent(told[row]) or 0.0, "green")], 100.0, cells, view.glyphs)

        columns = [
            Column(f"builds {len(builds)}", [_text(run["cache_key"] or run["endpoint"]) for run in items], 0, least=12),
            Column("progress", [Text(" " * _BAR)] * len(items), 1, least=8, paint=paint),
            Column("", [Text(steps(progress)) for progress in told], 3, least=12),
            Column("state", [Text(run["status"], "green" if run["status"] == "running" else "dim") for run in items], 4),
            Column("took", [Text(_took(run, snapshot.wall)) for run in items], 2, right=True),
            Column("calls", [Text(str(run["calls"])) for run in items], 6, right=True),
            Column("tasks", [Text(str(len(run["tasks"]))) for run in items], 5, right=True),
        ]
        return table(columns, width, _TITLE)

    return Section(len(builds), draw)


def _calls(view: View, snapshot: Snapshot) -> Section:
    counters = snapshot.endpoints
    names = [name for name in counters if view.state.filter.casefold() in name.casefold()]
    names.sort(key=lambda name: (-(view.rates[name].calls if name in view.rates else 0), -counters[name]["calls"], name))

    def rate(what: str, items: Sequence[str]) -> list[Text]:
        return [_rate(getattr(view.rates[name], what)) if name in view.rates else Text("-", "dim") for name in items]

    def draw(width: int, rows: slice) -> list[Text]:
        items = names[rows]
        shares = [view.rates[name].hit_share if name in view.rates else None for name in items]
        errors = [counters[name]["errors"] for name in items]
        title = f"calls {sparkline(view.history, 20, view.glyphs)}".rstrip()
        columns = [
            Column(title, [_text(name) for name in items], 0, least=10),
            Column("calls/s", rate("calls", items), 1, right=True),
            Column("hits/s", rate("hits", items), 6, right=True),
            Column("hits", [Text("-", "dim") if share is None else Text(f"{share:.0%}") for share in shares], 3, right=True),
            Column("joined/s", rate("joined", items), 8, right=True),
            Column("builds/s", rate("builds", items), 5, right=True),
            Column("errors/s", rate("errors", items), 7, right=True),
            Column("calls", [Text(_count(counters[name]["calls"])) for name in items], 4, right=True),
            Column("errors", [Text(_count(count), "red" if count else "dim") for count in errors], 2, right=True),
        ]
        return table(columns, width, _TITLE)

    return Section(len(names), draw)


def _workers(view: View, snapshot: Snapshot) -> Section:
    workers = snapshot.server["workers"]

    def draw(width: int, rows: slice) -> list[Text]:
        items = workers[rows]
        columns = [
            Column("worker", [Text(str(one["pid"])) for one in items], 0),
            Column("state", [Text(one["state"], "green" if one["state"] == "ready" else "yellow") for one in items], 1),
            Column("runs", [Text(str(one["runs"])) for one in items], 2, right=True),
            Column("restarts", [_restarts(one["restarts"]) for one in items], 3, right=True),
            Column("device", [Text(device_name(one["device"] or snapshot.server["device"])) for one in items], 4),
            Column("up", [Text(lasted(one["uptime"])) for one in items], 5, right=True),
        ]
        return table(columns, width, _TITLE)

    return Section(len(workers), draw)


def _clients(view: View, snapshot: Snapshot) -> Section:
    clients = clients_of(snapshot, view.pid)

    def draw(width: int, rows: slice) -> list[Text]:
        items = clients[rows]
        columns = [
            Column(f"clients {len(clients)}", [Text(str(one["pid"])) for one in items], 0),
            Column("leases", [Text(str(one["leases"])) for one in items], 2, right=True),
            Column("holds", [Text(size(one["nbytes"])) for one in items], 3, right=True),
            Column("since", [Text(lasted(snapshot.wall - one["since"])) for one in items], 4, right=True),
            Column("conns", [Text(str(one["connections"])) for one in items], 5, right=True),
            Column("command", [_text(snapshot.commands.get(one["pid"], "")) for one in items], 1, least=10),
        ]
        return table(columns, width, _TITLE)

    return Section(len(clients), draw)


def _holder(holder: Facts, snapshot: Snapshot) -> str:
    pid, session = holder["pid"], str(holder["session"])
    if session.startswith("task "):
        return f"{one_line(session)}, not fetched"
    return f"{pid} {one_line(snapshot.commands.get(pid, ''))}".rstrip()


def _text(text: str) -> Text:
    return Text(one_line(text))


def _size(nbytes: int | None, otherwise: str) -> Text:
    return Text(otherwise, "dim") if nbytes is None else Text(size(nbytes))


def _rate(rate: float) -> Text:
    return Text(_count(rate) if rate >= 100 else f"{rate:.1f}", "dim" if rate == 0 else "")


def _count(count: float) -> str:
    for unit in ("", "k", "M", "G"):
        if count < 10_000 or unit == "G":
            break
        count /= 1000
    return f"{count:.0f}{unit}"


def _restarts(count: int) -> Text:
    return Text(str(count), "red" if count else "dim")


def _took(run: Facts, now: float) -> str:
    return lasted(now - run["started_at"]) if run["started_at"] is not None else "-"
