"""Tables of a snapshot, for the live and the printed view. The most important columns come first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rich.text import Text

from shared_rpc.cli.rendering import cell, copies_of, lasted, origin, percent, several, size, steps, tier_of
from shared_rpc.cli.top.watching import Rates, Snapshot
from shared_rpc.errors import one_line
from shared_rpc.protocol.infos import ListedObjectInfo

#: Seconds. A shorter run without progress reports is not listed as a build.
_SHORT = 0.25
_BAR = 20
#: Width of an endpoint's name next to a key, which begins with it.
_NAME = 20

#: Sort orders of objects: the key, and True if the largest is first.
ORDERS: dict[str, tuple[Callable[[ListedObjectInfo], Any], bool]] = {
    "size": (lambda item: item["nbytes"], True),
    "age": (lambda item: -item["created_at"], True),
    "leases": (lambda item: item["leases"], True),
    "name": (lambda item: origin(item).casefold(), False),
    "access": (lambda item: item["last_accessed_at"], True),
}


class Table(NamedTuple):
    """A table for :func:`shared_rpc.cli.rendering.table` or the live view."""

    columns: tuple[str, ...]
    rows: Sequence[Sequence[object]]


def summary(shot: Snapshot) -> Text:
    """Describe the server in one line and the sums in a second line, the most important facts first."""
    server, used = shot.server, shot.server["descriptors"]
    path = one_line(server["socket_path"] or "")
    facts = f"  pid {server['pid']}  {_device(server['device'])}  up {lasted(server['uptime'])}  {path}\n"
    calls, hits = (sum(getattr(rate, what) for rate in shot.rates.values()) for what in ("calls", "hits"))
    pieces = [
        Text(f"{size(server['nbytes'])} in {several(server['objects'], 'object')}", "bold"),
        Text(f"{calls:.1f} calls/s" if shot.rates else several(server["calls"], "call")),
        Text(several(server["failures"], "error"), "red" if server["failures"] else ""),
        *([Text(f"{copies_of(server)} in copies", "cyan")] if server["copies"] else []),
        *([Text(f"{server['waiting']} waiting for capacity", "yellow")] if server["waiting"] else []),
        Text(several(server["leases"], "lease")),
        Text(several(len(shot.sessions), "client")),
        Text(f"{min(hits / calls, 1.0):.0%} hits" if calls else "- hits"),
        Text(several(len(_builds(shot).rows), "build")),
        Text(several(server["tasks"]["pending"] + server["tasks"]["running"], "task")),
        Text(f"{used['used']} of {used['limit']} descriptors", "red" if used["used"] >= 0.75 * used["limit"] else ""),
    ]
    return Text.assemble(("shared-rpc top", "bold"), facts, Text("  ").join(pieces))


def arranged(
    found: Sequence[ListedObjectInfo], order: str = "size", reverse: bool = False, wanted: str = ""
) -> list[ListedObjectInfo]:
    """Return the objects of endpoints whose name contains ``wanted``, sorted."""
    key, descending = ORDERS[order]
    shown = [item for item in found if wanted.casefold() in (item["endpoint"] or "buffer").casefold()]
    # By id first, so that equal ones do not change places.
    shown.sort(key=lambda item: str(item["object_id"]))
    shown.sort(key=key, reverse=descending != reverse)
    return shown


def objects(shot: Snapshot, shown: Sequence[ListedObjectInfo]) -> Table:
    """Return the table of objects."""
    return Table(
        ("objects", "size>", "held>", "age>", "state", "used>", "active>", "tier", "device", "gen>", "endpoint", "held by"),
        [
            (
                origin(item),
                size(item["nbytes"]),
                cell(item["leases"], "green" if item["leases"] else "dim"),
                lasted(shot.wall - item["created_at"]),
                _state(item),
                lasted(shot.wall - item["last_accessed_at"]),
                cell(item["active"], "green" if item["active"] else "dim"),
                cell(tier_of(item), "dim" if item["tier"] == "device" else "cyan"),
                _device(item["device"]),
                item["generation"],
                item["endpoint"][:_NAME],
                _holders(shot, item),
            )
            for item in shown
        ],
    )


def detail(shot: Snapshot, item: ListedObjectInfo) -> str:
    """Describe one object, including its id and its copies, which no column shows."""
    tiers = f"tier {tier_of(item)}, copies {copies_of(item)}, active in {item['active']} of {item['leases']}"
    return f"{item['object_id']}  {one_line(origin(item))}\n{tiers}\nheld by {_holders(shot, item) or 'none'}"


def _memory(shot: Snapshot) -> Table:
    buffers: Counter[str] = Counter()
    for item in shot.objects:
        if item["kind"] == "buffer":
            buffers[item["device"]] += item["nbytes"]
    rows = []
    for one in shot.devices:
        kept, total, limit, free = min(buffers[one["id"]], one["used"]), one["total"], one["limit"], one["free"]
        own = one["used"] - kept
        # Without a quota, the whole is the device's memory, and other programs have a part of it.
        rest = max(total - free - one["used"], 0) if limit is None and free is not None else 0
        whole = bar([(own, "green"), (kept, "cyan"), (rest, "yellow")], total if limit is None else limit)
        sizes = ("-" if nbytes is None else size(nbytes) for nbytes in (own, kept, limit, free, total))
        rows.append((_device(one["id"]), whole, *sizes))
    return Table(("memory", "█ objects ▓ buffers ▒ others", "objects>", "buffers>", "quota>", "free>", "total>"), rows)


def _builds(shot: Snapshot) -> Table:
    rows = []
    for run in shot.runs:
        if run["tasks"] or run["progress"] or shot.wall - run["created_at"] >= _SHORT:
            progress = run["progress"]
            done = bar([(percent(progress) or 0.0, "green")], 100.0)
            took = "-" if run["started_at"] is None else lasted(shot.wall - run["started_at"])
            state = cell(run["status"], "green" if run["status"] == "running" else "dim")
            name = run["cache_key"] or run["endpoint"]
            rows.append((name, done, steps(progress), took, state, len(run["tasks"]), run["calls"]))
    return Table(("builds", "progress", "", "took>", "state", "tasks>", "calls>"), rows)


def _calls(shot: Snapshot) -> Table:
    counters, nothing = shot.endpoints, Rates(0, 0)
    rows = []
    for name in sorted(counters, key=lambda name: (-shot.rates.get(name, nothing).calls, -counters[name]["calls"], name)):
        rate, counts = shot.rates.get(name), counters[name]
        share = f"{min(rate.hits / rate.calls, 1.0):.0%}" if rate is not None and rate.calls else "-"
        totals = [counts["calls"], counts["builds"], counts["joined"]]
        errors = cell(counts["errors"], "red" if counts["errors"] else "")
        rows.append((name, f"{rate.calls:.1f}" if rate is not None else "-", share, *totals, errors))
    return Table(("calls", "calls/s>", "hits>", "calls>", "builds>", "joined>", "errors>"), rows)


def _workers(shot: Snapshot) -> Table:
    rows = []
    for one in shot.server["workers"]:
        state = cell(one["state"], "green" if one["state"] == "ready" else "yellow")
        restarts = cell(one["restarts"], "red" if one["restarts"] else "")
        device = _device(one["device"] or shot.server["device"])
        rows.append((one["pid"], state, one["runs"], restarts, device, lasted(one["uptime"])))
    return Table(("worker", "state", "runs>", "restarts>", "device", "up>"), rows)


def _clients(shot: Snapshot) -> Table:
    rows = []
    for one in sorted(shot.sessions, key=lambda one: (-one["leases"], one["since"], one["session"])):
        since, command = lasted(shot.wall - one["since"]), shot.commands.get(one["pid"], "")
        rows.append((one["pid"], one["leases"], size(one["nbytes"]), since, command))
    return Table(("client", "leases>", "holds>", "since>", "command"), rows)


#: The tables above the objects, the most important first.
OTHERS = (_memory, _builds, _calls, _workers, _clients)


def bar(parts: Sequence[tuple[float, str]], total: float) -> Text:
    """Draw a bar of the parts of a whole, each in its style. Any excess is cut off."""
    line, begun = Text(), 0.0
    for mark, (amount, style) in zip("█▓▒", parts, strict=False):
        begun += amount
        end = round(_BAR * min(begun / total, 1.0)) if total > 0 else 0
        # A small part has a cell too, so that it is visible.
        end = min(max(end, len(line) + (amount > 0)), _BAR)
        line.append(mark * (end - len(line)), style)
    return line.append("░" * (_BAR - len(line)), "dim")


def _state(item: ListedObjectInfo) -> Text:
    if item["kind"] == "buffer":
        return cell("" if item["state"] == "listed" else item["state"], "yellow")
    if item["stale"]:
        return cell("stale", "red")
    if not item["current"]:
        return cell("old", "yellow")
    return cell("" if item["cached"] else "uncached", "dim")


def _holders(shot: Snapshot, item: ListedObjectInfo) -> str:
    found = []
    for holder in item["holders"]:
        command = f"{holder['pid']} {one_line(shot.commands.get(holder['pid'], ''))}".rstrip()
        found.append(f"task {one_line(holder['session'])}, not fetched" if holder["kind"] == "task" else command)
    return ", ".join(found)


def _device(device: str) -> str:
    """Abbreviate a device: a GPU's UUID to the part that is also used in socket names."""
    return one_line(device[: len("GPU-") + 8] if device.startswith("GPU-") else device)
