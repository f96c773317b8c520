"""``http://host:port/metrics``, for Prometheus, from a thread of its own.

Whoever comes through the port is a stranger. Connections are few, short and read only up to the end of the header; the text is
made at most a few times a second however often it is asked for; and of the server's loop nothing is asked but one reading each
time, for which nobody but this thread waits.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib.util
import logging
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from shared_rpc.errors import ConfigurationError
from shared_rpc.server.metrics import Reading, WorkersReading, families

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = ["Exporter", "Found"]

_log = logging.getLogger("shared_rpc.server")

#: What the servers of this process are like, and their workers where they have any.
Found = tuple[Reading, WorkersReading | None]

#: Connections at once; further ones are closed at once.
_MOST = 16
#: Seconds that one of them has in all.
_PATIENCE = 10.0
#: Seconds for which a text is good.
_FRESH = 0.25
#: Seconds that the server's loop has for a reading.
_BUSY = 5.0
#: Bytes of a request's header.
_HEADER = 8192


class Exporter:
    """Has its port from its making on; it serves between :meth:`start` and :meth:`close`.

    :param port: 0 for any that is free.
    :param option: what errors call the port: ``"--metrics-port"``.
    :raises ConfigurationError: if prometheus-client is not installed, or the port cannot be had.
    """

    def __init__(self, port: int, host: str = "127.0.0.1", option: str = "metrics_port") -> None:
        if importlib.util.find_spec("prometheus_client") is None:
            raise ConfigurationError(
                f"{option}={port}: metrics need the package prometheus-client: pip install 'shared-rpc[metrics]'"
            )
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=_MOST)
        except (OSError, OverflowError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ConfigurationError(
                f"{option}={port}: the port cannot be had on {host}: {why}; "
                f"choose another one, or end what listens there (ss -ltnp 'sport = :{port}' names it)"
            ) from error
        self.host, self.port = host, int(self._listener.getsockname()[1])
        self._post: Callable[[Callable[[], None]], object]
        self._read: Callable[[], Found]
        self._thread = threading.Thread(target=self._run, name="shared-rpc-metrics", daemon=True)
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event
        self._found: Found
        self._registry: Any = None
        self._made = float("-inf")
        self._texts: dict[str, tuple[bytes, str]] = {}
        self._making: asyncio.Lock
        self._connections: set[asyncio.Task[None]] = set()
        _exporters.add(self)

    @property
    def url(self) -> str:
        """Where the metrics are."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"

    def start(self, post: Callable[[Callable[[], None]], object], read: Callable[[], Found]) -> None:
        """Serve; return when it does.

        :param post: has the server's loop call a function; what it raises means that the server has ended.
        :param read: is called there.
        """
        self._post, self._read = post, read
        import prometheus_client  # noqa: F401  here, and not while another thread may fork

        self._thread.start()
        self._ready.wait()

    def close(self) -> None:
        """Give the port back. Who is being answered is not waited for."""
        loop = self._loop
        if loop is not None and self._thread.is_alive():
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(1.0)
        self._listener.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception:
            _log.exception("metrics are not served any more at %s", self.url)
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        from prometheus_client import CollectorRegistry, ProcessCollector

        self._loop, self._stop, self._making = asyncio.get_running_loop(), asyncio.Event(), asyncio.Lock()
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        self._registry.register(_Collector(lambda: self._found))
        server = await asyncio.start_server(self._welcome, sock=self._listener, limit=_HEADER)
        self._ready.set()
        await self._stop.wait()
        server.close()
        for connection in tuple(self._connections):
            connection.cancel()

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a connection is a task"
        try:
            if len(self._connections) < _MOST:
                self._connections.add(task)
                with suppress(TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                    async with asyncio.timeout(_PATIENCE):
                        await self._answer(reader, writer)
        except asyncio.CancelledError:
            pass  # the exporter ends
        finally:
            self._connections.discard(task)
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        header = await reader.readuntil(b"\r\n\r\n")
        first, *lines = header.decode("latin-1").split("\r\n")
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        method, target = [*first.split(" "), ""][:2]
        path = target.partition("?")[0]
        extra: list[str] = []
        if method not in ("GET", "HEAD"):
            status, body, kind = "405 Method Not Allowed", b"only GET\n", "text/plain"
        elif path != "/metrics":
            status, body, kind = "404 Not Found", b"see /metrics\n", "text/plain"
        else:
            try:
                body, kind = await self._text(fields.get("accept", ""))
                status = "200 OK"
            except TimeoutError:
                status, body, kind = "503 Service Unavailable", b"the server's loop is busy\n", "text/plain"
            if "gzip" in fields.get("accept-encoding", ""):
                import gzip

                body, extra = gzip.compress(body, 1), ["Content-Encoding: gzip"]
        head = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}", *extra, "Connection: close"]
        writer.write("\r\n".join([*head, "", ""]).encode("latin-1") + (b"" if method == "HEAD" else body))
        await writer.drain()
        writer.write_eof()
        # Closing with something unread would cost the reader what is on its way.
        while await reader.read(_HEADER):
            pass

    async def _text(self, accept: str) -> tuple[bytes, str]:
        from prometheus_client.exposition import choose_encoder

        encode, kind = choose_encoder(accept)
        async with self._making:
            if time.monotonic() - self._made > _FRESH:
                self._found = await self._ask()
                self._texts, self._made = {}, time.monotonic()
            if kind not in self._texts:
                self._texts[kind] = encode(self._registry), kind
        return self._texts[kind]

    async def _ask(self) -> Found:
        future: concurrent.futures.Future[Found] = concurrent.futures.Future()

        def answer() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(self._read())
            except BaseException as error:
                future.set_exception(error)

        try:
            self._post(answer)
        except Exception as error:
            raise TimeoutError("the server has ended") from error
        return await asyncio.wait_for(asyncio.wrap_future(future), _BUSY)

    def _abandon(self) -> None:
        # A forked child that kept the listening socket would keep the port.
        self._listener.close()


class _Collector:
    """What the registry asks."""

    def __init__(self, found: Callable[[], Found]) -> None:
        self._found = found

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's ``Collector``."""
        # Its own name it has to look up: below the command line nobody imports the package itself.
        yield from families(*self._found(), sys.modules["shared_rpc"].__version__)


_exporters: weakref.WeakSet[Exporter] = weakref.WeakSet()


def _after_fork() -> None:
    for exporter in list(_exporters):
        exporter._abandon()
    _exporters.clear()


os.register_at_fork(after_in_child=_after_fork)
