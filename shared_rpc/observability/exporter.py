"""``http://host:port/metrics``, by the HTTP server of prometheus-client. Imported only if metrics are requested.

Clients of this port are untrusted: they may be other users of the host, or web pages. A silent connection is closed, and an
answer costs the server's loop one reading of its tables.
"""

from __future__ import annotations

import asyncio
import ipaddress
import platform
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from wsgiref.types import StartResponse, WSGIEnvironment

from shared_rpc.errors import ConfigurationError
from shared_rpc.forks import after_fork
from shared_rpc.observability.events import HOOKS

if TYPE_CHECKING:
    from shared_rpc.observability.metrics import Read, Reading


#: Seconds of silence that end a connection.
_PATIENCE = 2.0
#: Seconds for the server's loop to make a reading.
_BUSY = 5.0


class Exporter:
    """HTTP exporter. It listens at once, and answers between :meth:`start` and :meth:`close`.

    :param read: the metrics that a reading has.
    :param port: 0 for any free port.
    :param option: name of the port in errors: ``"--metrics-port"``.
    :raises ConfigurationError: if prometheus-client is not installed, or the port is not available.
    """

    def __init__(self, read: Iterable[Read[Any]], port: int, host: str = "127.0.0.1", option: str = "metrics_port") -> None:
        try:
            from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, start_http_server

            from shared_rpc.observability.collector import PREFIX, Collector

            self._collector = Collector(read)
            build_info = Gauge(
                f"{PREFIX}_build_info", "Always 1: the release that runs.", ("version", "python_version"), registry=None
            )
        except ImportError as error:
            raise ConfigurationError(
                f"{option}={port}: metrics need the package prometheus-client: pip install 'shared-rpc[metrics]'"
            ) from error
        except OSError as error:  # prometheus-client keeps the numbers of an application's processes in files there
            raise ConfigurationError(
                f"{option}={port}: cannot use the directory of PROMETHEUS_MULTIPROC_DIR: {error}; make it, or unset that"
            ) from error
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(self._collector)
        registry.register(build_info)
        # Modules below the command line do not import the package itself.
        build_info.labels(sys.modules["shared_rpc"].__version__, platform.python_version()).set(1)
        self._turn = threading.Lock()
        self._ready = threading.Event()
        try:
            # On Python 3.14 the server below would share a port in use.
            socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ConfigurationError(
                f"{option}={port}: the port is not available on {host}: {why}; "
                f"choose another one, or end the program that listens there ('ss -ltnp sport = :{port}' shows it)"
            ) from error
        self._thread.name = "shared-rpc-metrics"
        self._app: Any = self._server.get_app()
        self._server.set_app(self._answer)
        handler: Any = self._server.RequestHandlerClass
        self._server.RequestHandlerClass = type("Handler", (handler,), {"timeout": _PATIENCE})
        self.host, self.port = host, self._server.server_port
        self._local = ipaddress.ip_address(str(self._server.server_address[0])).is_loopback
        self._loop: asyncio.AbstractEventLoop
        self._read: Callable[[], Reading]
        # A child's copy of the listening socket would keep the port.
        after_fork(self._server.socket.close)

    @property
    def url(self) -> str:
        """Address of the metrics."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"

    def watch(self, server_id: str) -> None:
        """Count the events of a server."""
        self._collector.servers.add(server_id)

    def start(self, loop: asyncio.AbstractEventLoop, read: Callable[[], Reading]) -> None:
        """Serve, and count events.

        :param read: called on the server's loop, for each answer.
        """
        self._loop, self._read = loop, read
        HOOKS.add(self._collector)
        self._ready.set()

    def close(self) -> None:
        """Release the port, and stop counting. Does not wait for answers."""
        HOOKS.remove(self._collector)
        with suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts connections
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        plain = [("Content-Type", "text/plain; charset=utf-8")]
        if self._local and not _is_local(environ.get("HTTP_HOST", "")):
            # A web page whose host name resolves to this address could read the answer.
            start_response("403 Forbidden", plain)
            return [b"ask for it by its address, or as localhost\n"]
        with self._turn:
            try:
                self._collector.update(self._ask())
            except TimeoutError as error:
                start_response("503 Service Unavailable", plain)
                return [f"{error}\n".encode()]
            body: Iterable[bytes] = self._app(environ, start_response)
        return body

    def _ask(self) -> Reading:
        async def reading() -> Reading:
            return self._read()

        if not self._ready.is_set():
            raise TimeoutError("the server did not start")
        asked = reading()
        try:
            answer = asyncio.run_coroutine_threadsafe(asked, self._loop)
        except RuntimeError as error:
            asked.close()
            raise TimeoutError("the server has stopped") from error
        try:
            return answer.result(_BUSY)
        except TimeoutError:
            raise TimeoutError("the server's loop is busy") from None


def _is_local(host: str) -> bool:
    """Return True if a request's Host is an address or ``localhost``; HTTP/1.0 requests may have none."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    with suppress(ValueError):
        return name in ("", "localhost") or bool(ipaddress.ip_address(name.strip("[]")))
    return False
