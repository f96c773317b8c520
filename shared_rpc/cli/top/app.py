"""The live view as a Textual application. Its tables are made in tables.py, its snapshots in watching.py."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, ClassVar

from rich.text import Text
from textual import on, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.coordinate import Coordinate
from textual.events import Key
from textual.screen import ModalScreen
from textual.timer import Timer
from textual.widgets import DataTable, Footer, HelpPanel, Input, Sparkline, Static

from shared_rpc import Client
from shared_rpc.cli.rendering import origin, several
from shared_rpc.cli.top.tables import ORDERS, ObjectChoice, Table, arranged, detail, objects, others, summary
from shared_rpc.cli.top.watching import Action, ServerWatcher, Snapshot
from shared_rpc.errors import SharedRPCError, one_line
from shared_rpc.protocol.infos import ListedObjectInfo

#: Signals that end the view.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
#: At most a tenth of the time is spent on answers: watching a server with many objects must not slow it down.
_SHARE = 10
#: Number of snapshots in the history of calls.
_REMEMBERED = 120
#: Maximum rows of a table: Textual measures every cell, which takes a third of a millisecond for a row.
_ROWS = 500
#: Minimum width of the first column, which has up to a third of the terminal's.
_LEAST = 14


class Grid(DataTable[Text]):
    """A table whose rows are replaced at each poll."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "cursor_down", "Down", show=False),
        Binding("k", "cursor_up", "Up", show=False),
        Binding("home,g", "scroll_top", "First", show=False),
        Binding("end,G", "scroll_bottom", "Last", show=False),
    ]

    def show(self, table: Table) -> None:
        """Replace the rows. A cursor on the first row stays there; a cursor on another row follows that row."""
        place, scrolled = self.cursor_row, self.scroll_offset
        kept = self.selected if place else None
        # Without its watchers, which would scroll to the cursor, away from the user's scroll position.
        self.set_reactive(DataTable.cursor_coordinate, Coordinate(0, 0))
        self.clear(columns=True)
        titles, *rows = table.aligned(max(self.app.size.width // 3, _LEAST))
        for title in titles:
            self.add_column(title, width=title.cell_len)
        for key, cells in zip(table.keys, rows, strict=True):
            self.add_row(*cells, key=key)
        row = self.get_row_index(kept) if kept is not None and kept in self.rows else place
        self.set_reactive(DataTable.cursor_coordinate, Coordinate(min(place, max(self.row_count - 1, 0)), 0))
        self.set_scroll(*scrolled)
        self.move_cursor(row=row, scroll=row != place)
        # Textual keeps the height of a table that it laid out before it measured the rows, which would remain 0.
        self.refresh(layout=True)

    @property
    def selected(self) -> str | None:
        """The key of the row under the cursor."""
        if not self.is_valid_row_index(self.cursor_row):
            return None
        return self.coordinate_to_cell_key(self.cursor_coordinate).row_key.value


class Question(ModalScreen[str]):
    """A question that is answered with one key."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        """Show the text."""
        yield Static(self._text, markup=False)

    def on_key(self, event: Key) -> None:
        """Return the key as the answer."""
        event.stop()
        self.dismiss(event.key)


class TopApp(App[None]):
    """The live view of a server.

    :param watcher: queries the server, in threads.
    :param interval: seconds between two polls.
    """

    CSS = """
    #facts, #others Static { text-wrap: nowrap; text-overflow: ellipsis; }
    #trouble { color: $text-error; display: none; }
    #others { height: auto; max-height: 60%; }
    Grid { scrollbar-size: 0 1; }
    #objects { height: 1fr; min-height: 3; }
    #detail { max-height: 5; color: $text-muted; }
    .-short #detail { display: none; }
    #order { height: 1; }
    #order Static { width: 1fr; color: $text-muted; }
    Sparkline { width: 20; height: 1; }
    Input { border: none; height: 1; padding: 0; display: none; }
    Question { align: center bottom; background: transparent; }
    Question Static { background: $warning-muted; color: $text-warning; }
    """
    VERTICAL_BREAKPOINTS = [(0, "-short"), (14, "-tall")]  # noqa: RUF012  an instance variable of App
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("question_mark,h", "help", "Help", key_display="?"),
        Binding("s", "sort(1)", "Sort"),
        Binding("S", "sort(-1)", "Sort by the previous", show=False),
        Binding("r", "reverse", "Reverse"),
        Binding("i", "invalidate", "Invalidate"),
        Binding("slash,f", "filter", "Filter", key_display="/"),
        Binding("escape", "show_all", "Show all", show=False),
        Binding("ctrl+c", f"end({signal.SIGINT:d})", "Quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", "Suspend", show=False, priority=True),
    ]

    def __init__(self, watcher: ServerWatcher, interval: float) -> None:
        super().__init__()
        self._watcher, self._asking = watcher, asyncio.Lock()
        self._interval = interval
        self._next: Timer | None = None
        self._history: deque[float] = deque(maxlen=_REMEMBERED)
        self._shot: Snapshot | None = None
        self._choice = ObjectChoice()

    def compose(self) -> ComposeResult:
        """Stack facts, tables and keys."""
        yield Static("shared-rpc top", id="facts", markup=False)
        yield Static(id="trouble", markup=False)
        with VerticalScroll(id="others"):
            yield Static()
        yield Grid(id="objects", cursor_type="row")
        yield Static(id="detail", markup=False)
        with Horizontal(id="order"):
            yield Static(markup=False)
            yield Sparkline()
        yield Input(placeholder="endpoints with")
        yield Footer(compact=True)

    def on_load(self) -> None:
        """Handle signals, before the terminal is changed: Textual leaves them to their defaults, which do not restore it."""
        for number in _ENDING:
            asyncio.get_running_loop().add_signal_handler(number, self.action_end, number)

    def on_mount(self) -> None:
        """Start polling."""
        self.query_one("#objects").focus()
        self.poll()

    @work
    async def poll(self, action: Action | None = None, server_id: str = "") -> None:
        """Query the server in a thread and show the result, after executing an action, if any, on the server of that id."""
        async with self._asking:
            notice = await asyncio.to_thread(self._watcher.execute, action, server_id) if action is not None else ""
            begin = time.monotonic()
            try:
                found: Snapshot | str = await asyncio.to_thread(self._watcher.poll)
            except SharedRPCError as error:
                found, begin = str(error), time.monotonic()
        if not self.is_running:  # an answer may arrive while the view closes
            return
        if notice:
            self.notify(notice, markup=False)
        self.show(found)
        # One timer for the next poll, also if an action caused a poll in between.
        if self._next is not None:
            self._next.stop()
        self._next = self.set_timer(max(self._interval, _SHARE * (time.monotonic() - begin)), self.poll)

    def show(self, found: Snapshot | str) -> None:
        """Show a snapshot, or the reason why there is none."""
        trouble = self.query_one("#trouble", Static)
        if isinstance(found, str):
            trouble.update(one_line(found))
        else:
            self._history.extend([sum(rate.calls for rate in found.rates.values())] if found.rates else [])
            self._shot = found
        trouble.display = isinstance(found, str)
        self._draw()

    def on_resize(self) -> None:
        """Fit the tables to the terminal."""
        self.call_after_refresh(self._draw)

    def _draw(self) -> None:
        shot, choice = self._shot, self._choice
        if shot is None or not self.is_running:
            return
        self.query_one("#facts", Static).update(summary(shot))
        self.query_one("#others Static", Static).update(Text("\n").join(table.lines() for table in others(shot)))
        shown, whole = self._shown(), len(shot.objects)
        self.query_one("#objects", Grid).show(objects(shot, shown[:_ROWS]))
        order = f"objects {f'{len(shown)}/' if choice.filter else ''}{whole} by {choice.sort}"
        order += ", reversed" if choice.reverse else ""
        order += f", the first {_ROWS}" if len(shown) > _ROWS else ""
        order += f", endpoints with {one_line(choice.filter)!r}, Esc: all" if choice.filter else ""
        self.query_one("#order Static", Static).update(order)
        self.query_one(Sparkline).data = list(self._history)
        self._show_detail()

    @on(DataTable.RowHighlighted, "#objects")
    def _show_detail(self) -> None:
        if not self.is_running:
            return
        item = self._selected()
        text = detail(self._shot, item) if self._shot is not None and item is not None else ""
        self.query_one("#detail", Static).update(text)

    def _shown(self) -> Sequence[ListedObjectInfo]:
        return arranged(self._shot.objects, self._choice) if self._shot is not None else ()

    def _selected(self) -> ListedObjectInfo | None:
        key = self.query_one("#objects", Grid).selected
        return next((item for item in self._shown() if item["object_id"] == key), None)

    def _choose(self, **changes: Any) -> None:
        self._choice = self._choice._replace(**changes)
        self._draw()

    def action_end(self, number: int) -> None:
        """Exit as if killed by the signal ``number``."""
        self.exit(return_code=128 + number)

    def action_help(self) -> None:
        """Show or hide the keys."""
        if self.screen.query(HelpPanel):
            self.action_hide_help_panel()
        else:
            self.action_show_help_panel()

    def action_sort(self, step: int) -> None:
        """Select the next or previous sort order."""
        names = list(ORDERS)
        self._choose(sort=names[(names.index(self._choice.sort) + step) % len(names)], reverse=False)

    def action_reverse(self) -> None:
        """Reverse the order."""
        self._choose(reverse=not self._choice.reverse)

    def action_filter(self) -> None:
        """Prompt for a part of an endpoint's name."""
        self.query_one(Input).display = True
        self.query_one(Input).focus()

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        self._choose(filter=event.value)

    @on(Input.Submitted)
    def _entered(self) -> None:
        self.query_one(Input).display = False
        self.query_one("#objects").focus()

    def action_show_all(self) -> None:
        """Remove the filter."""
        self.query_one(Input).value = ""
        self._entered()

    def action_invalidate(self) -> None:
        """Drop the selected object, or all objects of its endpoint, once the user has confirmed."""
        item = self._selected()
        if item is None or self._shot is None:
            self.notify("there is no object to invalidate")
            return
        object_id, endpoint, label = item["object_id"], item["endpoint"], one_line(origin(item))
        server_id = self._shot.server["server_id"]
        if not item["cached"]:
            self.notify(f"{label} is not in the cache: it is dropped with its last holder", markup=False)
            return

        def free(client: Client) -> str:
            return f"buffer {object_id} {'' if client.free_buffer(object_id) else 'was already '}freed"

        def drop(client: Client) -> str:
            return f"{label} {'' if client.invalidate_object(object_id) else 'was already '}dropped from the cache"

        def drop_all(client: Client) -> str:
            return f"{several(client.invalidate_endpoint_cache(endpoint), 'cached result')} of {one_line(endpoint)} dropped"

        same = sum(one["endpoint"] == endpoint and one["cached"] for one in self._shot.objects)
        actions: dict[str | None, Action] = {"y": drop, "e": drop_all}
        question = f"invalidate {label}?  y yes  e all {same} of {one_line(endpoint)}  Esc no"
        if item["kind"] == "buffer":
            actions, question = {"y": free}, f"free buffer {object_id}?  y free it  Esc keep it"

        def answered(key: str | None) -> None:
            if key in actions:
                self.poll(actions[key], server_id)
            else:
                self.notify("nothing changed")

        self.push_screen(Question(question), answered)


def run(find: Callable[[str], Client], interval: float) -> int:
    """Show the server until a key or a signal ends the view; return the exit code."""
    with closing(ServerWatcher(find)) as watcher:
        app = TopApp(watcher, interval)
        app.run()
    return app.return_code or 0
