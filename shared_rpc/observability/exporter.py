"""``http://host:port/metrics``, for Prometheus, from threads of its own. Imported only where metrics are asked for.

A client of this port is not trusted. Connections are few and short, answers at most four a second, and each costs the server's
loop one reading of its tables, for which only these threads wait. The text is prometheus-client's. Its HTTP server is
not used, as it bounds neither connections nor their time, and leaves the port open in forked children.
"""

from __future__ import annotations

import concurrent.futures
import logging
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIEnvironment

from shared_rpc.errors import ConfigurationError
from shared_rpc.forks import after_fork
from shared_rpc.observability.events import HOOKS

if TYPE_CHECKING:
    from shared_rpc.observability.metrics import Reading

__all__ = ["Exporter"]

_log = logging.getLogger("shared_rpc.server")

#: The limit of connections; further ones are closed at once.
_MOST = 16
#: Seconds for one connection in all.
_PATIENCE = 10.0
#: Seconds between two answers.
_PAUSE = 0.25
#: Seconds for the server's loop to make a reading.
_BUSY = 5.0


class Exporter:
    """HTTP exporter. It occupies its port at once, and serves between :meth:`start` and :meth:`close`.

    :param port: 0 for any free port.
    :param option: name of the port in errors: ``"--metrics-port"``.
    :raises ConfigurationError: if prometheus-client is not installed, or the port is not available.
    """

    def __init__(self, port: int, host: str = "127.0.0.1", option: str = "metrics_port") -> None:
        try:
            from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app

            from shared_rpc.observability.metrics import Metrics

            # Modules below the command line do not import the package itself.
            self._metrics = Metrics(sys.modules["shared_rpc"].__version__)
        except ImportError as error:
            raise ConfigurationError(
                f"{option}={port}: metrics need the package prometheus-client: pip install 'shared-rpc[metrics]'"
            ) from error
        except OSError as error:  # prometheus-client keeps the numbers of an application's processes in files there
            raise ConfigurationError(
                f"{option}={port}: cannot use the directory of PROMETHEUS_MULTIPROC_DIR: {error}; make it, or unset that"
            ) from error
        try:
            self._server = _HTTPServer(host, port)
        except (OSError, OverflowError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ConfigurationError(
                f"{option}={port}: the port is not available on {host}: {why}; "
                f"choose another one, or end the program that listens there ('ss -ltnp sport = :{port}' shows it)"
            ) from error
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(self._metrics)
        self._app = make_wsgi_app(registry)
        self._server.set_app(self._answer)
        self.host, self.port = host, self._server.server_port
        self._post: Callable[[Callable[[], None]], object]
        self._read: Callable[[], Reading]
        self._thread = threading.Thread(target=self._server.serve_forever, name="shared-rpc-metrics", daemon=True)
        self._turn = threading.Lock()
        self._next = 0.0
        # A child's copy of the listening socket would keep the port.
        after_fork(self._server.socket.close)

    @property
    def url(self) -> str:
        """Address of the metrics."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"

    def watch(self, server_id: str) -> None:
        """Count the events of a server."""
        self._metrics.servers.add(server_id)

    def start(self, post: Callable[[Callable[[], None]], object], read: Callable[[], Reading]) -> None:
        """Serve, and count events.

        :param post: schedules a call of a function in the server's loop; it raises when the server has ended.
        :param read: is called in the loop, for each answer.
        """
        self._post, self._read = post, read
        HOOKS.add(self._metrics)
        self._thread.start()

    def close(self) -> None:
        """Release the port, and count no longer. Does not wait for answers."""
        HOOKS.remove(self._metrics)
        if self._thread.is_alive():
            with suppress(OSError):
                self._server.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts connections
            self._server.shutdown()
        self._server.server_close()
        self._server.hang_up(float("inf"))

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        with self._turn:
            time.sleep(max(0.0, self._next - time.monotonic()))
            try:
                self._metrics.update(self._ask())
            except TimeoutError as error:
                start_response("503 Service Unavailable", [("Content-Type", "text/plain; charset=utf-8")])
                return [f"{error}\n".encode()]
            body: Iterable[bytes] = self._app(environ, start_response)
            self._next = time.monotonic() + _PAUSE
        return body

    def _ask(self) -> Reading:
        future: concurrent.futures.Future[Reading] = concurrent.futures.Future()

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
            raise TimeoutError("the server has stopped") from error
        try:
            return future.result(_BUSY)
        except TimeoutError:
            future.cancel()
            raise TimeoutError("the server's loop is busy") from None


class _Handler(WSGIRequestHandler):
    """Handler of one connection, in a thread of its own."""

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: any client could fill the log."""


class _HTTPServer(socketserver.ThreadingMixIn, WSGIServer):
    """Server of a bounded number of connections, each of bounded time. It listens at once."""

    daemon_threads = True
    request_queue_size = _MOST
    allow_reuse_port = False  # newer releases of Python would share a port in use

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        #: Connections with their deadlines.
        self.connections: dict[Any, float] = {}
        self._changing = threading.Lock()
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without asking the network for this host's name, as the base does."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.socket.getsockname()[:2]
        self.setup_environ()

    def verify_request(self, request: Any, client_address: object) -> bool:
        """Return whether there is room for a connection."""
        with self._changing:
            if len(self.connections) >= _MOST:
                return False
            self.connections[request] = time.monotonic() + _PATIENCE
        return True

    def close_request(self, request: Any) -> None:
        """Close a connection that has been answered, or exceeds the limit."""
        with self._changing:
            self.connections.pop(request, None)
            super().close_request(request)

    def service_actions(self) -> None:
        """Check the deadlines of connections, about twice a second."""
        self.hang_up(time.monotonic())

    def hang_up(self, now: float) -> None:
        """Shut down connections past their deadline, so that reads and writes of their threads fail."""
        with self._changing:
            for request, end in self.connections.items():
                if end <= now:
                    with suppress(OSError):  # the other side has closed the connection
                        request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Log a connection that failed, or reached its deadline."""
        _log.debug("a connection for metrics failed", exc_info=True)
