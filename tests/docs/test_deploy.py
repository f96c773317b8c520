"""The files in examples/deploy/: the app runs, the containers share a socket and nothing else, and the dashboard and the alerts
name metrics of the server.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.commands import cli
from tests.kit.processes import ROOT, Child, eventually
from tests.kit.scraping import Scrape, scrape

pytest.importorskip("prometheus_client")
yaml = pytest.importorskip("yaml")

DEPLOY = ROOT / "examples" / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "shared-rpc.json").read_text())

#: Labels that Prometheus adds to every sample.
TARGET = {"instance", "job"}


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
            assert re.search(r"request [0-9a-f]{8}-\d+-\d+$", line)
            client.expect("51 batches")
            assert client.close() == (0, "")
        eventually(lambda: scrape(url)("sessions_closed_total") >= 2)
        yield scrape(url)
        server.process.send_signal(signal.SIGTERM)
        assert server.close() == (0, "")
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


def test_clients_end_on_sigterm(base_path: str, children: list[Child]) -> None:
    """They have a handler, as the first process of a container needs."""
    client = Child(
        str(DEPLOY / "app.py"), "--pause", "0.001", environ={"SHARED_TENSOR_ROLE": "local", "CUDA_VISIBLE_DEVICES": ""}
    )
    children.append(client)
    client.expect("100 batches")
    client.process.send_signal(signal.SIGTERM)
    assert client.close() == (130, "")


# Queries.


def test_the_dashboard_and_the_alerts_name_metrics_of_the_server(scraped: Scrape) -> None:
    """Every metric that they name is in a scrape after real calls."""
    named = set(re.findall(r"\bshared_rpc_\w+", json.dumps(DASHBOARD["panels"]) + (DEPLOY / "alerts.yml").read_text()))
    assert len(named) > 25
    assert named <= set(scraped.samples)


@pytest.mark.parametrize("variable", DASHBOARD["templating"]["list"][1:], ids=lambda variable: variable["name"])
def test_the_dashboards_variables_have_values(scraped: Scrape, variable: dict[str, Any]) -> None:
    """They are labels of an existing metric."""
    found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
    assert found is not None
    assert found[2] in {label for labels, _ in scraped.samples[found[1]] for label in labels} | TARGET


# Files that name each other.


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
    assert "/etc/prometheus/alerts.yml" in mounted and "/etc/prometheus/prometheus.yml" in mounted
    (dashboards,) = read_yaml("grafana/provisioning/dashboards/dashboards.yml")["providers"]
    assert any(mounted[dashboards["options"]["path"]].glob("*.json"))
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (mounted[str(Path(home).parent)] / Path(home).name).exists()
    (source,) = read_yaml("grafana/provisioning/datasources/prometheus.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in services
    assert source["uid"] == DASHBOARD["templating"]["list"][0]["current"]["value"]


def test_the_image_is_complete() -> None:
    """Every copied file exists and is not ignored, and the server has the used options."""
    image = (DEPLOY / "Dockerfile").read_text()
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    for sources in re.findall(r"^COPY (.*) \S+$", image, re.MULTILINE):
        for source in sources.split():
            assert (ROOT / source).exists(), source
            assert f"!{source}" in ignored
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    asked = re.findall(r"EXTRAS[=:] ?([\w,]+)", image + (DEPLOY / "docker-compose.cuda.yml").read_text())
    assert asked and all(set(one.split(",")) <= extras for one in asked)
    command = read_yaml("docker-compose.yml")["services"]["server"]["command"]
    shown = cli("serve", "--help", environ={"COLUMNS": "200"}).succeeded
    assert all(option in shown for option in command if option.startswith("--"))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, of Debian's package prometheus, is not installed")
def test_promtool_accepts_the_files(tmp_path: Path) -> None:
    """The configuration, and the rules of the alerts."""
    for name in ("prometheus.yml", "alerts.yml"):
        shutil.copy(DEPLOY / name, tmp_path)
    subprocess.run(["promtool", "check", "config", str(tmp_path / "prometheus.yml")], check=True)
    subprocess.run(["promtool", "check", "rules", str(tmp_path / "alerts.yml")], check=True)


def test_docker_accepts_the_composition() -> None:
    """If docker with compose is installed; no daemon is needed."""
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("no docker compose here")
    for files in (["docker-compose.yml"], ["docker-compose.yml", "docker-compose.cuda.yml"]):
        options = [word for name in files for word in ("-f", str(DEPLOY / name))]
        checked = subprocess.run([docker, "compose", *options, "config", "-q"], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stderr
