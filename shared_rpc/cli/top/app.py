"""The live view as a Textual application. Its tables are made in tables.py, its snapshots in watching.py."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from typing import ClassVar

from rich.console import JustifyMethod
from rich.text import Text
from textual import on, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.coordinate import Coordinate
from textual.events import Key
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, HelpPanel, Input, Sparkline, Static

from shared_rpc.cli.rendering import cell, origin
from shared_rpc.cli.top.tables import ORDERS, OTHERS, Table, arranged, detail, objects, summary
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

    def show(self, table: Table, row: int = 0) -> None:
        """Replace the rows, with the cursor on the given one. It is scrolled into view if it is not the previous one."""
        place, scrolled = self.cursor_row, self.scroll_offset
        # Without its watcher, which would scroll to the cursor, away from the user's scroll position.
        self.set_reactive(DataTable.cursor_coordinate, Coordinate(0, 0))
        self.clear(columns=True)
        sides: list[JustifyMethod] = ["right" if name.endswith(">") else "left" for name in table.columns]
        for name, side in zip(table.columns, sides, strict=True):
            self.add_column(Text(name.rstrip(">"), justify=side))
        for values in table.rows:
            cells = [cell(value) for value in values]
            cells[0].truncate(max(self.app.size.width // 3, _LEAST), overflow="ellipsis")
            for text, side in zip(cells, sides, strict=True):
                text.justify = side
            self.add_row(*cells)
        self.set_reactive(DataTable.cursor_coordinate, Coordinate(min(place, max(self.row_count - 1, 0)), 0))
        self.set_scroll(*scrolled)
        self.move_cursor(row=row, scroll=row != place)
        # Textual keeps the height of a table that it laid out before it measured the rows, which would remain 0.
        self.refresh(layout=True)


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
    #facts { text-wrap: nowrap; text-overflow: ellipsis; }
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
    ENABLE_COMMAND_PALETTE, AUTO_FOCUS = False, "#objects"
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
        self._watcher, self._interval = watcher, interval
        self._history: deque[float] = deque(maxlen=_REMEMBERED)
        self._shot: Snapshot | None = None
        self._listed: list[ListedObjectInfo] = []
        self._sort, self._reverse, self._wanted = "size", False, ""

    def compose(self) -> ComposeResult:
        """Stack facts, tables and keys."""
        yield Static("shared-rpc top", id="facts", markup=False)
        yield Static(id="trouble", markup=False)
        with VerticalScroll(id="others"):
            for _ in OTHERS:
                grid = Grid(cursor_type="none")
                grid.can_focus = False
                yield grid
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
        self.poll()

    @work
    async def poll(self) -> None:
        """Query the server in a thread, show the result, and continue with the next poll."""
        begin, trouble = time.monotonic(), ""
        try:
            self._shot = await asyncio.to_thread(self._watcher.poll)
            self._history.append(sum(rate.calls for rate in self._shot.rates.values()))
        except SharedRPCError as error:
            begin, trouble = time.monotonic(), one_line(str(error))
        if not self.is_running:  # an answer may arrive while the view closes
            return
        self.query_one("#trouble", Static).update(trouble)
        self.query_one("#trouble").display = bool(trouble)
        self._draw()
        self.set_timer(max(self._interval, _SHARE * (time.monotonic() - begin)), self.poll)

    @work
    async def execute(self, action: Action, server_id: str) -> None:
        """Execute an action in a thread, and show its result."""
        self.notify(await asyncio.to_thread(self._watcher.execute, action, server_id), markup=False)

    def on_resize(self) -> None:
        """Fit the tables to the terminal."""
        self.call_after_refresh(self._draw)

    def _draw(self) -> None:
        shot = self._shot
        if shot is None or not self.is_running:
            return
        self.query_one("#facts", Static).update(summary(shot))
        for grid, make in zip(self.query("#others Grid").results(Grid), OTHERS, strict=True):
            table = make(shot)
            grid.show(table)
            grid.display = bool(table.rows)
        grid, selected = self.query_one("#objects", Grid), self._selected()
        shown = arranged(shot.objects, self._sort, self._reverse, self._wanted)
        self._listed = shown[:_ROWS]
        row, rows = grid.cursor_row, {item["object_id"]: row for row, item in enumerate(self._listed)}
        # A cursor on the first row stays there; a cursor on another row follows its object.
        grid.show(objects(shot, self._listed), rows.get(selected["object_id"], row) if row and selected else row)
        order = f"objects {f'{len(shown)}/' if self._wanted else ''}{len(shot.objects)} by {self._sort}"
        order += ", reversed" if self._reverse else ""
        order += f", the first {_ROWS}" if len(shown) > _ROWS else ""
        order += f", endpoints with {one_line(self._wanted)!r}, Esc: all" if self._wanted else ""
        self.query_one("#order Static", Static).update(order)
        self.query_one(Sparkline).data = list(self._history)
        self._show_detail()

    @on(DataTable.RowHighlighted, "#objects")
    def _show_detail(self) -> None:
        item = self._selected()
        text = detail(self._shot, item) if self._shot is not None and item is not None else ""
        self.query_one("#detail", Static).update(text)

    def _selected(self) -> ListedObjectInfo | None:
        row = self.query_one("#objects", Grid).cursor_row
        return self._listed[row] if row < len(self._listed) else None

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
        self._sort, self._reverse = names[(names.index(self._sort) + step) % len(names)], False
        self._draw()

    def action_reverse(self) -> None:
        """Reverse the order."""
        self._reverse = not self._reverse
        self._draw()

    def action_filter(self) -> None:
        """Prompt for a part of an endpoint's name."""
        self.query_one(Input).display = True
        self.query_one(Input).focus()

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        self._wanted = event.value
        self._draw()

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
            return
        object_id, endpoint, server_id = item["object_id"], item["endpoint"], self._shot.server["server_id"]
        actions: dict[str | None, Action] = {
            "y": lambda client: client.invalidate_object(object_id),
            "e": lambda client: client.invalidate_endpoint_cache(endpoint),
        }
        same = sum(one["endpoint"] == endpoint and one["cached"] for one in self._shot.objects)
        question = f"invalidate {one_line(origin(item))}?  y yes  e all {same} of {one_line(endpoint)}  Esc no"
        if item["kind"] == "buffer":
            actions = {"y": lambda client: client.free_buffer(object_id)}
            question = f"free buffer {object_id}?  y free it  Esc keep it"

        def answered(key: str | None) -> None:
            if key in actions:
                self.execute(actions[key], server_id)

        self.push_screen(Question(question), answered)
