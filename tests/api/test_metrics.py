"""Metrics for Prometheus: their names, their values, and scrapes that disturb no other client."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from shared_rpc import Client, Provider, Server, errors
from shared_rpc.observability.events import get_hooks
from tests.kit.brokers import BrokerApp, another_worker, begun, worker_pids
from tests.kit.processes import ROOT, eventually, open_fds
from tests.kit.scraping import scrape
from tests.kit.world import World

pytest.importorskip("prometheus_client")


@pytest.fixture
def world(world: World, go: threading.Event) -> World:
    """A server with a few endpoints, and metrics on a free port."""

    world.share("model", managed=True)(lambda size: torch.zeros((size,)))

    @world.share(cache=False)
    def fails(value: int) -> torch.Tensor:
        raise ValueError(f"not {value}")

    world.share("short", cache=False)(lambda size: torch.zeros((size,)))
    world.share_held(go)
    return world


@pytest.fixture
def url(world: World) -> str:
    """The URL of its metrics."""
    return str(world.serve(metrics_port=0).metrics_url)


def metrics_of(app: BrokerApp) -> str:
    """Start a broker; return the URL of its metrics."""
    return app.start(metrics_port=0).expect("metrics at").removeprefix("metrics at ")


def fresh(url: str, condition: Callable[[Any], bool]) -> Any:
    """Return the first scrape that satisfies a condition: a text may be slightly out of date."""
    found: list[Any] = []

    def look() -> bool:
        found[:] = [scrape(url)]
        return condition(found[0])

    eventually(look)
    return found[0]


def test_calls_are_counted_by_endpoint_and_outcome(url: str, client: Client) -> None:
    """With durations; builds and cached calls are counted separately."""
    client.call("model", 3), client.call("model", 3), client.call("model", 4)
    with pytest.raises(ValueError, match="not 5"):
        client.call("fails", 5)
    with pytest.raises(errors.EndpointNotFound):
        client.call("nowhere")
    now = scrape(url)
    assert now("calls_total", endpoint="model", outcome="built") == 2
    assert now("calls_total", endpoint="model", outcome="hit") == 1
    assert now("calls_total", endpoint="fails", outcome="failed") == 1
    assert now("call_duration_seconds_count", endpoint="model", outcome="built") == 2
    assert 0 < now("call_duration_seconds_sum", endpoint="model", outcome="built") < 10
    assert now("cache_hits_total", endpoint="model") == 1
    assert now("cache_misses_total", endpoint="model") == 2
    assert now("cache_misses_total", endpoint="fails") == 0  # it is not cached
    assert now("builds_total", endpoint="model") == 2
    assert now("build_failures_total", endpoint="fails") == 1
    assert now("errors_total", code="remote") == 1
    assert now("errors_total", code="endpoint-not-found") == 1


def test_active_runs_are_gauges(url: str, client: Client, go: threading.Event, threads: Any) -> None:
    """Begun runs count; joined calls and ended runs do not."""
    waiting = [threads.submit(client.call, "held") for _ in range(3)]
    now = fresh(url, lambda now: now("joined_calls_total", endpoint="held") == 2)
    assert now("builds_running", endpoint="held") == 1
    assert now("builds_queued", endpoint="held") == 0
    go.set()
    for call in waiting:
        call.result()
    now = fresh(url, lambda now: now("builds_running", endpoint="held") == 0)
    assert now("calls_total", endpoint="held", outcome="joined") == 2


def test_memory_leases_sessions_and_tasks_are_gauges(url: str, client: Client) -> None:
    """They show the server's current state; ends are counted."""
    handle, buffer = client.call("model", 1000), client.create_buffer(8192)
    client.wait_for_task(client.submit("model", 1001)).release()
    now = fresh(url, lambda now: now("leases") == 2)
    assert now("objects", kind="result") == 2
    assert now("objects", kind="buffer") == 1
    assert now("object_bytes", device="cpu") == client.get_server_info()["nbytes"] > 8192
    assert now("sessions") == 1
    assert now("tasks", status="completed") == 1
    assert now("task_changes_total", status="pending") == now("task_changes_total", status="completed") == 1
    handle.release(), buffer.release(), client.free_buffer(buffer)
    client.close()
    now = fresh(url, lambda now: now("sessions_closed_total") == 1)
    assert (now("leases"), now("sessions"), now("objects", kind="buffer")) == (0, 0, 0)
    assert now("objects_published_total") == 3
    assert now("objects_freed_total") == 1
    assert now("leases_given_total") == now("leases_ended_total") > 0
    assert now("leases_reclaimed_total") == now("sessions_lost_total") == 0


def test_tiers_and_moves_are_measured(world: World, tmp_path: Path) -> None:
    """Bytes by tier, use, and the number and size of moves."""

    world.share("model", managed=True, access="read")(lambda number: torch.zeros(1 << 18))

    server, client = world.serve(metrics_port=0, spill_dir=tmp_path), world.client()
    for number in range(3):
        client.call("model", number).release()
    client.evict("model")
    with client.call("model", 0):
        now = fresh(str(server.metrics_url), lambda now: now("restores_total", tier="file", reason="use") == 1)
    assert [now("tier_objects", tier=tier) for tier in ("device", "host", "file")] == [1, 0, 2]
    assert (now("active_objects"), now("object_bytes", device="cpu")) == (1, 1 << 20)
    assert now("copy_bytes", tier="file") == 3 << 20  # the one that was restored is read-only: its copy is good still
    assert now("evictions_total", tier="file", reason="request") == 3
    assert now("evicted_bytes_total", tier="file") == 3 << 20
    assert now("restored_bytes_total", tier="file") == 1 << 20
    assert now("eviction_duration_seconds_count", tier="file") == 3
    assert now("restore_duration_seconds_count", tier="file") == 1


def test_pools_of_results_are_measured(url: str, client: Client) -> None:
    """Their bytes, and the chunks that clients have not returned."""
    before = scrape(url)
    assert before("pool_bytes") == before("pool_chunks") == 0
    kept = [client.call("short", 1000) for _ in range(3)]
    now = fresh(url, lambda now: now("pool_chunks") == 3)
    assert now("pool_bytes") >= 3 * 4000
    assert now("objects", kind="result") == 0
    del kept[1:]
    client.call("short", 1)  # freed chunks are reported with the next call
    fresh(url, lambda now: now("pool_chunks") < 3)


def test_labels_are_those_of_registered_endpoints(url: str, client: Client) -> None:
    """A client that calls a hundred unknown names creates no time series."""
    before = sum(len(samples) for samples in scrape(url).samples.values())
    for number in range(100):
        with pytest.raises(errors.EndpointNotFound):
            client.call(f"no{number}")
    now = fresh(url, lambda now: "shared_rpc_errors_total" in now.samples)
    assert sum(len(samples) for samples in now.samples.values()) <= before + 1
    assert now("errors_total", code="endpoint-not-found") == 100


def test_two_servers_of_a_process_have_their_own_metrics(tmp_path: Path) -> None:
    """Events of one are not counted in the other."""
    tmp_path.chmod(0o700)
    with ExitStack() as stack:
        urls = []
        for name in ("a", "b"):
            provider = Provider(tmp_path / name, device="cpu")
            provider.share("f")(lambda: torch.zeros(1))
            server = stack.enter_context(Server(provider, metrics_port=0))
            urls.append(str(server.metrics_url))
        stack.enter_context(Client(tmp_path / "b", device="cpu")).call("f")
        assert [scrape(url)("calls_total", endpoint="f", outcome="built") for url in urls] == [0, 1]


def test_every_metric_is_documented(broker_app: BrokerApp) -> None:
    """The reference lists exactly the metrics of a broker, with kinds and labels."""
    url = metrics_of(broker_app)
    with pytest.raises(errors.EndpointNotFound):
        broker_app.connect().call("nowhere")
    actual = {
        family.name + ("_total" if family.type == "counter" else ""): (
            family.type,
            {label for sample in family.samples for label in sample.labels} - {"le"},
        )
        for family in scrape(url).families.values()
        if family.name.startswith("shared_rpc_")
    }
    text = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    documented = {
        name: (kind, set(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels in re.findall(r"^\| `(shared_rpc_\w+)` \| (\w+) \|([^|]*)\|", text, re.MULTILINE)
    }
    assert actual == documented


def test_brokers_export_metrics_of_workers(broker_app: BrokerApp, tmp_path: Path) -> None:
    """Their number, restarts and memory; and calls like any server."""
    url = metrics_of(broker_app)
    client = broker_app.connect()
    client.call("model")
    (worker,) = worker_pids(client)
    now = scrape(url)
    assert now("calls_total", endpoint="model", outcome="built") == 1
    assert now("workers", state="ready") == 1
    assert now("worker_resident_bytes", worker="0") > 10 << 20
    gate = tmp_path / "gate"
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(client.call, "slow", str(gate))
        eventually(begun(gate))
        assert fresh(url, lambda now: now("worker_runs", worker="0") == 1)("builds_running", endpoint="slow") == 1
        gate.touch()
        slow.result(20)
    assert fresh(url, lambda now: now("worker_runs", worker="0") == 0)("builds_running", endpoint="slow") == 0
    assert now("worker_crashes_total") == 0
    with pytest.raises(errors.WorkerCrashed):
        client.call("end", "kill")
    another_worker(client, worker)
    now = fresh(url, lambda now: now("workers", state="ready") == now("worker_restarts_total") == 1)
    assert now("worker_crashes_total") == 1
    assert now("errors_total", code="worker-crashed") == 1
    assert now("objects", kind="result") == 2  # they outlived their maker


def test_providers_of_a_broker_share_series(broker_app: BrokerApp) -> None:
    """Endpoints of one name are one series for calls and builds; memory of both counts once."""
    other = f"{broker_app.base_path}-other"
    broker_app.write(f"""
    second = Provider({other!r}, device="cpu")
    second.share("model")(lambda: model().weight.detach())
    """)
    url = metrics_of(broker_app)
    broker_app.connect().call("model")
    alone = scrape(url)("object_bytes", device="cpu")
    with Client(other, device="cpu") as client:
        client.call("model")
        now = fresh(url, lambda now: now("calls_total", endpoint="model", outcome="built") == 2)
    assert now("build_duration_seconds_count", endpoint="model") == now("builds_total", endpoint="model") == 2
    assert now("object_bytes", device="cpu") == alone > 0
    assert len(now.samples["shared_rpc_worker_runs"]) == 1


def test_a_metrics_port_in_use_is_refused(world: World) -> None:
    """At once, with the port and the option; nothing listens then, and nothing stays open."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        before = open_fds()
        server = Server(world.owner, metrics_port=port)
        with pytest.raises(errors.ConfigurationError, match=rf"^metrics_port={port}: .*127\.0\.0\.1"):
            server.start()
        assert not server.running
        assert not list(Path(world.base_path).parent.glob("*.sock"))
        assert open_fds() == before
    with server:  # once it is free, the same server starts
        assert server.metrics_url is None or str(port) in server.metrics_url


def test_a_missing_package_is_reported_with_the_extra(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the command that installs it."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "shared_rpc.observability.collector", raising=False)
    with pytest.raises(errors.ConfigurationError, match=r"pip install 'shared-rpc\[metrics\]'"):
        Server(world.owner, metrics_port=0).start()


def test_a_stopped_server_releases_its_port(world: World, url: str) -> None:
    """No hook and no thread are left, whatever its forked children do."""
    scrape(url)
    port = int(url.rpartition(":")[2].partition("/")[0])
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(write)
        os.read(read, 1)  # until the parent has looked
        os._exit(0)
    try:
        world.server.stop()
        assert (world.server.metrics_url, get_hooks()) == (None, ())
        eventually(lambda: all(thread.name != "shared-rpc-metrics" for thread in threading.enumerate()))
        with socket.create_server(("127.0.0.1", port)) as mine:
            assert mine.getsockname()[1] == port
    finally:
        os.close(write), os.close(read)
        os.waitpid(pid, 0)


def connection(url: str) -> socket.socket:
    """Open a connection to the port, and send nothing."""
    host, _, port = url.removeprefix("http://").removesuffix("/metrics").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=15)


def answer(url: str, request: bytes) -> bytes:
    """Send a request; return the answer up to its end."""
    with connection(url) as sock:
        sock.sendall(request)
        received = b""
        while data := sock.recv(1 << 16):
            received += data
        return received


@pytest.mark.deep  # for the seconds after which silent connections are closed
def test_slow_scrapers_delay_neither_calls_nor_others(url: str, client: Client) -> None:
    """Silent connections, and those with half a request, are closed; the server answers other requests all the time."""
    client.call("model", 3)
    with ExitStack() as stack:
        slow = [stack.enter_context(connection(url)) for _ in range(40)]
        for number, sock in enumerate(slow):
            if number % 2:
                with suppress(OSError):
                    sock.sendall(b"GET /met")
        for _ in range(100):
            client.ping()
        for sock in slow:
            with suppress(ConnectionResetError):
                assert sock.recv(1024) == b""
    assert scrape(url)("sessions") == 1


@pytest.mark.parametrize(
    ("address", "host", "status"),
    [
        ("127.0.0.1", "evil.example:9090", b" 403 "),
        ("127.0.0.1", "localhost:9090", b" 200 "),
        ("0.0.0.0", "prometheus.example", b" 200 "),
    ],
)
def test_foreign_host_names_are_refused(world: World, address: str, host: str, status: bytes) -> None:
    """A server for this host alone answers to its address and to ``localhost``, so web pages cannot read it."""
    url = str(world.serve(metrics_port=0, metrics_host=address).metrics_url)
    assert status in answer(url, f"GET /metrics HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())


def test_a_busy_loop_fails_the_scrape_in_time(
    world: World, url: str, monkeypatch: pytest.MonkeyPatch, go: threading.Event
) -> None:
    """An endpoint that blocks the loop delays the scrape for a bounded time, and the next one is answered again."""
    monkeypatch.setattr("shared_rpc.observability.exporter._BUSY", 0.2)
    blocking = threading.Event()

    @world.share(cache=False)
    async def block() -> torch.Tensor:
        blocking.set()
        go.wait()
        return torch.zeros(1)

    thread = threading.Thread(target=lambda: world.client().call("block"))
    thread.start()
    blocking.wait()
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url, timeout=10)
    assert refused.value.code == 503
    refused.value.close()
    go.set()
    thread.join()
    assert scrape(url)("calls_total", endpoint="block", outcome="built") == 1


@pytest.mark.usefixtures("admitted_source")
def test_the_source_of_records_is_measured(url: str, client: Client) -> None:
    """Misses given to it are not queued; its status is exported while it is attached."""
    assert (scrape(url)("sources"), scrape(url)("cluster_nodes")) == (0, 0)
    with client.source() as source, ThreadPoolExecutor(1) as pool:
        source.report({"nodes": 3, "objects": 2, "bytes_received": 10, "bytes_sent": 20})
        call = pool.submit(client.call, "model", 4)
        miss = next(source)
        now = fresh(url, lambda now: now("builds_asked", endpoint="model") == 1)
        assert (now("builds_queued", endpoint="model"), now("sources"), now("cluster_nodes")) == (0, 1, 3)
        assert (now("cluster_objects"), now("cluster_received_bytes_total"), now("cluster_sent_bytes_total")) == (2, 10, 20)
        with client.export(source.build(miss)) as record:
            call.result(10).release()
            client.invalidate_endpoint_cache("model")
            call = pool.submit(client.call, "model", 4)
            source.adopt(next(source), record).release()
            call.result(10).release()
        now = fresh(url, lambda now: now("calls_total", endpoint="model", outcome="adopted") == 1)
        assert (now("adopted_total", endpoint="model"), now("builds_total", endpoint="model")) == (1, 1)
    assert fresh(url, lambda now: now("sources") == 0)("cluster_nodes") == 0
