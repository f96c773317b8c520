"""The dashboard and the alerts of examples/deploy/ in a real Prometheus, which scrapes a broker that serves the app there.

:mod:`tests.docs.test_deploy` checks the names of metrics against a scrape; here ``promtool`` and ``prometheus``, from
Debian's package ``prometheus``, read and evaluate all expressions. In ``nox -s deep``.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.test_deploy import DASHBOARD, DEPLOY, read_yaml
from tests.kit.deep import repetitions
from tests.kit.processes import Child, eventually

pytestmark = pytest.mark.skipif(
    not repetitions(0, 1) or shutil.which("prometheus") is None,
    reason="Prometheus is run in 'nox -s deep', where it is there",
)

#: Variables that Grafana fills in.
VARIABLES = {"$instance": ".*", "$endpoint": ".*", "$__rate_interval": "30s", "$__interval": "5s", "$__range": "1m"}


class Prometheus:
    """A running Prometheus that has scraped the app, and its API."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, path: str, **parameters: str) -> Any:
        """Return the ``data`` of an answer."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{query}", timeout=10) as answer:
            response = json.load(answer)
        assert response["status"] == "success", response
        return response["data"]

    def samples(self, query: str) -> list[dict[str, Any]]:
        """Return the current samples of an expression."""
        found: list[dict[str, Any]] = self.ask("query", query=query)["result"]
        return found


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has scraped, for some seconds, a broker with active clients."""
    folder = tmp_path_factory.mktemp("prometheus")
    folder.chmod(0o700)
    environ = {"SHARED_TENSOR_BASE_PATH": str(folder / "s"), "SHARED_TENSOR_ENABLED": "", "CUDA_VISIBLE_DEVICES": ""}
    app = str(DEPLOY / "app.py")
    children = [
        Child("-m", "shared_rpc.cli", "serve", app, "--metrics-port", "0", environ={**environ, "SHARED_TENSOR_ROLE": ""})
    ]
    try:
        target = urllib.parse.urlsplit(children[0].expect("metrics at").removeprefix("metrics at ")).netloc
        children.append(Child(app, "--pause", "0.01", environ={**environ, "SHARED_TENSOR_ROLE": "client"}))
        children[1].expect("100 batches")
        config = (DEPLOY / "prometheus.yml").read_text().replace("server:9464", target).replace("interval: 5s", "interval: 1s")
        (folder / "prometheus.yml").write_text(config)
        shutil.copy(DEPLOY / "alerts.yml", folder)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [
                    *("prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"),
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        found = Prometheus(f"http://127.0.0.1:{port}")

        def scraped() -> bool:
            try:
                response = found.samples("count_over_time(shared_rpc_build_info[1m])")
            except OSError:  # it is not there yet
                return False
            return bool(response) and int(response[0]["value"][1]) > 8

        try:
            eventually(scraped, 60.0, f"Prometheus scrapes: {(folder / 'log').read_text()[-2000:]}")
            yield found
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
    finally:
        for child in children:
            child.process.kill()
            child.process.communicate()


def panels() -> list[Any]:
    """Return every query of the dashboard."""
    return [
        pytest.param(target["expr"], id=f"{panel['title']}-{target['refId']}")
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", ())
    ]


@pytest.mark.parametrize("query", panels())
def test_queries_of_the_dashboard_return_numbers(prometheus: Prometheus, query: str) -> None:
    """The query is valid, and returns numbers wherever there is data."""
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    assert not re.search(r"\$\w", query)
    response = prometheus.samples(query)
    assert response, f"{query} gives nothing"
    assert any(math.isfinite(float(one["value"][1])) for one in response) or "histogram_quantile" in query


def test_no_alert_fires_for_a_healthy_broker(prometheus: Prometheus) -> None:
    """All are evaluated without an error."""
    wanted = {rule["alert"] for group in read_yaml("alerts.yml")["groups"] for rule in group["rules"]}

    def rules() -> list[dict[str, Any]]:
        return [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]

    eventually(lambda: all(rule["health"] == "ok" for rule in rules()), 30.0, "all are evaluated")
    assert {rule["name"] for rule in rules()} == wanted
    assert [rule["name"] for rule in rules() if rule["state"] == "firing"] == []


def test_promtool_accepts_the_files(tmp_path: Path) -> None:
    """And the exported metrics."""
    for name in ("prometheus.yml", "alerts.yml"):
        shutil.copy(DEPLOY / name, tmp_path)
    subprocess.run(["promtool", "check", "config", str(tmp_path / "prometheus.yml")], check=True, env=os.environ)
    subprocess.run(["promtool", "check", "rules", str(tmp_path / "alerts.yml")], check=True)
