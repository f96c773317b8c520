"""Fixtures of all tests: a server for each test, and checks that no test leaves anything behind."""

from __future__ import annotations

import concurrent.futures
import fcntl
import gc
import multiprocessing.resource_tracker
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from shared_rpc import Client, Provider, Server
from shared_rpc.codec.results import decode_result, publish
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.records import Record
from shared_rpc.server import sources
from tests.kit.brokers import BrokerApp
from tests.kit.forks import start_zygote, stop_zygote
from tests.kit.interpreter import Interpreter
from tests.kit.joiners import TOKEN
from tests.kit.processes import eventually, open_fds
from tests.kit.service_manager import ServiceManager
from tests.kit.world import EACH_ROLE, ROLES, World

# A command that a shell runs in the background ignores Ctrl-C, and the children of the tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test asks a model hub: where there is no network, each answer would take half a minute.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# No deadline: properties do not depend on the machine's other load. HYPOTHESIS_PROFILE=deep runs more examples.
hypothesis.settings.register_profile("quick", deadline=None, max_examples=40)
hypothesis.settings.register_profile("deep", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture(scope="session", autouse=True)
def beginnings(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start children of tests as forks, in the folders whose tests have any."""
    folders = {item.path.parent.name for item in request.session.items}
    if folders - {"rules", "compat"}:
        start_zygote()
    yield
    stop_zygote()


@pytest.fixture(autouse=True)
def gpu_to_share(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give a test that measures a whole GPU's memory exclusive use of it, also among parallel test processes."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    alone = request.node.get_closest_marker("whole_gpu") is not None
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with (folder / "queue").open("w") as queue, (folder / "gpu").open("w") as gpu:
        # Every waiting test keeps its place in the queue, so that one that needs the GPU alone is never overtaken indefinitely.
        fcntl.flock(queue, fcntl.LOCK_EX)
        fcntl.flock(gpu, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(queue, fcntl.LOCK_UN)
        yield


@pytest.fixture(autouse=True)
def quick_collections() -> None:
    """Freeze all objects that exist before a test, so that collections during the test do not traverse them."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def go() -> Iterator[threading.Event]:
    """Event that releases waiting endpoints."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def begun() -> threading.Event:
    """Event that a waiting endpoint sets when it begins."""
    return threading.Event()


@pytest.fixture
def base_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A private base path for this process and its children."""
    path = str(tmp_path / "s")
    monkeypatch.setenv("SHARED_TENSOR_BASE_PATH", path)
    for name in ("SHARED_TENSOR_ENABLED", "SHARED_TENSOR_ROLE"):
        monkeypatch.delenv(name, raising=False)
    tmp_path.chmod(0o700)
    return path


def device_of(request: pytest.FixtureRequest) -> str:
    """Return the fixture ``device`` of tests that have one; others are on host memory."""
    return request.getfixturevalue("device") if "device" in request.fixturenames else "cpu"


@pytest.fixture(params=EACH_ROLE)
def role(request: pytest.FixtureRequest) -> str:
    """Each role of an app."""
    name: str = request.param
    return name


@pytest.fixture
def world(
    request: pytest.FixtureRequest, no_leaks: None, base_path: str, interpreters: dict[int, Interpreter]
) -> Iterator[World]:
    """An app, its server, clients and processes: on the ``device`` and in the ``role`` of tests that have these fixtures.

    Other tests are on host memory, with the server in this process.
    """
    role = request.getfixturevalue("role") if "role" in request.fixturenames else "server"
    world = World(base_path, role, device_of(request), interpreters)
    yield world
    world.close()
    vars(world).clear()  # for `no_leaks`: results live as long as their endpoints


@pytest.fixture
def every_world(no_leaks: None, base_path: str) -> Iterator[list[World]]:
    """A world in each role at once, for results that must be equal in them."""
    worlds = [World(f"{base_path}-{role}", role) for role in ROLES]
    yield worlds
    for world in worlds:
        world.close()
        vars(world).clear()


@pytest.fixture
def client(world: World) -> Client:
    """A client of the test's server."""
    return world.client()


@pytest.fixture
def admitted_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make servers of this process accept it, and its children, as sources of records, as if they had started them."""
    monkeypatch.setattr(sources, "make_token", lambda: TOKEN)
    monkeypatch.setenv("SHARED_TENSOR_SOURCE_TOKEN", TOKEN)


@pytest.fixture
def broker(no_leaks: None, served: BrokerApp, monkeypatch: pytest.MonkeyPatch) -> Iterator[BrokerApp]:
    """The server started by a module's fixture ``served``, without objects; processes that a test starts find it."""
    monkeypatch.setenv("SHARED_TENSOR_BASE_PATH", served.base_path)
    yield served
    served.empty()


@pytest.fixture
def broker_app(no_leaks: None, base_path: str) -> Iterator[BrokerApp]:
    """An app for a broker, with the endpoints common to such apps; not served yet."""
    app = BrokerApp(World(base_path))
    app.write()
    yield app
    app.world.close()


@pytest.fixture
def make_manager(broker_app: BrokerApp, tmp_path: Path) -> Iterator[Callable[..., ServiceManager]]:
    """``make_manager(**options)`` makes a service manager of the app, which ends after the broker."""
    made: list[ServiceManager] = []

    def make(**options: Any) -> ServiceManager:
        made.append(ServiceManager(broker_app, tmp_path, **options))
        return made[-1]

    yield make
    for child in broker_app.world.children:
        if child.process.poll() is None:
            child.process.kill()
            child.process.wait()
    for manager in made:
        manager.close()


@pytest.fixture
def manager(make_manager: Callable[..., ServiceManager]) -> ServiceManager:
    """A service manager that listens, with unlimited capacity."""
    return make_manager()


@pytest.fixture
def threads() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    """A thread pool for calls that wait."""
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        yield pool


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Open everything that a process opens once and keeps (the loop's own pipe, torch's) before anything is counted."""
    # Who makes a lock of multiprocessing starts it, from Python 3.14 on, as tqdm does behind a progress bar.
    multiprocessing.resource_tracker.ensure_running()
    path = tmp_path_factory.mktemp("warm")
    path.chmod(0o700)
    provider = Provider(path / "s", device="cpu")
    provider.share("warm")(lambda size: torch.nn.Linear(size, size))
    with Server(provider), Client(path / "s", device="cpu") as client:
        client.call("warm", 2)
    # Imported objects stay: the collector need not traverse them in every test.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def warm_gpu(warm: None) -> None:
    """Open everything that a GPU's driver opens once in a process and keeps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first product in autograd's thread makes the context there, with a warning
        (torch.ones(2, 2, device="cuda", requires_grad=True) @ torch.ones(2, 2, device="cuda")).sum().backward()
    publish(torch.zeros(1, device="cuda"), "cuda", "read_write", "warm").close()


@pytest.fixture
def no_leaks(request: pytest.FixtureRequest, warm: None, interpreters: dict[int, Interpreter]) -> Iterator[None]:
    """Fail the test if it leaves descriptors or mappings behind. Request it before fixtures that open any."""
    if request.node.get_closest_marker("gpu") is not None:
        request.getfixturevalue("warm_gpu")

    def opened() -> int:
        return open_fds() - 3 * len(interpreters)  # without their pipes

    gc.collect()
    MAPPINGS.drain()
    fds, mappings = opened(), len(MAPPINGS)
    yield

    def clean() -> bool:
        # The finaliser thread may be about to unmap items of its queue; a collection takes time, and is rarely needed.
        MAPPINGS.drain()
        if len(MAPPINGS) <= mappings and opened() <= fds:
            return True
        gc.collect()
        return False

    try:
        eventually(clean, seconds=2)
    except AssertionError:
        pytest.fail(f"{len(MAPPINGS) - mappings} mappings and {opened() - fds} descriptors left")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, warm: None) -> str:
    """Each kind of device whose memory is shared."""
    kind: str = request.param
    if kind == "cuda":
        request.getfixturevalue("warm_gpu")
    return kind


@pytest.fixture
def published(device: str, no_leaks: None) -> Iterator[Callable[..., Record]]:
    """``published(value, access, **options)`` returns its record, which is closed at the end."""
    with ExitStack() as stack:

        def make(value: Any, access: Any = "read_write", **options: Any) -> Record:
            record = publish(value, device, access, "endpoint", **options)
            stack.callback(record.close)
            return record

        yield make


@pytest.fixture
def rebuilt(published: Callable[..., Record]) -> Callable[..., Any]:
    """``rebuilt(value, access)`` returns the value as a client gets it, with this process as server and client."""

    def rebuild(value: Any, access: Any = "read_write") -> Any:
        record = published(value, access)
        return decode_result(record.skeleton, record.table, record.segments)

    return rebuild


@pytest.fixture(scope="module")
def interpreters() -> Iterator[dict[int, Interpreter]]:
    """Other processes that a module's tests have started, by number; the next test uses them too."""
    processes: dict[int, Interpreter] = {}
    yield processes
    for process in processes.values():
        process.kill()
