"""The files in examples/deploy/: the app runs, the containers share a socket and nothing else, and the dashboard and the alerts
name metrics of the server.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.processes import ROOT, Child, eventually
from tests.kit.scraping import Scrape, scrape

pytest.importorskip("prometheus_client")
yaml = pytest.importorskip("yaml")

DEPLOY = ROOT / "examples" / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "shared-rpc.json").read_text())


def read_yaml(name: str) -> Any:
    """Read a file of examples/deploy."""
    return yaml.safe_load((DEPLOY / name).read_text())


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scrape]:
    """A scrape of a broker that serves the app, after two clients have run and a worker has crashed."""
    folder = tmp_path_factory.mktemp("deploy")
    folder.chmod(0o700)
    environ = {"SHARED_TENSOR_BASE_PATH": str(folder / "s"), "SHARED_TENSOR_ENABLED": "", "CUDA_VISIBLE_DEVICES": ""}
    app = str(DEPLOY / "app.py")
    server = Child("-m", "shared_rpc.cli", "serve", app, "--metrics-port", "0", environ={**environ, "SHARED_TENSOR_ROLE": ""})
    clients = [Child(app, "--calls", "51", "--pause", "0", environ={**environ, "SHARED_TENSOR_ROLE": "client"}) for _ in "ab"]
    try:
        url = server.expect("metrics at").removeprefix("metrics at ")
        for client in clients:
            line = client.expect("a sentence without words")
            assert re.search(r"request [0-9a-f]{8}-\d+$", line)
            client.expect("51 batches")
            assert client.close() == (0, "")
        eventually(lambda: scrape(url)("sessions_closed_total") >= 2)
        yield scrape(url)
        assert server.close(signal.SIGTERM) == (0, "")
    finally:
        for child in (server, *clients):
            child.process.kill()
            child.process.communicate()


def test_the_app_shares_one_model_between_its_clients(scraped: Scrape) -> None:
    """It was built once; every batch was a call, and every fiftieth failed, by design."""
    assert scraped("builds_total", endpoint="encoder") == 1
    assert scraped("calls_total", endpoint="encode", outcome="built") == 2 * 49
    assert scraped("calls_total", endpoint="encode", outcome="failed") == 2 * 2
    assert scraped("object_bytes", device="cpu") >= 20_000 * 256 * 4
    assert scraped("leases_reclaimed_total") == 0


def test_the_dashboard_and_the_alerts_name_metrics_of_the_server(scraped: Scrape) -> None:
    """Every metric that they name is in a scrape after real calls."""
    named = set(re.findall(r"\bshared_rpc_\w+", json.dumps(DASHBOARD["panels"]) + (DEPLOY / "alerts.yml").read_text()))
    assert len(named) > 25
    assert named <= set(scraped.samples)


def test_the_mounted_files_exist() -> None:
    """Under the names expected by Prometheus and Grafana."""
    services = read_yaml("docker-compose.yml")["services"]
    mounted = {}
    for service in services.values():
        for volume in service["volumes"]:
            source, target, *_ = volume.split(":")
            if source.startswith("."):
                assert (DEPLOY / source).exists(), source
                mounted[target] = DEPLOY / source
    assert read_yaml("prometheus.yml")["rule_files"] == ["alerts.yml"]
    assert {"/etc/prometheus/alerts.yml", "/etc/prometheus/prometheus.yml"} <= mounted.keys()
    (dashboards,) = read_yaml("grafana/provisioning/dashboards/dashboards.yml")["providers"]
    assert any(mounted[dashboards["options"]["path"]].glob("*.json"))
    home = Path(services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (mounted[str(home.parent)] / home.name).exists()
    (source,) = read_yaml("grafana/provisioning/datasources/prometheus.yml")["datasources"]
    assert source["uid"] == DASHBOARD["templating"]["list"][0]["current"]["value"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, of Debian's package prometheus, is not installed")
@pytest.mark.parametrize(("kind", "name"), [("config", "prometheus.yml"), ("rules", "alerts.yml")])
def test_promtool_accepts_the_files(kind: str, name: str) -> None:
    """The configuration, and the rules of the alerts."""
    checked = subprocess.run(["promtool", "check", kind, str(DEPLOY / name)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
