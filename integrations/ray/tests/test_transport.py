"""Ray's tensor transport SHARED_RPC, between actors on two nodes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
import torch

ray = pytest.importorskip("ray")
pytest.importorskip("ray.experimental.rdt.util", reason="this Ray has no tensor transports of one's own")

from ray_app import STORE, Nodes, segment_of  # noqa: E402
from shared_rpc import Client  # noqa: E402
from tests.kit.processes import eventually  # noqa: E402

pytestmark = [
    # Ray's own: unclosed sockets and files, and deprecated names.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(180),
]


@pytest.fixture(scope="module")
def nodes(ray_of_its_own: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Two nodes for all tests of this file, because they take seconds to start."""
    folder = tmp_path_factory.mktemp("ray")
    folder.chmod(0o700)
    with pytest.MonkeyPatch.context() as monkeypatch:
        nodes = Nodes(folder, monkeypatch)
        yield nodes
        nodes.close()


def test_an_argument_shares_the_makers_memory(nodes: Nodes) -> None:
    """Two actors of the maker's node map one segment, and see each other's writes."""
    one, two = nodes.readers[0], nodes.actor(0)
    made = nodes.makers[0].make.remote(1000)
    first, total = ray.get(one.write.remote(made, 0.0))
    assert total == 499500
    second, total = ray.get(two.write.remote(made, 100.0))
    assert first == second != ""
    assert total == 499600 and ray.get(one.write.remote(made, 50.0))[1] == 499550


def test_the_driver_gets_the_same_memory(nodes: Nodes) -> None:
    """``ray.get`` attaches like an actor."""
    made = nodes.makers[0].make.remote(10)
    tensor = ray.get(made)
    tensor[3] = -3
    segment, total = ray.get(nodes.readers[0].write.remote(made, 0.0))
    assert segment == segment_of(tensor) and total == 39


def test_tensors_in_the_nodes_server_are_not_copied(nodes: Nodes) -> None:
    """A view of a buffer is received as that view."""
    maker = nodes.makers[0]
    made = maker.view_of_buffer.remote()
    tensor = ray.get(made)
    assert tensor.shape == (2,) and tensor.stride() == (8,)
    tensor[1] = 5
    assert ray.get(maker.buffer.remote()) == (segment_of(tensor), 68.0)


def test_tensors_survive_their_killed_maker(nodes: Nodes) -> None:
    """Actors and the driver of its node still get them after SIGKILL."""
    maker = nodes.actor(0)
    made = maker.make.remote(1000)
    ray.wait([made])
    os.kill(ray.get(maker.pid.remote()), signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(maker.pid.remote())
    assert ray.get(made).sum() == 499500
    assert ray.get(nodes.readers[0].write.remote(made, 1.0))[1] == 499501


def test_a_dropped_reference_frees_the_memory(nodes: Nodes) -> None:
    """The server no longer has the object."""
    made = nodes.makers[0].make.remote(1000)
    ray.get(made)
    [held] = nodes.ids_of(made)
    assert held in nodes.objects(0)
    del made
    eventually(lambda: held not in nodes.objects(0), seconds=30)


def test_every_kind_of_tensor_is_preserved(nodes: Nodes) -> None:
    """With strides on the maker's node, with values on another one."""
    near, far = nodes.readers
    made = nodes.makers[0].odd.remote()
    whole = torch.arange(24.0).reshape(4, 6)
    got = ray.get(near.described.remote(made))
    assert got["turned"] == (whole.t().tolist(), "torch.float32", (1, 6), False)
    assert got["part"] == (whole[1:3, 2:].tolist(), "torch.float32", (6, 1), False)
    assert got["bfloat16"][:2] == ([1.5] * 3, "torch.bfloat16") and got["empty"][0] == [] and got["scalar"][0] == 7
    assert got["gradient"][3] and got["parameter"][3] and got["number"] == 7
    assert segment_of(ray.get(made)["parameter"]) == segment_of(ray.get(made)["turned"]) != ""
    away = ray.get(far.described.remote(made))
    assert {name: value[:2] for name, value in away.items() if name != "number"} == {
        name: value[:2] for name, value in got.items() if name != "number"
    }
    assert away["gradient"][3]


def test_another_node_gets_a_copy(nodes: Nodes) -> None:
    """In parts, because the object stores cannot hold all of it; writes do not affect the maker's memory."""
    far, before = nodes.readers[1], nodes.spilled()
    count = STORE // 4 * 5 // 4 + 1
    made = nodes.makers[0].make.remote(count)
    here = ray.get(made)
    assert ray.get(far.write.remote(made, 9.0)) == ("", float(here.double().sum()) + 9)
    assert here[0] == 0
    assert nodes.spilled() == before


def test_another_node_gets_a_copy_after_the_maker_was_killed(nodes: Nodes) -> None:
    """A task reads the tensors, not the maker."""
    maker = nodes.actor(0)
    made = maker.make.remote(1000)
    ray.wait([made])
    os.kill(ray.get(maker.pid.remote()), signal.SIGKILL)
    assert ray.get(nodes.readers[1].write.remote(made, 1.0))[1] == 499501


@pytest.mark.parametrize("node", [0, 1])
def test_a_tensor_of_put_is_available_everywhere(nodes: Nodes, node: int) -> None:
    """Put by an actor or the driver, received on either node."""
    reader = nodes.readers[node]
    assert ray.get(reader.fetched.remote(ray.get(nodes.makers[0].put.remote(100))))[1] == 4950
    mine = ray.put(torch.arange(100.0), _tensor_transport="SHARED_RPC")
    assert ray.get(reader.fetched.remote([mine]))[1] == 4950


@pytest.mark.parametrize("node", [0, 1])
def test_tensors_are_received_into_buffers(nodes: Nodes, node: int) -> None:
    """``set_target_for_ref`` sets memory of the receiver."""
    references = ray.get(nodes.makers[0].put.remote(1000))
    assert ray.get(nodes.readers[node].into.remote(references, 1000)) == (True, 499500.0)


def test_an_unsupported_tensor_fails_the_task(nodes: Nodes) -> None:
    """The caller gets the error."""
    with pytest.raises(Exception, match=r"tensor 0 of 1 .*tensor\.detach\(\)"):
        ray.get(nodes.makers[0].graph.remote())


def test_a_missing_server_is_reported(nodes: Nodes) -> None:
    """With the node, the socket and the reason."""
    far, near = nodes.readers
    made = nodes.makers[1].make.remote(10)
    ray.wait([made])
    with Client(nodes.bases[1], device="cpu") as client:
        client.stop_server()
    socket = f"{nodes.bases[1]}-cpu.sock"
    for actor in (near, far):
        with pytest.raises(Exception, match=f"SHARED_RPC: cannot get the tensors of object .*{socket}"):
            ray.get(actor.write.remote(made, 1.0))


def _refused(code: str) -> str:
    """Return the error of a process that imports the transport after ``code``."""
    program = textwrap.dedent(code) + textwrap.dedent(
        """
        from shared_rpc.errors import ConfigurationError
        try:
            from shared_rpc_ray import transport
        except ConfigurationError as error:
            print("refused:", error)
        """
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60).stdout


def test_the_import_without_ray_names_the_extra() -> None:
    """The error has the command that installs it."""
    said = _refused("import sys; sys.modules['ray'] = None")
    assert "refused:" in said and "pip install 'shared-rpc[ray]'" in said


def test_the_import_names_a_ray_without_transports() -> None:
    """The error has its version and a suitable one."""
    said = _refused(
        """
        import ray.experimental
        del ray.experimental.register_tensor_transport
        """
    )
    assert f"Ray {ray.__version__} has no tensor transports" in said
