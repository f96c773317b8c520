"""Several Ray nodes on this machine, each with a broker of its own: sites of a cluster."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import textwrap
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import ray
from ray.cluster_utils import Cluster

from shared_rpc import Client
from shared_rpc.memory.devices import device_id, device_tag
from shared_rpc_ray import Cluster as SharedCluster
from shared_rpc_ray.membership import connect
from tests.kit.processes import PYTHONPATH, Child, eventually, python

__all__ = ["Calls", "Got", "Site", "Sites", "loading", "until"]

#: Lost nodes are noticed within about a second, and nothing is collected, drawn or sent home.
_SYSTEM = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
    "enable_metrics_collection": False,
}
#: Of a head node: no process for what tests do not look at.
_FEW_PROCESSES = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

#: Agents find it, and have the faults that tests ask for.
FAULTS = Path(__file__).with_name("faults")

#: Seconds between two looks at what nodes do. Each look is work for a server or the directory, and takes from what is awaited.
_LOOK = 0.05

#: The app of every site: each build is written down, and waits at a gate while there is one.
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

#: A client's process: it calls as any user's does, and prints what it got.
_CLIENT = """
import hashlib, json, sys
sys.path.insert(0, {folder!r})
import app
handle = app.load_model(*{args!r})
model = handle.value
digest = hashlib.sha256(b"".join(t.detach().cpu().numpy().tobytes() for t in (model.weight, model.scale))).hexdigest()
print("got " + json.dumps([digest, handle.generation, model.tied is model.weight, app.provider.execution_mode]), flush=True)
sys.stdin.readline()
"""


class Got:
    """What a client's process got; ``hold()`` has it stay with its lease until it is let go."""

    def __init__(self, child: Child, line: str) -> None:
        self.child = child
        self.digest, self.generation, self.tied, self.mode = json.loads(line.removeprefix("got "))

    def close(self) -> None:
        """Let the process end."""
        with contextlib.suppress(BrokenPipeError):
            self.child.tell("")
        self.child.close()


class Site:
    """A Ray node and the broker beside it."""

    def __init__(self, sites: Sites, name: str, ray_node: Any, gpu: int | None, *, alone: bool) -> None:
        self.name = name
        self.gpu = gpu
        #: The device as this process names it.
        self.device = "cpu" if gpu is None else f"cuda:{gpu}"
        self.ray_node = ray_node
        #: What it is a part of.
        self.cluster = sites
        self._alone = alone
        #: Short: the address of a Unix socket has 107 bytes.
        self.base_path = str(sites.root / name)
        self.broker: Child | None = None
        #: Lines of the brokers' log.
        self.log: list[str] = []

    @property
    def node_id(self) -> str:
        """The Ray node's id."""
        return str(self.ray_node.node_id)

    @property
    def node(self) -> str:
        """The name in the cluster."""
        return str(self.status()["node"])

    @property
    def socket(self) -> str:
        """The broker's socket."""
        return f"{self.base_path}-{device_tag(device_id(self.device))}.sock"

    @property
    def environ(self) -> dict[str, str]:
        """The environment of all processes of the site."""
        return {
            "SHARED_TENSOR_BASE_PATH": self.base_path,
            "SHARED_TENSOR_CLUSTER_NODE": self.node_id,
            "RAY_ADDRESS": self.cluster.address,
            "SITE": self.name,
            "SITE_DEVICE": "cpu" if self.gpu is None else "cuda",
            "SITES": str(self.cluster.root),
            **({"CUDA_VISIBLE_DEVICES": str(self.gpu)} if self.gpu is not None else {}),
        }

    def serve(self, *options: str, cluster: str = "default", app: str = APP, **environ: str) -> Site:
        """Start the broker, and wait until its app is loaded."""
        folder = self.cluster.root / f"app-{self.name}"
        folder.mkdir(exist_ok=True)
        (folder / "app.py").write_text(textwrap.dedent(app))
        self.broker = Child(
            *("-m", "shared_rpc.cli", "serve", str(folder / "app.py"), "--source-grace", "600", *options),
            environ={**self.environ, "SHARED_TENSOR_CLUSTER": cluster, **environ},
        )
        self.cluster.brokers.append(self.broker)
        reader = threading.Thread(target=self._read, args=(self.broker.process.stderr,), daemon=True)
        reader.start()
        self.cluster.readers.append(reader)
        self.broker.expect("serving")
        return self

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self.log.append(line)

    def says(self, text: str) -> bool:
        """Whether the broker's log has a text."""
        return any(text in line for line in self.log)

    def start(self, *args: Any) -> Child:
        """A client's process that calls ``load_model``."""
        folder = str(self.cluster.root / f"app-{self.name}")
        code = _CLIENT.format(folder=folder, args=args)
        child = python(code, environ={**self.environ, "SHARED_TENSOR_ENABLED": "1"})
        self.cluster.children.append(child)
        return child

    def got(self, child: Child) -> Got:
        """Wait for what a client's process gets."""
        return Got(child, child.expect("got "))

    def load(self, *args: Any) -> Got:
        """Have a process call ``load_model``, and end."""
        found = self.got(self.start(*args))
        found.close()
        return found

    def client(self) -> Client:
        """A client of the broker."""
        client = Client(self.base_path, device=self.device, timeout=50.0, connect_timeout=5.0)
        self.cluster.closing.callback(client.close)
        return client

    def status(self) -> dict[str, Any]:
        """What the agent has published in its broker."""
        source = self.source()
        return dict(source["status"]) if source is not None else {}

    def source(self) -> Any:
        """What the broker says of its source of records."""
        with Client(self.base_path, device=self.device, timeout=30.0, connect_timeout=5.0) as client:
            return client.get_server_info()["source"]

    def agent_pid(self) -> int:
        """The process of the agent."""
        return int(self.source()["pid"])

    def joined(self) -> bool:
        """Whether an agent is there that has joined the directory."""
        return self.status().get("state") == "joined"

    def kill_agent(self) -> None:
        """SIGKILL."""
        os.kill(self.agent_pid(), signal.SIGKILL)

    def kill_broker(self) -> None:
        """SIGKILL, to the broker, to its workers by their end, and to nothing of Ray."""
        assert self.broker is not None
        self.broker.process.kill()
        self.broker.process.wait()

    def lose(self) -> None:
        """The whole machine: its Ray node, unless that has another broker too, and its broker."""
        if self._alone:
            self.cluster.cluster.remove_node(self.ray_node, allow_graceful=False)
        self.cluster.sites.remove(self)
        self.kill_broker()

    @property
    def serves(self) -> bool:
        """Whether there is a broker."""
        return self.broker is not None and self.broker.process.poll() is None


class Sites:
    """A Ray cluster on this machine.

    :param gpus: how many GPUs the sites use, in turns; 0 for the host's memory.
    """

    def __init__(self, store: int = 150 << 20, port: int | None = None, gpus: int = 0) -> None:
        self._gpus = gpus
        self.root = Path(tempfile.mkdtemp(prefix="rs-", dir="/tmp"))
        # Nodes and their agents have the environment of this process.
        self._before = dict(os.environ)
        os.environ.update({**_QUIET, "PYTHONPATH": f"{FAULTS}{os.pathsep}{PYTHONPATH}", "SITES": str(self.root)})
        self.children: list[Child] = []
        self.brokers: list[Child] = []
        self.readers: list[threading.Thread] = []
        self.closing = contextlib.ExitStack()
        self.sites: list[Site] = []
        self._store = store
        self._count = 0
        self._head = {"num_cpus": 1, "object_store_memory": store, "_system_config": _SYSTEM, **_FEW_PROCESSES}
        if port is not None:
            self._head["gcs_server_port"] = port
        self.cluster = Cluster(initialize_head=True, head_node_args=self._head)
        self._free: list[Any] = [self.cluster.head_node]
        self.address = str(self.cluster.address)
        connect(self.address)

    def add(self, *options: str, store: int | None = None, beside: Site | None = None, **named: Any) -> Site:
        """One more node with its broker; or a broker ``beside`` that of another site, on the same node."""
        if beside is not None:
            node = beside.ray_node
        elif self._free and store is None:
            node = self._free.pop()
        else:
            node = self.cluster.add_node(num_cpus=1, object_store_memory=store or self._store)
        self._count += 1
        gpu = self._count % self._gpus if self._gpus else None
        site = Site(self, f"n{self._count}", node, gpu, alone=beside is None)
        self.sites.append(site)
        return site.serve(*options, **named)

    def stop_ray(self) -> None:
        """End Ray on all nodes, as by SIGKILL."""
        ray.shutdown()
        self.cluster.shutdown()

    def restart_ray(self) -> None:
        """Start Ray again: the sites belong to other nodes then, which their brokers were not told of."""
        self.cluster = Cluster(initialize_head=True, head_node_args=self._head)
        connect(self.address)

    def all_joined(self) -> None:
        """Wait until every site has joined."""
        for site in self.sites:
            until(site.joined, f"{site.name} has joined")

    def gate(self, name: str) -> Path:
        """Close a gate for builds of a name; ``unlink()`` opens it."""
        return self._mark(f"gate-{name}")

    def break_(self, name: str) -> Path:
        """Have builds of a name fail."""
        return self._mark(f"broken-{name}")

    def _mark(self, name: str) -> Path:
        path = self.root / name
        path.touch()
        return path

    def builds(self, name: str) -> list[str]:
        """The sites that have begun to build a name, in order."""
        path = self.root / f"builds-{name}"
        return path.read_text().split() if path.exists() else []

    def status(self) -> dict[str, Any]:
        """What the directory knows."""
        with SharedCluster() as found:
            return found.status()

    def key(self, name: str) -> dict[str, Any]:
        """What it knows of a model."""
        keys = [key for key in self.status()["keys"] if f"'{name}'" in key["cache_key"]]
        return keys[0] if keys else {"waiting": [], "nodes": {}, "building": None}

    def hold(self, what: str, site: Site) -> Path:
        """Have the agent of a site wait before it gives (``"give"``) or takes a part, or refuse or damage one."""
        (self.root / f"{site.node_id}-{what}-begun").unlink(missing_ok=True)
        return self._mark(f"{site.node_id}-{what}")

    def held(self, what: str, site: Site) -> bool:
        """Whether it waits there."""
        return (self.root / f"{site.node_id}-{what}-begun").exists()

    def close(self) -> None:
        """End everything."""
        self.closing.close()
        for broker in self.brokers:
            broker.process.kill()
            broker.process.wait()
        for reader in self.readers:
            reader.join(10.0)
        for broker in self.brokers:
            for stream in (broker.process.stdin, broker.process.stdout, broker.process.stderr):
                assert stream is not None
                stream.close()
        for child in self.children:
            if child.process.poll() is None:
                child.process.kill()
            child.process.communicate()
        if ray.is_initialized():
            ray.shutdown()
        self.cluster.shutdown()
        os.environ.clear()
        os.environ.update(self._before)
        shutil.rmtree(self.root, ignore_errors=True)


class Calls:
    """Processes of sites that call ``load_model``, all at once."""

    def __init__(self, sites: Sequence[Site], *args: Any) -> None:
        self._children = [(site, site.start(*args)) for site in sites]

    def results(self) -> list[Got]:
        """Wait for what all of them get, and let them end."""
        found = [site.got(child) for site, child in self._children]
        for got in found:
            got.close()
        return found


def loading(sites: Sequence[Site], *args: Any) -> list[Got]:
    """What a process of each of the sites gets, when the directory knows that they have it."""
    found = Calls(sites, *args).results()
    nodes, cluster = {site.node for site in sites}, sites[0].cluster
    until(lambda: nodes <= cluster.key(args[0])["nodes"].keys(), "the directory knows who has it")
    return found


def until(condition: Callable[[], bool], what: str = "") -> None:
    """Wait for what several processes do."""
    eventually(condition, 40.0, what, _LOOK)
