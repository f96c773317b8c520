"""The view at work: keys and news in, frames out, until somebody has seen enough."""

from __future__ import annotations

import os
import queue
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from rich.console import Console

from shared_rpc import Client
from shared_rpc.cli.top.bars import ASCII, BLOCKS, Glyphs
from shared_rpc.cli.top.controls import State, arranged, kept_selected, press
from shared_rpc.cli.top.layout import everything, frame
from shared_rpc.cli.top.sampler import Carried, Event, Failed, Sampler, Trouble
from shared_rpc.cli.top.sections import View
from shared_rpc.cli.top.snapshot import Snapshot, rates
from shared_rpc.cli.top.terminal import Terminal
from shared_rpc.errors import SharedRPCError

__all__ = ["Model", "print_once", "run"]

#: Frames that the history of calls goes back.
_REMEMBERED = 120


class Model:
    """What is known and what keys have changed: from events and keys to views. Knows neither terminal nor server."""

    def __init__(self, state: State, glyphs: Glyphs) -> None:
        self.state = state
        self.view = View(None, {}, state, (), glyphs, pid=os.getpid())
        self._history: deque[float] = deque(maxlen=_REMEMBERED)

    def take(self, event: Event) -> None:
        """Something was told.

        :raises BaseException: a defect of who tells.
        """
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Snapshot):
            found = rates(self.view.snapshot, event)
            if found:
                self._history.append(sum(rate.calls for rate in found.values()))
            self.view = replace(self.view, snapshot=event, rates=found, trouble="", history=tuple(self._history))
        elif isinstance(event, Trouble):
            self.view = replace(self.view, trouble=event.text, rates={})
        elif isinstance(event, Carried):
            self.state = replace(self.state, notice=event.text)
        self.arrange()

    def arrange(self) -> None:
        """Bring the list in line with the state."""
        objects = self.view.snapshot.objects if self.view.snapshot is not None else ()
        shown = arranged(objects, self.state)
        self.state = kept_selected(self.state, self.view.shown, shown)
        self.view = replace(self.view, state=self.state, shown=shown)


def run(find: Callable[[str], Client], interval: float, state: State, console: Console) -> int | None:
    """Show the server until a key or a signal ends it: the signal's number, or None."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    model = Model(state, glyphs_of(console))
    with Terminal(console) as terminal:

        def tell(event: Event) -> None:
            events.put(event)
            terminal.wake()

        sampler = Sampler(find, interval, tell)
        sampler.start()
        try:
            while True:
                shown = frame(model.view, *terminal.size)
                terminal.draw(shown.lines)
                keys, ended_by = terminal.wait()
                if ended_by is not None:
                    return ended_by
                for key in keys:
                    model.state, action = press(model.state, key, model.view.shown, shown.page)
                    if action is not None:
                        sampler.carry_out(action)
                    model.arrange()
                if model.state.mode == "quit":
                    return None
                while not events.empty():
                    model.take(events.get())
        finally:
            sampler.close()


def print_once(find: Callable[[str], Client], interval: float, state: State, console: Console, width: int) -> None:
    """Print all there is, once: of two looks the second, because rates need two.

    :raises SharedRPCError: if no server answers.
    """
    model = Model(state, glyphs_of(console))
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    client = find("")  # whose error is the command's
    path = client.socket_path
    client.close()
    sampler = Sampler(lambda _: find(path), interval, events.put)
    sampler.start()
    try:
        for _ in range(2):
            event = events.get()
            if isinstance(event, Trouble):
                raise SharedRPCError(event.text)
            model.take(event)
    finally:
        sampler.close()
    for line in everything(model.view, width):
        line.rstrip()
        console.print(line, soft_wrap=True, highlight=False)


def glyphs_of(console: Console) -> Glyphs:
    """What a terminal can show."""
    return BLOCKS if console.encoding.lower().replace("-", "") in ("utf8", "utf16", "utf32") else ASCII
