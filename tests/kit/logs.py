"""The lines of the library's log as JSON."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shared_rpc.observability import events
from shared_rpc.observability.logs import configure, log_event


@contextmanager
def json_stream() -> Iterator[io.StringIO]:
    """Yield the text that is logged as JSON from now on, at every level."""
    root = logging.getLogger()
    level = root.level
    text = io.StringIO()
    handler = configure("json", "debug", logging.StreamHandler(text))
    yield text
    root.removeHandler(handler)
    root.setLevel(level)
    events.remove_hook(log_event)


def lines(stream: io.StringIO, **fields: Any) -> list[dict[str, Any]]:
    """Return the lines with these fields."""
    found = [json.loads(line) for line in stream.getvalue().splitlines()]
    return [line for line in found if fields.items() <= line.items()]
