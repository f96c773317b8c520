"""The view without a terminal: what fits, what is counted, what keys do, and what is asked of a server."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text

from shared_rpc import Client, Provider, Server
from shared_rpc.cli.discovery import find_server
from shared_rpc.cli.top.bars import ASCII, BLOCKS, bar, sparkline
from shared_rpc.cli.top.columns import Column, clipped, fit, joined, shares, table
from shared_rpc.cli.top.controls import ORDERS, Action, State, arranged, kept_selected, press
from shared_rpc.cli.top.keys import KeyReader
from shared_rpc.cli.top.layout import everything, frame, heights
from shared_rpc.cli.top.loop import Model
from shared_rpc.cli.top.sampler import Carried, Event, Failed, Sampler, Trouble, pause
from shared_rpc.cli.top.sections import View, device_name, lasted
from shared_rpc.cli.top.snapshot import Snapshot, rates
from shared_rpc.errors import ConfigurationError, ConnectError

GPU = "GPU-0123abcd-89ef-0123-4567-89abcdef0123"
MIB = 1 << 20


def thing(number: int, **facts: Any) -> dict[str, Any]:
    """What a server tells of a result."""
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
        "holders": [],
    } | facts


def session(number: int, pid: int, leases: int = 0) -> dict[str, Any]:
    """What a server tells of a client."""
    return {"session": f"s{number}", "pid": pid, "connections": 1, "leases": leases, "nbytes": leases * MIB, "since": 900.0}


def device(name: str = "cpu", **facts: Any) -> dict[str, Any]:
    """What a server tells of a device."""
    return {"id": name, "kind": "cpu", "name": name, "total": 1000 * MIB, "free": 500 * MIB, "used": 0, "limit": None} | facts


def run_of(key: str, **facts: Any) -> dict[str, Any]:
    """What a server tells of a run."""
    progress = {"done": 1.0, "total": 4.0, "message": "shard"}
    return {
        "endpoint": "load",
        "cache_key": key,
        "status": "running",
        "created_at": 990.0,
        "started_at": 991.0,
        "calls": 1,
        "tasks": [],
        "progress": progress,
    } | facts


def snapshot(at: float = 10.0, objects: Sequence[dict[str, Any]] = (), **facts: Any) -> Snapshot:
    """One moment of a server."""
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
        "descriptors": {"used": 7, "limit": 512, "available": 1024},
        "tasks": {"pending": 1, "running": 2},
        "workers": [],
    }
    return Snapshot(at, 1000.0, server | facts.pop("server", {}), objects, **facts)


def counts(**numbers: int) -> dict[str, int]:
    """An endpoint's counters."""
    return {"calls": 0, "hits": 0, "joined": 0, "builds": 0, "errors": 0} | numbers


def full() -> Snapshot:
    """A server with something of everything, and much of some."""
    worker = {"pid": 80, "number": 0, "device": GPU, "state": "ready", "runs": 1, "restarts": 2, "uptime": 60.0}
    held = [{"session": "s1", "pid": 81, "connections": 1}, {"session": "s2", "pid": 82, "connections": 1}]
    objects = [thing(number) for number in range(1, 40)]
    objects[5] |= {"holders": held, "leases": 2, "stale": True, "device": GPU}
    objects[6] |= {"cache_key": None, "cached": False, "endpoint": "编码模型" * 10}
    buffer = {"kind": "buffer", "endpoint": "", "cache_key": None, "state": "listed", "nbytes": 50 * MIB}
    return snapshot(
        objects=[*objects, thing(99, **buffer)],
        server={"workers": [worker, worker | {"pid": 83, "device": None, "state": "starting"}]},
        devices=[device(used=820 * MIB, limit=900 * MIB), device(GPU, used=100 * MIB)],
        runs=[run_of("load(size=7)"), run_of("load(size=8)", progress=None, status="pending", started_at=None, tasks=["t"])],
        sessions=[session(number, 80 + number, leases=number) for number in range(12)],
        endpoints={"load": counts(calls=100, hits=90, builds=10), "encode": counts(calls=5, errors=5)},
        commands={81: "python worker.py --port 8000", 82: "python notebook.py"},
    )


def view_of(latest: Snapshot | None, **state: Any) -> View:
    """What is shown of it."""
    model = Model(State(**state), BLOCKS)
    if latest is not None:
        model.take(replace(latest, at=latest.at - 1, endpoints={"load": counts(calls=50), "encode": counts()}))
        model.take(latest)
    return model.view


def texts(view: View, width: int, height: int = 50) -> list[str]:
    """The lines of a frame, without the blanks at their ends."""
    return [line.plain.rstrip() for line in frame(view, width, height).lines]


# What fits.


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(0, 200))
def test_shares_are_fair(wanted: list[int], available: int) -> None:
    """All is given that is wanted and there; whoever gets less than wanted gets as much as anybody, but for one."""
    given_out = shares(wanted, available)
    assert sum(given_out) == min(sum(wanted), available)
    assert all(share <= want for share, want in zip(given_out, wanted, strict=True))
    short = [share for share, want in zip(given_out, wanted, strict=True) if share < want]
    assert not short or max(given_out) <= min(short) + 1


def column(title: str, width: int, rank: int, **options: Any) -> Column:
    """A column with one cell of a width."""
    return Column(title, [Text("x" * width)], rank, **options)


def test_columns_go_by_rank() -> None:
    """The one of the highest rank first; the one of the lowest stays though it does not fit."""
    columns = [column("a", 10, 0), column("b", 10, 2), column("c", 10, 1)]
    assert [[one.title for one, _ in fit(columns, width)] for width in (32, 31, 21, 20, 3)] == [
        ["a", "b", "c"],
        ["a", "c"],
        ["a", "c"],
        ["a"],
        ["a"],
    ]


def test_elastic_columns_give_way_before_others_go() -> None:
    """Down to the least that is of use; what is left over is theirs, up to what they can do with."""
    columns = [column("a", 30, 0, least=5), column("b", 10, 1), column("c", 20, 2, least=10)]
    assert [width for _, width in fit(columns, 100)] == [30, 10, 20]
    assert [width for _, width in fit(columns, 37)] == [10, 10, 15]
    assert [width for _, width in fit(columns, 27)] == [5, 10, 10]
    assert [width for _, width in fit(columns, 26)] == [15, 10]


def test_a_table_is_never_wider_than_it_may_be() -> None:
    """Wide characters too take the cells that they take."""
    columns = [Column("name", [Text("编码模型" * 9)], 0, least=4), column("size", 7, 1, right=True)]
    for width in range(1, 60):
        assert all(line.cell_len <= width for line in table(columns, width, "bold", selected=0))


def test_pieces_are_joined_while_they_fit() -> None:
    """Of the first one at least the beginning."""
    pieces = [Text("one"), Text("two"), Text("three")]
    assert [joined(pieces, width).plain for width in (15, 14, 8, 7, 2)] == [
        "one  two  three",
        "one  two",
        "one  two",
        "one",
        "o…",
    ]
    assert joined([], 5).plain == ""
    assert clipped(Text("abc"), 0).plain == ""


MODES = ("list", "filter", "confirm", "help")


@pytest.mark.parametrize(
    ("latest", "mode"),
    [(latest, mode) for latest in (None, snapshot(), full()) for mode in MODES if latest is not None or mode != "confirm"],
)
def test_a_frame_fits_every_terminal(latest: Snapshot | None, mode: Any) -> None:
    """Whatever is to be shown, and however small the terminal is."""
    view = view_of(latest, selected=f"{6:024x}")
    about = full().objects[5] if mode == "confirm" else None
    troubled = replace(view, trouble="the server at 编码模型/编码模型 went away " * 3)
    for width, height, one in itertools.product((*range(1, 48, 2), 80, 200), (1, 2, 3, 5, 8, 24, 60), (view, troubled)):
        shown = frame(replace(one, state=replace(one.state, mode=mode, about=about)), width, height)
        assert len(shown.lines) == height
        assert all(line.cell_len <= width for line in shown.lines), (width, height)
        assert shown.page >= 1


def test_forty_columns_have_what_matters_most() -> None:
    """Of an object its name, size, how many hold it, and its age; of what is built its bar."""
    lines = texts(view_of(full()), 40, 40)
    (title,) = (line for line in lines if line.startswith("objects"))
    assert title.split()[-4:] == ["size", "held", "age", "state"]
    (build,) = (line for line in lines if line.startswith("load(size=7)"))
    assert "█" in build and "░" in build
    assert any(line.startswith("load(size=39)") and "39.0 MiB" in line for line in lines)


def test_a_wide_terminal_has_everything() -> None:
    """Who holds an object by process and command line, the device, the generation, that it is stale, its endpoint."""
    lines = texts(view_of(full(), sort="leases"), 180, 50)
    title = next(line for line in lines if line.startswith("objects"))
    for name in ("size", "held", "age", "state", "device", "gen", "used", "endpoint", "held by"):
        assert name in title
    row = next(line for line in lines if line.startswith("load(size=6)"))
    for text in ("6.0 MiB", "stale", "GPU-0123abcd ", "81 python worker.py --port 8000, 82 python notebook.py"):
        assert text in row


def test_heights_leave_objects_half_and_drop_the_last_tables_first() -> None:
    """A table that cannot have a title and a row is none."""
    assert heights([3, 3, 3], 20, 30) == ([3, 3, 3], 21)
    assert heights([9, 9, 9], 40, 30) == ([5, 5, 5], 15)
    assert heights([3, 3, 3], 20, 9) == ([2, 2, 0], 5)
    assert heights([3, 3], 20, 3) == ([0, 0], 3)
    assert heights([9, 9], 2, 30) == ([9, 9], 12)


@given(st.lists(st.integers(2, 40), max_size=5), st.integers(2, 100), st.integers(0, 80))
def test_heights_add_up(wanted: list[int], objects: int, room: int) -> None:
    """All of the room, and never more; no table is a title alone."""
    given_out, left = heights(wanted, objects, room)
    assert sum(given_out) + left == room
    assert all(lines == 0 or lines >= 2 for lines in given_out)


def test_what_is_selected_is_seen() -> None:
    """Wherever it is in a list that is longer than the screen."""
    for number in (1, 2, 20, 38, 39):
        view = view_of(full(), selected=f"{number:024x}")
        assert any(line.startswith(f"load(size={number})") for line in texts(view, 60, 24))


def test_who_holds_what_is_selected_is_told_in_full() -> None:
    """On lines of their own, where the terminal is too narrow for the columns; with the device and the generation."""
    view = view_of(full(), selected=f"{6:024x}")
    facts = f"on {device_name(GPU)}, generation 1, held by 81 python worker.py --port 8000, 82 python notebook.py"
    for width, height in ((60, 30), (40, 24), (100, 14)):
        lines = texts(view, width, height)
        first = lines.index(f"{6:024x}  load(size=6)")
        assert " ".join(lines[first + 1 : -1]) == facts


def test_very_many_holders_leave_room_for_the_list() -> None:
    """What is selected has a quarter of the screen, and what does not fit ends in an ellipsis; wide characters count twice."""
    held = [{"session": f"s{number}", "pid": number, "connections": 1} for number in range(100)]
    latest = full()
    latest.objects[5]["holders"], latest.objects[6]["holders"] = held, held[:1]
    lines = texts(view_of(latest, selected=f"{6:024x}"), 40, 24)
    assert lines[-7] == f"{6:024x}  load(size=6)" and lines[-2].endswith("…")
    name = texts(view_of(latest, selected=f"{7:024x}"), 40, 24)
    assert "编码模型" * 10 in "".join(name[-6:])


def test_memory_is_told_by_device() -> None:
    """Results, buffers and what others have of it; of a quota where there is one."""
    buffers = {"kind": "buffer", "endpoint": "", "state": "listed", "nbytes": 100 * MIB}

    def sizes(numbers: str) -> list[str]:
        return [word for number in numbers.split() for word in (number, "MiB")]

    view = view_of(
        snapshot(
            objects=[thing(1, **buffers)],
            devices=[device(used=300 * MIB, limit=400 * MIB), device(GPU, used=100 * MIB), device("odd", free=None)],
        )
    )
    rows = {line.split()[0]: line for line in texts(view, 120) if line.startswith(("cpu", "GPU", "odd"))}
    assert rows["cpu"].split() == ["cpu", "█" * 20 + "▓" * 10 + "░" * 10, *sizes("200.0 100.0 400.0 500.0 1000.0")]
    assert rows["GPU-0123abcd"].split()[1] == "█" * 4 + "▒" * 16 + "░" * 20
    assert rows["odd"].split()[1:] == ["░" * 40, "0", "B", "0", "B", "none", "-", "1000.0", "MiB"]


def test_short_runs_are_no_builds() -> None:
    """On a busy server a call of microseconds is under way at every moment; it is not looked at unless it says something."""
    short = {"created_at": 999.9, "progress": None}
    runs = [run_of("a", **short), run_of("b", **short, tasks=["t"]), run_of("c", created_at=999.9), run_of("d", progress=None)]
    lines = texts(view_of(snapshot(runs=runs)), 100)
    assert "builds 3" in "\n".join(lines)
    assert not any(line.startswith("a ") for line in lines)


def test_names_cannot_move_the_cursor() -> None:
    """A process's command line, a key and a message are others' texts."""
    evil = "x\x1b[2J\ny\r\x07"
    latest = snapshot(
        objects=[thing(1, cache_key=evil, endpoint=evil, holders=[{"session": "s1", "pid": 81, "connections": 1}])],
        runs=[run_of(evil, endpoint=evil, progress={"done": 1.0, "total": 2.0, "message": evil})],
        sessions=[session(1, 81)],
        endpoints={evil: counts(calls=1)},
        commands={81: evil},
    )
    view = replace(view_of(latest, selected=f"{1:024x}", notice=evil, filter=""), trouble=evil)
    for lines in (frame(view, 150, 40).lines, everything(view, 150)):
        assert all(character.isprintable() for line in lines for character in line.plain)


def test_without_a_server_the_reason_is_shown_whole() -> None:
    """It names the command that starts one, and a narrow terminal breaks the line."""
    view = replace(view_of(None), trouble="no server answers in /tmp: start one with 'shared-rpc serve app.py'")
    lines = texts(view, 30, 10)
    assert lines[0] == "shared-rpc top"
    assert "'shared-rpc serve app.py'" in " ".join(lines).replace("  ", " ")
    assert lines[-1] == "q quit"


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0s"), (0, "0s"), (119, "119s"), (121, "2m"), (7300, "2h"), (180_000, "2d")]
)
def test_ages_are_short(seconds: float, text: str) -> None:
    """A number and a letter."""
    assert lasted(seconds) == text


# Bars.


@given(st.lists(st.tuples(st.floats(0, 1e12), st.just("red")), max_size=3), st.floats(0, 1e12), st.integers(0, 80))
def test_a_bar_is_as_wide_as_asked(parts: list[tuple[float, str]], total: float, width: int) -> None:
    """Whatever it shows, more than there is included."""
    assert cell_len(bar(parts, total, width, BLOCKS).plain) == width


def test_a_bar_shows_what_is_little() -> None:
    """Something is not nothing; and a terminal of letters gets letters."""
    assert bar([(1, ""), (0, "")], 1000, 10, BLOCKS).plain == "█" + "░" * 9
    assert bar([(500, ""), (250, "")], 1000, 8, ASCII).plain == "####==.."


def test_a_sparkline_ends_with_the_latest() -> None:
    """As high as the highest of those that are shown."""
    assert sparkline([100, 0, 1, 2], 3, BLOCKS) == "▁▅█"
    assert sparkline([0, 0], 5, BLOCKS) == "▁▁"
    assert sparkline([1], 0, BLOCKS) == ""


# Counters.


def test_rates_are_of_a_second() -> None:
    """What was counted between two moments, by the time between them; an endpoint that is new counts from nothing."""
    earlier = snapshot(at=10.0, endpoints={"load": counts(calls=10, hits=4)})
    later = snapshot(at=12.0, endpoints={"load": counts(calls=20, hits=12, errors=1), "new": counts(calls=4)})
    found = rates(earlier, later)
    assert found["load"] == (5.0, 4.0, 0.0, 0.0, 0.5)
    assert found["load"].hit_share == 0.8
    assert found["new"].calls == 2.0
    assert found["new"].hit_share == 0.0


@pytest.mark.parametrize("changed", [{"server_id": "bb"}, {"pid": 78}, {"started_at": 901.0}], ids=str)
def test_another_server_counts_from_nothing(changed: dict[str, Any]) -> None:
    """So does one that was started again with the id of the one before: there is nothing to compare with."""
    earlier, later = snapshot(at=10.0), snapshot(at=11.0, endpoints={"load": counts(calls=4)}, server=changed)
    assert rates(earlier, later) == {}
    assert rates(None, later) == {}


def test_without_calls_there_is_no_share_of_hits() -> None:
    """It is not nought."""
    found = rates(snapshot(at=1.0), snapshot(at=2.0, endpoints={"load": counts()}))
    assert found["load"].hit_share is None


# Keys.


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"jq", ["j", "q"]),
        (b"\x1b[A\x1bOB", ["up", "down"]),
        (b"\x1b[5~\x1b[6~\x1b[1~\x1b[4~\x1b[H\x1b[F", ["page up", "page down", "home", "end", "home", "end"]),
        (b"\r\n\x7f\x08", ["enter", "enter", "backspace", "backspace"]),
        (b"\x1b[15~x\x1b[1;5Cy\x1b[?1;2cz", ["x", "y", "z"]),
        (b"\x1bq", ["escape", "q"]),
        ("é模".encode(), ["é", "模"]),
        (b"\x00\x07\xff", ["�"]),
    ],
    ids=repr,
)
def test_keys(data: bytes, keys: list[str]) -> None:
    """As terminals send them, in one piece and byte by byte; what is no key here is passed over."""
    reader, bytewise = KeyReader(), KeyReader()
    assert reader.feed(data) == keys
    assert [key for number in data for key in bytewise.feed(bytes([number]))] == keys
    assert not reader.undecided and not bytewise.undecided


def test_the_escape_key_is_told_when_nothing_follows() -> None:
    """Until then it may be the beginning of another key."""
    reader = KeyReader()
    assert reader.feed(b"\x1b") == [] and reader.undecided
    assert reader.decide() == ["escape"] and not reader.undecided
    assert reader.feed(b"\x1b[") == [] and reader.decide() == [] and reader.feed(b"A") == ["A"]


# What keys do.

SHOWN = [thing(3), thing(2), thing(1)]


def after(state: State, *keys: str) -> State:
    """The state after keys that ask nothing of a server."""
    for key in keys:
        state, action = press(state, key, SHOWN)
        assert action is None
    return state


def test_orders() -> None:
    """Each by what its name says, from what one looks for first; and reversed."""
    items = [
        thing(1, nbytes=5, leases=1, cache_key="B", created_at=3.0, last_accessed_at=9.0),
        thing(2, nbytes=9, leases=0, cache_key="c", created_at=1.0, last_accessed_at=7.0),
        thing(3, nbytes=7, leases=2, cache_key="a", created_at=2.0, last_accessed_at=8.0),
    ]

    def order(**state: Any) -> list[int]:
        return [int(item["object_id"], 16) for item in arranged(items, State(**state))]

    found = {name: order(sort=name) for name in ORDERS}
    assert found == {"size": [2, 3, 1], "age": [2, 3, 1], "leases": [3, 1, 2], "name": [3, 1, 2], "access": [1, 3, 2]}
    assert {name: order(sort=name, reverse=True)[::-1] for name in ORDERS} == found


def test_equal_objects_stay_in_their_places() -> None:
    """However the server lists them."""
    items = [thing(number, nbytes=1) for number in range(5)]
    assert arranged(items, State()) == arranged(items[::-1], State())


def test_the_keys_of_orders() -> None:
    """The next and the previous, round and round; another order begins with its own direction."""
    names = list(ORDERS)
    assert [after(State(), *"s" * times).sort for times in range(6)] == [*names, names[0]]
    assert after(State(), "S").sort == names[-1]
    assert after(State(), "r").reverse and not after(State(), "r", "r").reverse
    assert not after(State(), "r", "s").reverse


def test_moving() -> None:
    """From one to the next, by pages and to the ends, and no further; the first key selects the first."""
    ids = [item["object_id"] for item in SHOWN]
    for keys, place in [("j", 0), ("jj", 1), ("jjjjj", 2), ("jjk", 0), ("jkkk", 0), ("G", 2), ("jjjg", 0)]:
        assert after(State(), *keys).selected == ids[place], keys
    assert after(State(), "down", "page down").selected == ids[2]
    assert after(State(), "end", "page up", "up").selected == ids[0]
    assert press(State(), "down", [])[0] == State()


def test_the_selection_stays_with_its_object() -> None:
    """Wherever it is sorted to; and where it has gone, with what took its place."""
    state = State(selected=SHOWN[1]["object_id"])
    assert kept_selected(state, SHOWN, SHOWN[::-1]) == state
    assert kept_selected(state, SHOWN, [SHOWN[0], SHOWN[2]]).selected == SHOWN[2]["object_id"]
    assert kept_selected(state, SHOWN, [SHOWN[0]]).selected == SHOWN[0]["object_id"]
    assert kept_selected(state, SHOWN, []).selected == ""


def test_filtering_by_endpoint() -> None:
    """While it is typed already; Esc goes back to what was before, and from the list to everything."""
    items = [thing(1, endpoint="load"), thing(2, endpoint="Encode"), thing(3, endpoint="", kind="buffer", state="listed")]

    def names(state: State) -> list[str]:
        return sorted(item["endpoint"] for item in arranged(items, state))

    typed = after(State(), "/", "e", "n", "x", "backspace")
    assert (typed.mode, names(typed)) == ("filter", ["Encode"])
    entered = after(typed, "enter")
    assert (entered.mode, names(entered)) == ("list", ["Encode"])
    assert after(entered, "f", "z", "escape").filter == "en"
    assert names(after(entered, "escape")) == ["", "Encode", "load"]
    assert names(after(State(), "/", *"buff")) == [""]
    assert after(typed, "q", "s").filter == "enqs"
    assert after(typed, "delete line", "up").filter == ""


def test_invalidating_asks_first() -> None:
    """It is done with y for the object, with e for its endpoint, and with no other key."""
    asked = after(State(), "j", "j", "i")
    assert asked.mode == "confirm"
    state, action = press(asked, "y", SHOWN)
    assert (state.mode, action) == ("list", Action("object", SHOWN[1]["object_id"], "load(size=2)"))
    assert press(asked, "e", SHOWN)[1] == Action("endpoint", "load", "load")
    for key in ("n", "escape", "enter", "q", "i", "down"):
        state, action = press(asked, key, SHOWN)
        assert (state.mode, action, state.notice) == ("list", None, "left as it is")


def test_what_is_confirmed_is_what_was_asked_about() -> None:
    """Though it has gone, and another object is selected in its place, when the key is pressed."""
    asked = after(State(), "j", "i")
    moved = kept_selected(asked, SHOWN, SHOWN[1:])
    assert moved.selected == SHOWN[1]["object_id"]
    assert press(moved, "y", SHOWN[1:])[1] == Action("object", SHOWN[0]["object_id"], "load(size=3)")


def test_a_buffer_is_freed() -> None:
    """It has no endpoint whose others could be meant."""
    buffer = thing(9, kind="buffer", endpoint="", cache_key=None, state="listed")
    asked, _ = press(State(selected=buffer["object_id"]), "i", [buffer])
    assert press(asked, "y", [buffer])[1] == Action("buffer", buffer["object_id"], f"buffer {buffer['object_id']}")
    assert press(asked, "e", [buffer])[1] is None


def test_what_cannot_be_invalidated_is_told() -> None:
    """Nothing selected, or an object that its holders alone keep; the next key takes the notice away."""
    assert "select an object first" in after(State(), "i").notice
    loose = thing(9, cached=False)
    state, _ = press(State(selected=loose["object_id"]), "i", [loose])
    assert (state.mode, state.notice) == ("list", "load(size=9) is not in the cache: it goes with its last holder")
    assert press(state, "s", [loose])[0].notice == ""


def test_help_and_quitting() -> None:
    """Any key leads back from help; q ends, from there too."""
    assert after(State(), "?").mode == after(State(), "h").mode == "help"
    assert after(State(), "?", "x").mode == "list"
    assert after(State(), "?", "q").mode == after(State(), "q").mode == "quit"
    assert "invalidate what is selected" in "\n".join(texts(view_of(full(), mode="help"), 80, 24))


def test_the_question_names_what_it_is_about() -> None:
    """And how many of its endpoint there are; at 40 columns the answers are left."""
    view = view_of(full(), selected=f"{6:024x}", mode="confirm", about=full().objects[5])
    assert texts(view, 100, 30)[-1] == "invalidate load(size=6)?  y yes  e all 38 of load  Esc no"
    assert texts(view, 36, 30)[-1] == "y yes  e all 38 of load  Esc no"


# The model: events in, views out.


def test_trouble_keeps_what_was_seen() -> None:
    """It is shown with why there is nothing newer, and no rate; the next snapshot ends it."""
    model = Model(State(), BLOCKS)
    model.take(snapshot(at=1.0, objects=[thing(1)], endpoints={"load": counts()}))
    model.take(snapshot(at=2.0, objects=[thing(1)], endpoints={"load": counts(calls=3)}))
    assert model.view.history == (3.0,)
    model.take(Trouble("it went away"))
    assert "it went away" in texts(model.view, 80)
    assert any(line.startswith("load(size=1)") for line in texts(model.view, 80))
    assert model.view.rates == {}
    model.take(snapshot(at=3.0))
    assert "it went away" not in texts(model.view, 80)


def test_what_became_of_an_action_is_told() -> None:
    """In the last line."""
    model = Model(State(), BLOCKS)
    model.take(snapshot())
    model.take(Carried("3 cached results of load dropped"))
    assert texts(model.view, 80)[-1] == "3 cached results of load dropped"


def test_a_defect_is_raised() -> None:
    """What goes wrong in another thread is not swallowed."""
    with pytest.raises(ZeroDivisionError):
        Model(State(), BLOCKS).take(Failed(ZeroDivisionError()))


# Which server is asked.


def test_of_several_servers_the_one_there_was_is_found_again(base_path: str, provider: Provider) -> None:
    """Another one that has come meanwhile is not taken for it; without one there was, somebody has to say which."""
    with Server(provider) as first, Server(Provider(f"{base_path}-another", device="cpu")) as other:
        for server in (first, other):
            with find_server(None, None, server.socket_path) as client:
                assert client.socket_path == server.socket_path
        with pytest.raises(ConfigurationError, match="several servers answer; choose one with --socket"):
            find_server(None, None)
        with find_server(None, base_path) as client:
            assert client.socket_path == first.socket_path


# The thread that asks.


class Told:
    """What a sampler tells, one by one."""

    def __init__(self, find: Callable[[str], Client], interval: float = 0.01) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.sampler = Sampler(find, interval, self._events.put)
        self.sampler.start()

    def next(self, kind: type[Any]) -> Any:
        """The next event of a kind."""
        while not isinstance(event := self._events.get(timeout=20), kind):
            pass
        return event


def test_what_was_asked_of_a_server_that_has_gone_is_not_asked_of_the_next(
    provider: Provider, serve: Callable[..., Server]
) -> None:
    """It was meant for what was on the screen."""

    @provider.share
    def load(size: int) -> torch.Tensor:
        return torch.zeros(size)

    there = threading.Event()

    def find(earlier: str) -> Client:
        if not there.is_set():
            raise ConnectError("nobody is there")
        return Client(socket_path=server.socket_path, timeout=20, connect_timeout=0)

    server = serve()
    provider.call("load", 1)
    told = Told(find)
    assert told.next(Trouble).text == "nobody is there"
    told.sampler.carry_out(Action("endpoint", "load", "load"))
    assert told.next(Carried).text == "load: not done, because the server had gone"
    there.set()
    assert [item["endpoint"] for item in told.next(Snapshot).objects] == ["load"]
    told.sampler.carry_out(Action("endpoint", "load", "load"))
    assert told.next(Carried).text == "1 cached result of load dropped"
    assert told.next(Snapshot).objects == []
    told.sampler.close()


def test_what_cannot_be_done_is_told(provider: Provider, serve: Callable[..., Server]) -> None:
    """An object that has gone meanwhile, and an endpoint that there is not: neither ends the view."""
    server = serve()
    told = Told(lambda earlier: Client(socket_path=server.socket_path, timeout=20, connect_timeout=0))
    told.next(Snapshot)
    told.sampler.carry_out(Action("object", "0" * 24, "load(size=1)"))
    assert told.next(Carried).text.startswith("load(size=1): ")
    told.sampler.carry_out(Action("buffer", "0" * 24, "buffer 1"))
    assert told.next(Carried).text == "buffer 1 had gone already"
    told.next(Snapshot)
    told.sampler.close()


def test_a_server_with_many_objects_is_looked_at_less_often() -> None:
    """At most a tenth of the time goes to being watched."""
    assert pause(1.0, 0.01) == 1.0
    assert pause(1.0, 0.5) == 5.0


def test_a_defect_in_the_thread_is_told() -> None:
    """Whoever waits for snapshots would wait for ever."""

    def find(earlier: str) -> Client:
        raise ZeroDivisionError

    assert isinstance(Told(find).next(Failed).error, ZeroDivisionError)
