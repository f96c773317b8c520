"""``http://host:port/metrics``, for Prometheus, from threads of its own. Loaded only where somebody asks for metrics.

Whoever comes through the port is a stranger. Connections are few and short; a text is made at most a few times a second however
often it is asked for; and of the server's loop nothing is asked but one reading each time, for which nobody but these threads
waits. HTTP is the standard library's business, what is answered prometheus-client's.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import socket
import socketserver
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIEnvironment

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
#: Seconds for which a text is good, and before which no other one is made.
_FRESH = 0.25
#: Seconds that the server's loop has for a reading.
_BUSY = 5.0
#: Of a request, what its answer depends on.
_ASKED = ("REQUEST_METHOD", "PATH_INFO", "QUERY_STRING", "HTTP_ACCEPT", "HTTP_ACCEPT_ENCODING")


class Exporter:
    """Has its port from its making on; it serves between :meth:`start` and :meth:`close`.

    :param port: 0 for any that is free.
    :param option: what errors call the port: ``"--metrics-port"``.
    :raises ConfigurationError: if prometheus-client is not installed, or the port cannot be had.
    """

    def __init__(self, port: int, host: str = "127.0.0.1", option: str = "metrics_port") -> None:
        try:
            from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
        except ImportError as error:
            raise ConfigurationError(
                f"{option}={port}: metrics need the package prometheus-client: pip install 'shared-rpc[metrics]'"
            ) from error
        try:
            self._server = _HTTPServer(host, port)
        except (OSError, OverflowError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ConfigurationError(
                f"{option}={port}: the port cannot be had on {host}: {why}; "
                f"choose another one, or end what listens there (ss -ltnp 'sport = :{port}' names it)"
            ) from error
        registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=registry)
        registry.register(_Collector(self._ask))
        self._app = make_wsgi_app(registry)
        self._server.set_app(self._answer)
        self.host, self.port = host, self._server.server_port
        self._post: Callable[[Callable[[], None]], object]
        self._read: Callable[[], Found]
        self._thread = threading.Thread(target=self._server.serve_forever, name="shared-rpc-metrics", daemon=True)
        self._making = threading.Lock()
        self._made = float("-inf")
        #: What was asked for last, and what was answered.
        self._last: tuple[list[str], str, list[tuple[str, str]], Iterable[bytes]] | None = None
        _exporters.add(self)

    @property
    def url(self) -> str:
        """Where the metrics are."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"

    def start(self, post: Callable[[Callable[[], None]], object], read: Callable[[], Found]) -> None:
        """Serve.

        :param post: has the server's loop call a function; what it raises means that the server has ended.
        :param read: is called there.
        """
        self._post, self._read = post, read
        self._thread.start()

    def close(self) -> None:
        """Give the port back. Who is being answered is not waited for."""
        if self._thread.is_alive():
            with suppress(OSError):
                self._server.socket.shutdown(socket.SHUT_RDWR)  # what waits for connections looks up
            self._server.shutdown()
        self._server.server_close()
        self._server.hang_up(float("inf"))

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        asked = [environ.get(name, "") for name in _ASKED]
        with self._making:
            if self._last is None or self._last[0] != asked or time.monotonic() > self._made + _FRESH:
                time.sleep(max(0.0, self._made + _FRESH - time.monotonic()))
                told: list[Any] = []
                try:
                    body = self._app(environ, lambda *answer: told.extend(answer))
                except TimeoutError as error:
                    start_response("503 Service Unavailable", [("Content-Type", "text/plain; charset=utf-8")])
                    return [f"{error}\n".encode()]
                self._last, self._made = (asked, told[0], told[1], body), time.monotonic()
            _, status, headers, body = self._last
        start_response(status, list(headers))
        return body

    def _ask(self) -> Found:
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
        try:
            return future.result(_BUSY)
        except TimeoutError:
            future.cancel()
            raise TimeoutError("the server's loop is busy") from None


class _Handler(WSGIRequestHandler):
    """One connection, in a thread of its own."""

    def log_message(self, format: str, *args: Any) -> None:
        """Strangers write no logs."""


class _HTTPServer(socketserver.ThreadingMixIn, WSGIServer):
    """Listens from its making on."""

    daemon_threads = True
    request_queue_size = _MOST
    allow_reuse_port = False  # newer releases of Python would share a port that is taken

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        #: When each has had its time.
        self.connections: dict[Any, float] = {}
        self._changing = threading.Lock()
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """As the base has it, which would ask the network for this host's name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.socket.getsockname()[:2]
        self.setup_environ()

    def verify_request(self, request: Any, client_address: object) -> bool:
        """Whether there is room for a connection."""
        with self._changing:
            if len(self.connections) >= _MOST:
                return False
            self.connections[request] = time.monotonic() + _PATIENCE
        return True

    def close_request(self, request: Any) -> None:
        """A connection has been answered, or was one too many."""
        with self._changing:
            self.connections.pop(request, None)
            super().close_request(request)

    def service_actions(self) -> None:
        """Called about twice a second."""
        self.hang_up(time.monotonic())

    def hang_up(self, now: float) -> None:
        """End those that have had their time; what a thread reads or writes there fails then."""
        with self._changing:
            for request, end in self.connections.items():
                if end <= now:
                    with suppress(OSError):  # the other side was first
                        request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """A stranger went away, or its time was over."""
        _log.debug("a connection for metrics failed", exc_info=True)


class _Collector:
    """What the registry asks."""

    def __init__(self, ask: Callable[[], Found]) -> None:
        self._ask = ask

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's ``Collector``."""
        # Its own name it has to look up: below the command line nobody imports the package itself.
        yield from families(*self._ask(), sys.modules["shared_rpc"].__version__)

    def describe(self) -> Iterator[Metric]:
        """The same without numbers, so that ``?name[]=`` finds them."""
        yield from families(Reading(), WorkersReading(), "")


_exporters: weakref.WeakSet[Exporter] = weakref.WeakSet()


def _after_fork() -> None:
    # A child that kept the listening socket would keep the port.
    for exporter in list(_exporters):
        exporter._server.socket.close()
    _exporters.clear()


os.register_at_fork(after_in_child=_after_fork)
