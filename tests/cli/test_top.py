"""The live view without a terminal: its tables and counters, its polls and actions, and its keys."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from textual.pilot import Pilot
from textual.widgets import HelpPanel, Input, Static

from shared_rpc import Client, Progress
from shared_rpc.cli.rendering import cell
from shared_rpc.cli.top.app import Grid, Question, TopApp
from shared_rpc.cli.top.tables import ORDERS, OTHERS, arranged, bar, detail, objects, summary
from shared_rpc.cli.top.watching import Rates, ServerWatcher, Snapshot, rates
from shared_rpc.errors import SharedRPCError
from tests.kit.world import World

LOAD = [f"load(size={number})" for number in range(100)]
GPU = "GPU-0123abcd-89ef-0123-4567-89abcdef0123"
MIB = 1 << 20


def thing(number: int, **facts: Any) -> dict[str, Any]:
    """A server's description of a result."""
    return {
        "object_id": f"{number:024x}",
        "endpoint": "load",
        "cache_key": f"load(size={number})",
        "nbytes": number * MIB,
        "device": "cpu",
        "generation": 1,
        "current": True,
        "leases": 0,
        "created_at": 1000.0 - number,
        "last_accessed_at": 1000.0,
        "stale": False,
        "kind": "result",
        "cached": True,
        "tier": "device",
        "active": 0,
        "pinned": False,
        "copies": {},
        "holders": [],
    } | facts


def session(number: int, pid: int, leases: int = 0) -> dict[str, Any]:
    """A server's description of a client."""
    return {"session": f"s{number}", "pid": pid, "leases": leases, "nbytes": leases * MIB, "since": 900.0}


def device(name: str = "cpu", **facts: Any) -> dict[str, Any]:
    """A server's description of a device."""
    return {"id": name, "kind": "cpu", "name": name, "total": 1000 * MIB, "free": 500 * MIB, "used": 0, "limit": None} | facts


def run_of(key: str, **facts: Any) -> dict[str, Any]:
    """A server's description of a run."""
    return {
        "endpoint": "load",
        "cache_key": key,
        "status": "running",
        "created_at": 990.0,
        "started_at": 991.0,
        "calls": 1,
        "tasks": [],
        "progress": Progress(1.0, 4.0, "shard"),
    } | facts


def snapshot(at: float = 10.0, objects: Sequence[dict[str, Any]] = (), **facts: Any) -> Snapshot:
    """A snapshot of a server."""
    server = {
        "server_id": "aa",
        "pid": 77,
        "device": "cpu",
        "started_at": 900.0,
        "uptime": 100.0,
        "socket_path": "/run/user/1000/shared-tensor-cpu.sock",
        "nbytes": sum(item["nbytes"] for item in objects),
        "objects": len(objects),
        "leases": 3,
        "calls": 12,
        "failures": 1,
        "copies": {},
        "waiting": 0,
        "descriptors": {"used": 7, "limit": 512},
        "tasks": {"pending": 1, "running": 2},
        "workers": [],
    }
    return Snapshot(at, 1000.0, server | facts.pop("server", {}), objects, **facts)


def counts(**numbers: int) -> dict[str, int]:
    """The counters of an endpoint."""
    return {"calls": 0, "hits": 0, "joined": 0, "builds": 0, "errors": 0} | numbers


def full() -> Snapshot:
    """A snapshot with items of all kinds, and many of some."""
    worker = {"pid": 80, "number": 0, "device": GPU, "state": "ready", "runs": 1, "restarts": 2, "uptime": 60.0}
    held = [
        {"kind": "session", "session": "s1", "pid": 81},
        {"kind": "session", "session": "s2", "pid": 82},
    ]
    objects = [thing(number) for number in range(1, 40)]
    objects[5] |= {"holders": held, "leases": 2, "active": 1, "stale": True, "device": GPU}
    objects[6] |= {"cache_key": None, "cached": False, "endpoint": "编码模型" * 10}
    buffer = {"kind": "buffer", "endpoint": "", "cache_key": None, "state": "listed", "nbytes": 50 * MIB}
    return snapshot(
        objects=[*objects, thing(99, **buffer)],
        server={"workers": [worker, worker | {"pid": 83, "device": None, "state": "starting"}]},
        devices=[device(used=820 * MIB, limit=900 * MIB), device(GPU, used=100 * MIB)],
        runs=[run_of("load(size=7)"), run_of("load(size=8)", progress=None, status="pending", started_at=None, tasks=["t"])],
        sessions=[session(number, 80 + number, leases=number) for number in range(12)],
        endpoints={"load": counts(calls=100, hits=90, builds=10), "encode": counts(calls=5, errors=5)},
        rates={"load": Rates(50, 50), "encode": Rates(5, 0)},
        commands={81: "python worker.py --port 8000", 82: "python notebook.py"},
    )


def plain(rows: Sequence[Sequence[object]]) -> list[list[str]]:
    """Return the unstyled cells of rows."""
    return [[cell(value).plain for value in row] for row in rows]


def rows_of(shot: Snapshot, name: str) -> list[list[str]]:
    """Return the rows of a table, given its first title."""
    return next(plain(table.rows) for table in (make(shot) for make in OTHERS) if table.columns[0] == name)


# Tables.


def test_an_object_has_a_row() -> None:
    """With its holders by pid and command line, its device, generation, state and endpoint; a buffer has none of these."""
    shot = full()
    held, uncached, buffer = plain(objects(shot, [shot.objects[5], shot.objects[6], shot.objects[39]]).rows)
    holders = "81 python worker.py --port 8000, 82 python notebook.py"
    assert held == ["load(size=6)", "6.0 MiB", "2", "6s", "stale", "0s", "1", "device", "GPU-0123abcd", "1", "load", holders]
    assert uncached[4] == "uncached" and len(uncached[10]) == 20
    assert buffer == ["buffer", "50.0 MiB", "0", "99s", "", "0s", "0", "device", "cpu", "1", "", ""]


def test_the_detail_of_an_object() -> None:
    """Its copies in lower tiers, how many holders have it active, and how much of it has been moved."""
    item = thing(1, tier="host", leases=3, active=0, pinned=True, copies={"host": 2 * MIB, "file": MIB})
    item["moving"] = {"to": "device", "done": 50 * MIB, "total": 200 * MIB}
    assert detail(snapshot(objects=[item]), item).splitlines()[1:] == [
        "tier host, pinned, 25% to device, copies 2.0 MiB host, 1.0 MiB file, active in 0 of 3",
        "held by none",
    ]


def test_memory_by_device() -> None:
    """That of results, of buffers and of other processes; as a share of the quota, where there is one."""
    buffers = {"kind": "buffer", "endpoint": "", "state": "listed", "nbytes": 100 * MIB}
    devices = [device(used=300 * MIB, limit=400 * MIB), device(GPU, used=100 * MIB)]
    cpu, gpu = rows_of(snapshot(objects=[thing(1, **buffers)], devices=devices), "memory")
    mib = [f"{number} MiB" for number in ("200.0", "100.0", "400.0", "500.0", "1000.0")]
    assert cpu == ["cpu", "█" * 10 + "▓" * 5 + "░" * 5, *mib]
    assert gpu[:2] == ["GPU-0123abcd", "█" * 2 + "▒" * 8 + "░" * 10]


def test_short_runs_are_no_builds() -> None:
    """Unless they are tasks or report progress: on a busy server some call of microseconds runs at every moment."""
    short = {"created_at": 999.9, "progress": None}
    runs = [run_of("a", **short), run_of("b", **short, tasks=["t"]), run_of("c", created_at=999.9), run_of("d", progress=None)]
    rows = rows_of(snapshot(runs=runs), "builds")
    assert [row[0] for row in rows] == ["b", "c", "d"]
    assert rows[1][1:] == ["█" * 5 + "░" * 15, "1/4 shard", "9s", "running", "0", "1"]


def test_calls_by_endpoint() -> None:
    """The busiest first, with the share that the cache answered; without rates there are the counts."""
    shot = snapshot(
        endpoints={"encode": counts(calls=20_000, errors=5), "load": counts(calls=150, hits=75, builds=7, joined=3)},
        rates={"load": Rates(100, 75), "encode": Rates(2000, 0)},
    )
    assert rows_of(shot, "calls") == [
        ["encode", "2000.0", "0%", "20000", "0", "0", "5"],
        ["load", "100.0", "75%", "150", "7", "3", "0"],
    ]
    assert rows_of(replace(shot, rates={}), "calls")[0][1:4] == ["-", "-", "20000"]


def test_workers_and_clients() -> None:
    """A worker without a device of its own has the server's; clients are ordered by the number of their leases."""
    assert rows_of(full(), "worker")[1] == ["83", "starting", "1", "2", "cpu", "60s"]
    clients = rows_of(full(), "client")
    assert (len(clients), clients[0]) == (12, ["91", "11", "11.0 MiB", "100s", ""])


def test_the_first_lines() -> None:
    """The server, and the sums in order of importance: a narrow terminal cuts the last ones."""
    facts, sums = summary(full()).plain.splitlines()
    assert facts == "shared-rpc top  pid 77  cpu  up 100s  /run/user/1000/shared-tensor-cpu.sock"
    assert sums.startswith("830.0 MiB in 40 objects  55.0 calls/s  1 error  3 leases  12 clients  91% hits  2 builds  3 tasks")
    latest = snapshot(server={"copies": {"host": 3 * MIB, "file": MIB}, "waiting": 2})
    assert "1 error  3.0 MiB host, 1.0 MiB file in copies  2 waiting for capacity  3 leases" in summary(latest).plain


def test_names_cannot_move_the_cursor() -> None:
    """Command lines, keys and messages are texts of other processes."""
    evil = "x\x1b[2J\ny\r\x07"
    item = thing(1, cache_key=evil, endpoint=evil, holders=[{"kind": "session", "session": "s1", "pid": 81}])
    runs = [run_of(evil, endpoint=evil, progress=Progress(1.0, 2.0, evil))]
    facts = {"sessions": [session(1, 81)], "endpoints": {evil: counts(calls=1)}, "commands": {81: evil}}
    shot = snapshot(objects=[item], runs=runs, **facts, server={"socket_path": evil})
    tables = [objects(shot, [item]), *(make(shot) for make in OTHERS)]
    texts = [summary(shot).plain, detail(shot, item), *(text for table in tables for row in plain(table.rows) for text in row)]
    assert all(line.isprintable() for text in texts for line in text.split("\n"))


@given(st.lists(st.tuples(st.floats(0, 1e12), st.just("red")), max_size=3), st.floats(0, 1e12))
def test_every_bar_has_the_same_width(parts: list[tuple[float, str]], total: float) -> None:
    """Whatever it shows, also more than the total."""
    drawn = bar(parts, total).plain
    assert cell_len(drawn) == 20
    first = parts[0][0] if parts else 0.0
    assert drawn.count("█") == max(round(20 * min(first / total, 1.0)) if total else 0, int(first > 0))


def test_orders() -> None:
    """Each by the criterion in its name, descending where useful, and reversed."""
    items = [
        thing(1, nbytes=5, leases=1, cache_key="B", created_at=3.0, last_accessed_at=9.0),
        thing(2, nbytes=9, leases=0, cache_key="c", created_at=1.0, last_accessed_at=7.0),
        thing(3, nbytes=7, leases=2, cache_key="a", created_at=2.0, last_accessed_at=8.0),
    ]

    def order(name: str, reverse: bool = False) -> list[int]:
        return [int(item["object_id"], 16) for item in arranged(items, name, reverse)]

    found = {name: order(name) for name in ORDERS}
    assert found == {"size": [2, 3, 1], "age": [2, 3, 1], "leases": [3, 1, 2], "name": [3, 1, 2], "access": [1, 3, 2]}
    assert {name: order(name, reverse=True)[::-1] for name in ORDERS} == found


# Counters.


def test_rates_are_per_second() -> None:
    """The difference of two snapshots over their time; a new endpoint and a restarted server count from zero."""
    earlier = snapshot(at=10.0, endpoints={"load": counts(calls=10, hits=4), "again": counts(calls=9)})
    later = {"load": counts(calls=20, hits=12), "new": counts(calls=4), "again": counts(calls=1)}
    assert rates(earlier, 12.0, later) == {"load": (5.0, 4.0), "new": (2.0, 0.0), "again": (0.0, 0.0)}


# Polls and actions.


@pytest.fixture
def watcher(world: World) -> Iterator[ServerWatcher]:
    """A watcher of a server that has built a tensor."""
    world.share("load")(lambda size: torch.zeros(int(size)))
    server = world.serve()
    world.provider.call("load", 1)
    watcher = ServerWatcher(lambda earlier: Client(socket_path=server.socket_path, timeout=20, connect_timeout=0))
    yield watcher
    watcher.close()


def test_polls(watcher: ServerWatcher) -> None:
    """The first has no rates; none has the session of the view itself."""
    first, second = watcher.poll(), watcher.poll()
    assert (first.rates, list(second.rates), second.sessions) == ({}, ["load"], [])
    assert [item["cache_key"] for item in second.objects] == ["load(size=1)"]


def test_actions(watcher: ServerWatcher) -> None:
    """Neither a refused one nor a missing server ends the view, and none reaches another server than the one shown."""
    assert watcher.execute(lambda client: 1, "") == "not done: the server has ended"
    shown = watcher.poll().server["server_id"]
    assert "has no object" in watcher.execute(lambda client: client.invalidate_object("0" * 24), shown)
    assert (
        watcher.execute(lambda client: client.invalidate_endpoint_cache("load"), "earlier") == "not done: the server has ended"
    )
    assert watcher.execute(lambda client: client.invalidate_endpoint_cache("load"), shown) == "1 object dropped"


# The application. It shows the snapshots of a test at once.


class Fake(ServerWatcher):
    """Returns the snapshot of a test, or raises its error, and records actions."""

    def __init__(self, latest: Snapshot) -> None:
        super().__init__(Mock())
        self.latest: Snapshot | str = latest
        results = {"invalidate_object": 1, "free_buffer": 1, "invalidate_endpoint_cache": 3, "get_server_info": latest.server}
        self._client = Mock(spec=Client, **{f"{name}.return_value": result for name, result in results.items()})

    def poll(self) -> Snapshot:
        """See :class:`ServerWatcher`."""
        if isinstance(self.latest, str):
            raise SharedRPCError(self.latest)
        return self.latest

    @property
    def actions(self) -> list[tuple[str, str]]:
        """The requests of all actions, with their arguments."""
        return [(request[0], request.args[0]) for request in self._client.method_calls if request.args]


async def until(pilot: Pilot[None], condition: Callable[[], object]) -> None:
    """Poll a condition of the picture: the pilot's own pause may be too short on a busy machine."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it is not shown"
        await pilot.pause(0.01)


class Shown:
    """The application, and the contents of its screen."""

    def __init__(self, app: TopApp, pilot: Pilot[None], fake: Fake) -> None:
        self.app, self.pilot, self.fake = app, pilot, fake

    async def press(self, *keys: str) -> None:
        """Press keys, and wait for the end of an action."""
        await self.pilot.press(*keys)
        await self.app.workers.wait_for_complete()
        await self.pilot.pause()

    async def show(self, latest: Snapshot | str) -> None:
        """Poll again."""
        self.fake.latest = latest
        await self.app.poll().wait()
        await self.drawn()

    async def drawn(self) -> None:
        """Wait until the latest snapshot is shown."""
        latest = self.fake.latest

        def shown() -> bool:
            return bool(self.text("#trouble")) if isinstance(latest, str) else self.app._shot is latest

        await until(self.pilot, shown)
        await self.pilot.pause()

    @property
    def objects(self) -> Grid:
        """The table of objects."""
        return self.app.query_one("#objects", Grid)

    @property
    def names(self) -> list[str]:
        """Its first column."""
        return [str(self.objects.get_row_at(row)[0]) for row in range(self.objects.row_count)]

    @property
    def selected(self) -> str:
        """The key of the row under the cursor."""
        return self.names[self.objects.cursor_row]

    def text(self, widget: str) -> str:
        """Return the text of a widget; nothing if it is hidden."""
        found = self.app.screen.query_one(widget, Static)
        return str(found.content) if found.display else ""

    @property
    def notices(self) -> list[str]:
        """The messages about outcomes of actions."""
        return [str(toast.render()) for toast in self.app.screen.query("Toast")]


@asynccontextmanager
async def showing(latest: Snapshot, size: tuple[int, int] = (120, 30)) -> AsyncIterator[Shown]:
    """Run the application on a screen of that size, with polls on demand."""
    fake = Fake(latest)
    app = TopApp(fake, 86400.0)
    async with app.run_test(size=size, notifications=True) as pilot:
        await app.workers.wait_for_complete()
        shown = Shown(app, pilot, fake)
        await shown.drawn()
        yield shown


def few(*sizes: int) -> Snapshot:
    """Make results of ``load`` of these sizes in MiB."""
    return snapshot(objects=[thing(number) for number in sizes])


@pytest.mark.asyncio
async def test_sorting_and_moving() -> None:
    """s and S choose the next and the previous order, r reverses it; keys move the cursor by one and to the ends."""
    async with showing(few(1, 2, 3)) as top:
        assert (top.names, top.text("#order Static")) == ([LOAD[3], LOAD[2], LOAD[1]], "objects 3 by size")
        for key, number in [("j", 2), ("k", 3), ("G", 1), ("g", 3)]:
            await top.press(key)
            assert top.selected == LOAD[number], key
        for key, order in [("r", "size, reversed"), ("s", "age"), ("S", "size"), ("S", "access")]:
            await top.press(key)
            assert top.text("#order Static") == f"objects 3 by {order}"


@pytest.mark.asyncio
async def test_tab_reaches_the_tables_above_the_objects() -> None:
    """The arrow keys scroll them if they do not fit; the next Tab returns to the objects."""
    async with showing(full(), (120, 24)) as top:
        await top.press("tab", "down")
        await until(top.pilot, lambda: top.app.query_one("#others").scroll_y > 0)
        await top.press("tab", "j")
        assert top.objects.cursor_row == 1


@pytest.mark.asyncio
async def test_the_cursor_stays_with_its_object() -> None:
    """At the top it stays at the top; if its object is gone, it stays at that row."""
    async with showing(few(2, 3, 4)) as top:
        await top.show(few(2, 3, 4, 5))
        assert top.selected == LOAD[5]
        await top.press("j")
        await top.show(few(2, 3, 4, 5, 6))
        assert top.selected == LOAD[4]
        await top.show(few(2, 3, 5))
        assert top.selected == LOAD[2]


@pytest.mark.asyncio
async def test_long_names_leave_space_for_the_other_columns() -> None:
    """The first column has a third of the terminal; numbers are at the right."""
    async with showing(snapshot(objects=[thing(1, cache_key=f"load({'x' * 200})")]), (60, 24)) as top:
        name, size, *_ = top.objects.get_row_at(0)
        assert (str(name), size.justify) == ("load(xxxxxxxxxxxxxx…", "right")


@pytest.mark.asyncio
async def test_filtering_by_endpoint() -> None:
    """The list follows each key; Esc removes the filter."""
    items = [thing(1), thing(2, endpoint="Encode"), thing(3, endpoint="", kind="buffer", state="listed")]
    async with showing(snapshot(objects=items)) as top:
        await top.press("slash", *"en", "enter")
        assert top.names == [LOAD[2]]
        assert top.text("#order Static") == "objects 1/3 by size, endpoints with 'en', Esc: all"
        await top.press("f", "q", "escape")
        assert (len(top.names), top.app.query_one(Input).display) == (3, False)


@pytest.mark.asyncio
async def test_invalidating_asks_first() -> None:
    """Whether for the object of the question, though it has moved, or for its endpoint; any other answer is no."""
    async with showing(few(1, 2, 3)) as top:
        for key in ("escape", "enter", "q", "down"):
            await top.press("i", key)
            assert (top.fake.actions, top.selected) == ([], LOAD[3]), key
            assert not isinstance(top.app.screen, Question)
        await top.press("j", "i")
        assert top.text("Question Static") == "invalidate load(size=2)?  y yes  e all 3 of load  Esc no"
        await top.show(few(1, 3))
        await top.press("y", "i", "e")
        assert top.fake.actions == [("invalidate_object", f"{2:024x}"), ("invalidate_endpoint_cache", "load")]
        assert top.notices[-2:] == ["1 object dropped", "3 objects dropped"]
        await top.show(snapshot(objects=[thing(9, kind="buffer", endpoint="", cache_key=None, state="listed")]))
        await top.press("i", "e", "i", "y")
        assert top.fake.actions[2:] == [("free_buffer", f"{9:024x}")]


@pytest.mark.asyncio
async def test_a_failed_poll_keeps_the_view() -> None:
    """The error is shown as plain text until the next snapshot."""
    first = snapshot(objects=[thing(1)])
    async with showing(first) as top:
        await top.show("it went away [red]\n\x1b[2J")
        assert (top.text("#trouble"), top.names) == ("it went away [red] [2J", [LOAD[1]])
        await top.show(replace(first))
        assert top.text("#trouble") == ""


@pytest.mark.asyncio
async def test_every_size_can_be_shown() -> None:
    """Also while a question is asked; a low terminal shows the objects only."""
    async with showing(full(), (1, 1)) as top:
        for size in ((40, 24), (20, 5), (200, 60)):
            await top.pilot.resize_terminal(*size)
            await until(top.pilot, lambda: bool(top.text("#detail")) == (size[1] >= 14))  # noqa: B023
            assert size[1] < 10 or top.objects.size.height >= 3
            await top.press("j", "i")
            assert isinstance(top.app.screen, Question)
            await top.press("n")


@pytest.mark.asyncio
async def test_a_slow_poll_delays_no_key() -> None:
    """It runs in a thread."""
    answers = threading.Event()

    class Slow(Fake):
        def poll(self) -> Snapshot:
            answers.wait(20)
            return super().poll()

    app = TopApp(Slow(few(1)), 86400.0)
    async with app.run_test() as pilot:
        await pilot.press("h")
        await until(pilot, lambda: app.screen.query(HelpPanel))
        assert not answers.is_set()
        answers.set()
