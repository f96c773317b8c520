"""Sites of a cluster: several Ray nodes on this machine, each with its own broker."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.cluster_utils import Cluster

from shared_rpc import Client
from shared_rpc.memory.devices import device_id, device_tag
from shared_rpc_ray import Cluster as SharedCluster
from shared_rpc_ray.membership import connect
from tests.kit.processes import PYTHONPATH, Child, eventually, python

#: Lost nodes are detected within about a second; metrics and usage statistics are disabled.
_SYSTEM = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
    "enable_metrics_collection": False,
}
#: Options of a head node, without processes that tests do not need.
_FEW_PROCESSES = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

#: On the path of the agents: injects the faults that tests request.
FAULTS = Path(__file__).with_name("faults")

#: The app of every site: each build is recorded, and waits while a gate file exists.
APP = """
import os, time
from pathlib import Path

import torch
from shared_rpc import Provider

DEVICE = os.environ["SITE_DEVICE"]
provider = Provider(device=DEVICE)
SITE = os.environ["SITE"]
ROOT = Path(os.environ["SITES"])


class Model(torch.nn.Module):
    def __init__(self, mib):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(mib << 8, 1024, device=DEVICE))
        self.tied = self.weight
        self.register_buffer("scale", torch.rand(3, device=DEVICE))


@provider.share(managed=True, access="read")
def load_model(name, mib=1):
    with open(ROOT / f"builds-{name}", "a") as file:
        file.write(f"{SITE}\\n")
    while (ROOT / f"gate-{name}").exists():
        time.sleep(0.005)
    if (ROOT / f"broken-{name}").exists():
        raise ValueError(f"no weights of {name} on {SITE}")
    return Model(mib)
"""

#: A client process, which calls like any user's, and prints the result.
_CLIENT = """
import hashlib, json, sys
sys.path.insert(0, {folder!r})
import app
handle = app.load_model(*{args!r})
model = handle.value
digest = hashlib.sha256(b"".join(t.detach().cpu().numpy().tobytes() for t in (model.weight, model.scale))).hexdigest()
print("got " + json.dumps([digest, handle.generation, model.tied is model.weight, app.provider.execution_mode]), flush=True)
"""


class Got(NamedTuple):
    """The result of a client process."""

    digest: str
    generation: int
    tied: bool
    mode: str


def got(call: Child) -> Got:
    """Wait for the result of a client process, and for its exit."""
    line = call.expect("got ")
    call.close()
    return Got(*json.loads(line.removeprefix("got ")))


class Site:
    """A Ray node and its broker."""

    def __init__(self, cluster: Sites, name: str, ray_node: Any, gpu: int | None, *, alone: bool) -> None:
        self.cluster = cluster
        self.name = name
        self.gpu = gpu
        #: The device, by its name in this process.
        self.device = "cpu" if gpu is None else f"cuda:{gpu}"
        self.ray_node = ray_node
        self.node_id = str(ray_node.node_id)
        self.broker: subprocess.Popen[str] | None = None
        self._alone = alone
        self._folder = cluster.root / f"app-{name}"
        self._folder.mkdir()
        #: Short, because the address of a Unix socket is limited to 107 bytes.
        self._base_path = str(cluster.root / name)
        self.socket = f"{self._base_path}-{device_tag(device_id(self.device))}.sock"
        #: The environment of all processes of the site.
        self.environ = {
            "SHARED_TENSOR_BASE_PATH": self._base_path,
            "SHARED_TENSOR_CLUSTER_NODE": self.node_id,
            "RAY_ADDRESS": cluster.address,
            "SITE": name,
            "SITE_DEVICE": "cpu" if gpu is None else "cuda",
            "SITES": str(cluster.root),
            **({"CUDA_VISIBLE_DEVICES": str(gpu)} if gpu is not None else {}),
        }

    def serve(self, *options: str, cluster: str = "default", **environ: str) -> Site:
        """Start the broker, and wait until its app is loaded."""
        (self._folder / "app.py").write_text(APP)
        words = ("serve", str(self._folder / "app.py"), "--no-preload", "--source-grace", "600", *options)
        broker = Child(
            "-m", "shared_rpc.cli", *words, environ={**self.environ, "SHARED_TENSOR_CLUSTER": cluster, **environ}, fresh=True
        )
        self.broker = broker.process
        self.cluster.closing.callback(_end, self.broker)
        broker.expect("serving")
        return self

    def start(self, *args: Any) -> Child:
        """Start a client process that calls ``load_model``."""
        code = _CLIENT.format(folder=str(self._folder), args=args)
        child = python(code, environ={**self.environ, "SHARED_TENSOR_ENABLED": "1"})
        self.cluster.closing.callback(_end, child.process)
        return child

    def load(self, *args: Any) -> Got:
        """Call ``load_model`` in a client process."""
        return got(self.start(*args))

    def client(self) -> Client:
        """Return a client of the broker."""
        client = Client(self._base_path, device=self.device, timeout=50.0, connect_timeout=5.0)
        self.cluster.closing.callback(client.close)
        return client

    def source(self) -> Any:
        """Return the broker's state of its source of records."""
        with Client(self._base_path, device=self.device, timeout=30.0, connect_timeout=5.0) as client:
            return client.get_server_info()["source"]

    def status(self) -> dict[str, Any]:
        """Return the status that the agent has published in its broker."""
        source = self.source()
        return dict(source["status"]) if source is not None else {}

    @property
    def node(self) -> str:
        """Return the name in the cluster."""
        return str(self.status()["node"])

    def joined(self) -> bool:
        """Return True if the agent has joined the directory."""
        return self.status().get("state") == "joined"

    def agent_pid(self) -> Any:
        """Return the process of the agent, None if there is none."""
        return self.source()["pid"]

    def kill_agent(self) -> None:
        """Kill the agent by SIGKILL."""
        os.kill(self.agent_pid(), signal.SIGKILL)

    def kill_broker(self) -> None:
        """Kill the broker by SIGKILL, and thereby its workers, but no process of Ray."""
        assert self.broker is not None
        _end(self.broker)

    def lose(self) -> None:
        """Kill the broker and the Ray node, unless the node has another broker too."""
        if self._alone:
            self.cluster.cluster.remove_node(self.ray_node, allow_graceful=False)
        self.cluster.sites.remove(self)
        self.kill_broker()

    @property
    def serves(self) -> bool:
        """Return True if the broker runs."""
        return self.broker is not None and self.broker.poll() is None


class Sites:
    """A Ray cluster on this machine.

    :param gpus: how many GPUs the sites use, in turns; 0 for the host's memory.
    """

    def __init__(self, port: int | None = None, gpus: int = 0) -> None:
        self._gpus = gpus
        self.root = Path(tempfile.mkdtemp(prefix="rs-", dir="/tmp"))
        self.closing = ExitStack()
        self.closing.callback(shutil.rmtree, self.root, ignore_errors=True)
        self.closing.callback(os.environ.update, dict(os.environ))
        self.closing.callback(os.environ.clear)
        # Nodes and their agents inherit the environment of this process.
        os.environ.update({**_QUIET, "PYTHONPATH": f"{FAULTS}{os.pathsep}{PYTHONPATH}", "SITES": str(self.root)})
        self.sites: list[Site] = []
        self._count = 0
        self._node = {"num_cpus": 1, "object_store_memory": 150 << 20}
        self._head = {**self._node, "_system_config": _SYSTEM, **_FEW_PROCESSES}
        if port is not None:
            self._head["gcs_server_port"] = port
        self.start_ray()
        self.closing.callback(self.stop_ray)
        self._free: list[Any] = [self.cluster.head_node]

    def start_ray(self) -> None:
        """Start or restart Ray. After a restart sites belong to other nodes, which their brokers do not know."""
        self.cluster = Cluster(initialize_head=True, head_node_args=self._head)
        self.address = str(self.cluster.address)
        connect(self.address)

    def stop_ray(self) -> None:
        """Kill Ray on all nodes."""
        ray.shutdown()
        self.cluster.shutdown()

    def renew(self) -> None:
        """Restore three joined sites, after any losses."""
        if not ray.is_initialized():
            connect(self.address)
        for extra in self.sites[3:]:
            extra.lose()
        while len(self.sites) < 3:
            self.add()
        for site in self.sites:
            if not site.serves:
                site.serve()
        for site in self.sites:
            until(site.joined, f"{site.name} has joined")

    def add(self, *options: str, store: int | None = None, beside: Site | None = None, **named: str) -> Site:
        """Add a node with its broker, or a broker on the node of the site ``beside``."""
        if beside is not None:
            node = beside.ray_node
        elif self._free and store is None:
            node = self._free.pop()
        else:
            node = self.cluster.add_node(**self._node | ({"object_store_memory": store} if store is not None else {}))
        self._count += 1
        gpu = self._count % self._gpus if self._gpus else None
        site = Site(self, f"n{self._count}", node, gpu, alone=beside is None)
        self.sites.append(site)
        return site.serve(*options, **named)

    def mark(self, name: str) -> Path:
        """Make builds wait (``"gate-NAME"``) or fail (``"broken-NAME"``), until the file is unlinked."""
        path = self.root / name
        path.touch()
        return path

    def hold(self, what: str, site: Site) -> Path:
        """Make the agent of a site wait before it sends (``"give"``) or receives a part, or refuse or damage a part."""
        (self.root / f"{site.node_id}-{what}-begun").unlink(missing_ok=True)
        return self.mark(f"{site.node_id}-{what}")

    def held(self, what: str, site: Site) -> bool:
        """Return True if the agent waits there."""
        return (self.root / f"{site.node_id}-{what}-begun").exists()

    def builds(self, name: str) -> list[str]:
        """Return the sites that have started to build a name, in order."""
        path = self.root / f"builds-{name}"
        return path.read_text().split() if path.exists() else []

    def status(self) -> dict[str, Any]:
        """Return the directory's status."""
        with SharedCluster() as found:
            return found.status()

    def key(self, name: str) -> dict[str, Any]:
        """Return the directory's status of a model."""
        keys = [key for key in self.status()["keys"] if f"'{name}'" in key["cache_key"]]
        return keys[0] if keys else {"waiting": [], "nodes": {}, "building": None}


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def loading(sites: Sequence[Site], *args: Any) -> list[Got]:
    """Return the result of a process of each site, when the directory has recorded it."""
    found = [got(call) for call in [site.start(*args) for site in sites]]
    nodes, cluster = {site.node for site in sites}, sites[0].cluster
    until(lambda: nodes <= cluster.key(args[0])["nodes"].keys(), "the directory knows who has it")
    return found


def until(condition: Callable[[], bool], what: str = "") -> None:
    """Wait for a condition of several processes. Polls rarely, because each poll is work for one of them."""
    eventually(condition, 40.0, what, 0.05)
