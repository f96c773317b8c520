"""Tables of a snapshot, for the live view and the printed one. The most important columns are first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from shared_rpc.cli.rendering import copies_of, lasted, origin, percent, several, size, steps, tier_of
from shared_rpc.cli.top.watching import Rates, Snapshot
from shared_rpc.errors import one_line
from shared_rpc.protocol.infos import ListedObjectInfo
from shared_rpc.protocol.tasks import Progress

#: Seconds. A shorter run without progress reports is not listed as a build.
_SHORT = 0.25
_BAR = 20
#: Width of an endpoint's name next to a key, which begins with it.
_NAME = 20
#: Width between two columns.
_GAP = 2

#: Sort orders of objects: the key, and True if the largest is first.
ORDERS: dict[str, tuple[Callable[[ListedObjectInfo], Any], bool]] = {
    "size": (lambda item: item["nbytes"], True),
    "age": (lambda item: -item["created_at"], True),
    "leases": (lambda item: item["leases"], True),
    "name": (lambda item: origin(item).casefold(), False),
    "access": (lambda item: item["last_accessed_at"], True),
}


class Table(NamedTuple):
    """A table. A column whose name ends in ``>`` is right-aligned; ``keys`` are the ids of rows that can be selected."""

    columns: tuple[str, ...]
    rows: Sequence[Sequence[Text]]
    keys: Sequence[str] = ()

    def laid_out(self, width: int) -> Grid:
        """Lay out the table in a width; columns that do not fit are left out, the last ones first."""
        grid, used = Grid(header_style="bold reverse", box=None, pad_edge=False), 0
        for number, title in enumerate(name.rstrip(">") for name in self.columns):
            used += max(cell_len(title), *(cells[number].cell_len for cells in self.rows), 0) + _GAP
            if number and used > width + _GAP:
                break
            grid.add_column(Text(title), justify="right" if self.columns[number].endswith(">") else "left", no_wrap=True)
        for cells in self.rows:
            grid.add_row(*cells[: len(grid.columns)])
        return grid


class ObjectChoice(NamedTuple):
    """The user's choice of objects and of their order."""

    sort: str = "size"
    reverse: bool = False
    filter: str = ""


@dataclass(frozen=True)
class View:
    """The data of a frame.

    :param parts: characters of bars: results, buffers, others, nothing.
    :param pid: process id of the view itself, which is a client too.
    """

    snapshot: Snapshot
    rates: Mapping[str, Rates] = field(default_factory=dict)
    parts: str = "█▓▒░"
    pid: int = 0


def parts_for(console: Console) -> str:
    """Choose the characters of bars that a terminal can show."""
    return "█▓▒░" if console.encoding.lower().startswith("utf") else "#=+."


def headline(view: View) -> Text:
    """Describe the server in one line."""
    server = view.snapshot.server
    path = one_line(server["socket_path"] or "")
    facts = f"pid {server['pid']}  {_device(server['device'])}  up {lasted(server['uptime'])}  {path}"
    return Text.assemble(("shared-rpc top", "bold"), "  ", facts)


def totals(view: View) -> Text:
    """Format the sums, the most important first."""
    server, used = view.snapshot.server, view.snapshot.server["descriptors"]
    calls, hits = (sum(getattr(rate, what) for rate in view.rates.values()) for what in ("calls", "hits"))
    tasks = server["tasks"]["pending"] + server["tasks"]["running"]
    pieces = [
        Text(f"{size(server['nbytes'])} in {several(server['objects'], 'object')}", "bold"),
        Text(f"{calls:.1f} calls/s" if view.rates else several(server["calls"], "call")),
        Text(several(server["failures"], "error"), "red" if server["failures"] else ""),
        *([Text(f"{copies_of(server)} in copies", "cyan")] if server["copies"] else []),
        *([Text(f"{server['waiting']} waiting for capacity", "yellow")] if server["waiting"] else []),
        Text(several(server["leases"], "lease")),
        Text(several(len(_clients(view).rows), "client")),
        Text(f"{min(hits / calls, 1.0):.0%} hits" if calls else "- hits"),
        Text(several(len(_builds(view).rows), "build")),
        Text(several(tasks, "task")),
        Text(f"{used['used']} of {used['limit']} descriptors", "red" if used["used"] >= 0.75 * used["limit"] else ""),
    ]
    return Text("  ").join(pieces)


def others(view: View) -> dict[str, Table]:
    """Make the tables other than that of the objects, the most important first."""
    return {
        "memory": _memory(view),
        "cluster": _cluster(view),
        "builds": _builds(view),
        "moves": _moves(view),
        "calls": _calls(view),
        "workers": _workers(view),
        "clients": _clients(view),
    }


def arranged(found: Sequence[ListedObjectInfo], choice: ObjectChoice) -> list[ListedObjectInfo]:
    """Return the shown objects, in their order."""
    (key, descending), wanted = ORDERS[choice.sort], choice.filter.casefold()
    shown = [item for item in found if wanted in (item["endpoint"] or "buffer").casefold()]
    # By id first, so that equal ones do not change places.
    shown.sort(key=lambda item: str(item["object_id"]))
    shown.sort(key=key, reverse=descending != choice.reverse)
    return shown


def objects(view: View, shown: Sequence[ListedObjectInfo]) -> Table:
    """Make the table of objects."""
    now = view.snapshot.wall
    return Table(
        ("objects", "size>", "held>", "age>", "state", "used>", "active>", "tier", "device", "gen>", "endpoint", "held by"),
        [
            _row(
                origin(item),
                size(item["nbytes"]),
                _text(item["leases"], "green" if item["leases"] else "dim"),
                lasted(now - item["created_at"]),
                _state(item),
                lasted(now - item["last_accessed_at"]),
                _text(item["active"], "green" if item["active"] else "dim"),
                _text(tier_of(item), "dim" if item["tier"] == "device" else "cyan"),
                _device(item["device"]),
                item["generation"],
                item["endpoint"][:_NAME],
                _holders(view, item),
            )
            for item in shown
        ],
        [item["object_id"] for item in shown],
    )


def detail(view: View, item: ListedObjectInfo) -> str:
    """Describe the facts of one object that no column shows."""
    facts = f"on {_device(item['device'])}, generation {item['generation']}, held by {_holders(view, item) or 'nobody'}"
    tiers = f"tier {tier_of(item)}, copies {copies_of(item)}, active in {item['active']} of {item['leases']}"
    return f"{item['object_id']}  {one_line(origin(item))}\n{facts}\n{tiers}"


def _memory(view: View) -> Table:
    buffers: Counter[str] = Counter()
    for item in view.snapshot.objects:
        if item["kind"] == "buffer":
            buffers[item["device"]] += item["nbytes"]
    rows = []
    for one in view.snapshot.devices:
        kept, total, limit, free = min(buffers[one["id"]], one["used"]), one["total"], one["limit"], one["free"]
        own = one["used"] - kept
        # Without a quota, the whole is the device's memory, and other programs have a part of it.
        rest = max(total - free - one["used"], 0) if limit is None and free is not None else 0
        whole = bar(view.parts, [(own, "green"), (kept, "cyan"), (rest, "yellow")], total if limit is None else limit)
        rows.append(_row(_device(one["id"]), whole, size(own), size(kept), _size(limit, "none"), _size(free, "-"), size(total)))
    bars = " ".join(f"{mark} {what}" for mark, what in zip(view.parts, ("objects", "buffers", "others"), strict=False))
    return Table(("memory", bars, "objects>", "buffers>", "quota>", "free>", "total>"), rows)


def _builds(view: View) -> Table:
    now, rows = view.snapshot.wall, []
    for run in view.snapshot.runs:
        if run["tasks"] or run["progress"] or now - run["created_at"] >= _SHORT:
            progress = Progress(**run["progress"]) if run["progress"] is not None else None
            done = bar(view.parts, [(percent(progress) or 0.0, "green")], 100.0)
            took = "-" if run["started_at"] is None else lasted(now - run["started_at"])
            state = _text(run["status"], "green" if run["status"] == "running" else "dim")
            name = run["cache_key"] or run["endpoint"]
            rows.append(_row(name, done, steps(progress), took, state, len(run["tasks"]), run["calls"]))
    return Table(("builds", "progress", "", "took>", "state", "tasks>", "calls>"), rows)


def _moves(view: View) -> Table:
    rows = []
    for item in view.snapshot.objects:
        moving = item.get("moving")
        if moving is not None:
            done = bar(view.parts, [(moving["done"], "cyan")], moving["total"])
            rows.append(_row(origin(item), done, size(moving["done"]), size(moving["total"]), item["tier"], moving["to"]))
    return Table(("moves", "progress", "copied>", "of>", "from", "to"), rows)


def _cluster(view: View) -> Table:
    source, rows = view.snapshot.server["source"], []
    if source is not None:
        status = source["status"]
        nothing = _text("-", "dim")
        numbers = [_text(status[name]) if name in status else nothing for name in ("nodes", "objects")]
        moved = [_text(size(status[name])) if name in status else nothing for name in ("bytes_received", "bytes_sent")]
        attached = _text(source["pid"]) if source["pid"] is not None else _text("none", "red")
        asked = _text(source["misses"], "yellow" if source["misses"] else "dim")
        doing = "; ".join(status.get("activity", []))
        names = (status.get("cluster", ""), status.get("node", ""), status.get("state", ""))
        rows.append(_row(*names, *numbers, *moved, asked, attached, doing))
    columns = ("cluster", "node", "state", "nodes>", "objects>", "received>", "sent>", "asked>", "source>", "it is doing")
    return Table(columns, rows)


def _calls(view: View) -> Table:
    counters, nothing = view.snapshot.endpoints, Rates(0, 0, 0, 0, 0)
    rows = []
    for name in sorted(counters, key=lambda name: (-view.rates.get(name, nothing).calls, -counters[name]["calls"], name)):
        rate, counts = view.rates.get(name), counters[name]
        share = f"{min(rate.hits / rate.calls, 1.0):.0%}" if rate is not None and rate.calls else _text("-", "dim")
        errors = _text(_count(counts["errors"]), "red" if counts["errors"] else "dim")
        more = [_rate(rate and getattr(rate, what)) for what in ("builds", "hits", "joined", "errors")]
        rows.append(_row(name, _rate(rate and rate.calls), share, _count(counts["calls"]), errors, *more))
    rates = ("builds/s>", "hits/s>", "joined/s>", "errors/s>")
    return Table(("calls", "calls/s>", "hits>", "calls>", "errors>", *rates), rows)


def _workers(view: View) -> Table:
    server, rows = view.snapshot.server, []
    for one in server["workers"]:
        state = _text(one["state"], "green" if one["state"] == "ready" else "yellow")
        restarts = _text(one["restarts"], "red" if one["restarts"] else "dim")
        device = _device(one["device"] or server["device"])
        rows.append(_row(one["pid"], state, one["runs"], restarts, device, lasted(one["uptime"])))
    return Table(("worker", "state", "runs>", "restarts>", "device", "up>"), rows)


def _clients(view: View) -> Table:
    sessions = [one for one in view.snapshot.sessions if one["pid"] != view.pid]
    rows = []
    for one in sorted(sessions, key=lambda one: (-one["leases"], one["since"], one["session"])):
        since, command = lasted(view.snapshot.wall - one["since"]), view.snapshot.commands.get(one["pid"], "")
        rows.append(_row(one["pid"], one["leases"], size(one["nbytes"]), since, command))
    return Table(("client", "leases>", "holds>", "since>", "command"), rows)


def bar(marks: str, parts: Sequence[tuple[float, str]], total: float) -> Text:
    """Draw the parts of a whole.

    A nonempty part has at least one cell while there is one, so that it is visible. An excess is not drawn.
    """
    line, left, begun = Text(), _BAR, 0.0
    for mark, (amount, style) in zip(marks, parts, strict=False):
        begun += amount
        end = round(_BAR * min(begun / total, 1.0)) if total > 0 else 0
        cells = min(max(end - (_BAR - left), 1 if amount > 0 else 0), left)
        line.append(mark * cells, style)
        left -= cells
    return line.append(marks[-1] * left, "dim")


def _state(item: ListedObjectInfo) -> Text:
    if item["kind"] == "buffer":
        return _text("" if item["state"] == "listed" else item["state"], "yellow")
    if item["stale"]:
        return _text("stale", "red")
    if not item["current"]:
        return _text("old", "yellow")
    return _text("" if item["cached"] else "uncached", "dim")


def _holders(view: View, item: ListedObjectInfo) -> str:
    found = []
    for holder in item["holders"]:
        command = f"{holder['pid']} {one_line(view.snapshot.commands.get(holder['pid'], ''))}".rstrip()
        found.append(f"task {one_line(holder['session'])}, not fetched" if holder["kind"] == "task" else command)
    return ", ".join(found)


def _row(*cells: object) -> list[Text]:
    return [cell if isinstance(cell, Text) else _text(cell) for cell in cells]


def _text(value: object, style: str = "") -> Text:
    # Untrusted text has no control characters.
    return Text(one_line(str(value)), style)


def _size(nbytes: int | None, otherwise: str) -> Text:
    return _text(otherwise, "dim") if nbytes is None else _text(size(nbytes))


def _rate(rate: float | None) -> Text:
    if rate is None:
        return _text("-", "dim")
    return _text(_count(rate) if rate >= 100 else f"{rate:.1f}", "" if rate else "dim")


def _count(count: float) -> str:
    for unit in ("", "k", "M"):
        if count < 10_000:
            return f"{count:.0f}{unit}"
        count /= 1000
    return f"{count:.0f}G"


def _device(device: str) -> str:
    """Abbreviate a device: of a GPU's UUID the part that is also in socket names."""
    return one_line(device[: len("GPU-") + 8] if device.startswith("GPU-") else device)
