"""A process of a node: it loads by ordinary calls, and sees when its broker has another version."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch  # noqa: F401  # it is no part of an attach

from benchmarks.servers import commands, configuration, say
from shared_rpc import Client

#: Seconds between two looks at what the broker has.
_LOOK = 0.002


def load(client: Client, name: str, mebibytes: int) -> tuple[float, float]:
    """Call, and have the module; return when that began and ended."""
    begin = time.monotonic()
    with client.call("module", name, mebibytes) as handle:
        assert len(handle.value) == mebibytes // 4, "it has all of its layers"
        return begin, time.monotonic()


class Change:
    """A version that the broker gets beside the one that it has: when it has it, and when that is current."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self._name = repr(name)
        self._before = {found["object_id"] for found in self._found()}
        self._prepared = 0.0
        self._current = 0.0
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _found(self) -> list[Any]:
        return [
            found
            for found in self._client.list_objects()
            if found["kind"] == "result" and found["cache_key"] is not None and self._name in found["cache_key"]
        ]

    def _look(self) -> None:
        while not self._current:
            now = [found for found in self._found() if found["object_id"] not in self._before]
            if now and not self._prepared:
                self._prepared = time.monotonic()
            if any(found["cached"] for found in now):
                self._current = time.monotonic()
            time.sleep(_LOOK)

    def times(self) -> tuple[float, float]:
        """Wait until it is current; return both times."""
        self._thread.join()
        return self._prepared, self._current


def main() -> None:
    """Answer commands until stdin is closed."""
    socket = configuration()["socket"]
    say(ready=True)
    change: Change | None = None
    with Client(socket_path=socket, timeout=300.0) as client, Client(socket_path=socket, timeout=300.0) as observer:
        for command in commands():
            match command:
                case {"load": name, "mebibytes": mebibytes}:
                    say(times=load(client, name, mebibytes))
                case {"watch": name}:
                    change = Change(observer, name)
                    say(watching=True)
                case _:
                    assert change is not None, "it was watching"
                    say(times=change.times())


if __name__ == "__main__":
    main()
