"""What endpoints may return: any object that reaches memory, in every role, the same bit for bit in another process."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.optim.swa_utils import AveragedModel

from shared_rpc import Client, Handle, Provider, Server, materialize
from shared_rpc.codec.arguments import encode_arguments, lower_arguments
from shared_rpc.codec.payload import dump_result
from shared_rpc.errors import CapabilityError, ConfigurationError
from tests.kit.apps import App, Connect, Serve
from tests.kit.models import Slotted, State

# Objects of every kind, in every role.


class Weakless:
    """An object that nobody can have a weak reference to."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __getstate__(self) -> Any:
        return self.tensor

    def __setstate__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _self_holding() -> list[Any]:
    value: list[Any] = [torch.ones(1)]
    value.append(value)
    return value


def _closure() -> Any:
    held = torch.ones(1)
    return lambda: held


OBJECTS: dict[str, tuple[Callable[[], Any], Callable[[Any], torch.Tensor]]] = {
    "dataclass": (lambda: State(1, {"m": torch.ones(1)}), lambda v: v.moments["m"]),
    "slots": (lambda: Slotted(torch.ones(1)), lambda v: v.tensor),
    "without weak references": (lambda: Weakless(torch.ones(1)), lambda v: v.tensor),
    "closure": (_closure, lambda v: v.__closure__[0].cell_contents),
    "any keys": (lambda: {1: torch.ones(1), (None, 2.5): "x"}, lambda v: v[1]),
    "set": (lambda: {torch.ones(1)}, lambda v: next(iter(v))),
    "deque": (lambda: deque([1, torch.ones(1)]), lambda v: v[1]),
    "partial": (lambda: functools.partial(torch.mul, torch.ones(1)), lambda v: v.args[0]),
    "method": (lambda: State(1, {"m": torch.ones(1)}).__repr__, lambda v: v.__self__.moments["m"]),
    "module's method": (lambda: torch.nn.Linear(1, 1).forward, lambda v: v.__self__.weight.detach()),
    "mixed": (lambda: (State(1, {}), [len, Path("x"), torch.ones(1)]), lambda v: v[1][2]),
    "holds itself": (_self_holding, lambda v: v[1][1][0]),
    "no tensor": (lambda: State(1, {"m": torch.nn.Identity()}), lambda v: torch.zeros(1)),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_objects_in_every_role(every_app: list[App], kind: str) -> None:
    """Whatever reaches memory is a result in every role, of the same size, cached and not, and by way of a task."""
    make, tensor_of = OBJECTS[kind]
    sizes = set()
    for app in every_app:
        cached, fresh = app.share("cached")(make), app.share("fresh", cache=False)(make)
        held = app.share("held", managed=True)(make)
        for value in (cached(), cached(), fresh(), app.provider.wait_for_task(cached.submit())):
            assert type(value) is type(make())
            assert tensor_of(value).shape == (1, 1) if kind == "module's method" else (1,)
        tensor_of(cached()).fill_(7)
        if kind != "no tensor":
            assert tensor_of(cached()).item() == 7
        with held() as handle:
            assert isinstance(handle, Handle)
            sizes.add(handle.get_object_info()["nbytes"])
    assert len(sizes) == 1


def test_an_object_is_rebuilt_once(provider: Provider, serve: Serve, connect: Connect) -> None:
    """Where a weak reference to it can be had, each call of a client gives the same object while it lives."""
    provider.share("get")(lambda: State(1, {"m": torch.ones(1)}))
    serve()
    client = connect()
    one = client.call("get")
    assert client.call("get") is one


@pytest.mark.parametrize(
    "make", [lambda: Weakless(torch.ones(1)), lambda: State(1, {"m": torch.ones(1)})], ids=["slots", "state"]
)
def test_generations_of_any_object(app: App, make: Callable[[], Any]) -> None:
    """Handles of such objects have revisions, successors and updates, as others have."""
    held = app.share("held", managed=True)(make)

    def tensor_of(value: Any) -> torch.Tensor:
        return value.tensor if isinstance(value, Weakless) else value.moments["m"]

    with held() as handle:
        with app.provider.update(handle) as value:
            tensor_of(value).fill_(2)
        assert (handle.revision, handle.read_consistent(lambda v: tensor_of(v).item())) == (2, 2.0)
        app.provider.refresh("held")
        assert not handle.is_current()
        with handle.latest() as latest:
            assert tensor_of(latest.value).item() == 1
            assert tensor_of(handle.value).item() == 2


def test_a_ticket_of_an_object(provider: Provider, serve: Serve, connect: Connect) -> None:
    """It opens to the same memory."""
    value = State(1, {"m": torch.ones(3)})
    provider.share("held", managed=True)(lambda: value)
    serve()
    with connect().call("held") as handle:
        with connect().open_ticket(handle.ticket()) as other:
            other.value.moments["m"].fill_(5)
        assert value.moments["m"].tolist() == [5, 5, 5]


def test_materialize_wants_the_module(provider: Provider, serve: Serve, connect: Connect) -> None:
    """Of an object that has a module the model can be built, and of the object itself the error says how."""
    provider.share("held", managed=True)(lambda: State(1, {"m": torch.nn.Linear(2, 2)}))
    serve()
    with connect().call("held") as handle:
        with (
            pytest.raises(
                ConfigurationError, match=r"is a State: use a module.*of an object that has a module in it, that module"
            ),
            materialize(handle),
        ):
            torch.nn.Linear(2, 2)
        with materialize(handle.value.moments["m"]):
            model = torch.nn.Linear(2, 2)
        assert model.weight.data_ptr() == handle.value.moments["m"].weight.data_ptr()


def test_a_device_in_an_object(device: str, rebuilt: Callable[..., Any]) -> None:
    """It is the reader's own name for the same device."""
    where = torch.ones(1, device=device).device
    assert rebuilt(State(1, {"m": torch.ones(1, device=device), "at": where})).moments["at"] == where


# Memory on the host, beside that of a GPU.


def _optimizer() -> torch.optim.Optimizer:
    weight = torch.empty(0, requires_grad=True)  # an empty one may be anywhere
    optimizer = torch.optim.AdamW([weight])
    optimizer.state[weight] = {"step": torch.tensor(3.0)}
    return optimizer


def _schedule() -> Any:
    return pytest.importorskip("diffusers").DDPMScheduler(num_train_timesteps=10)


def _averaged() -> torch.nn.Module:
    return AveragedModel(torch.nn.Identity())


def _packed() -> PackedSequence:
    return PackedSequence(torch.empty(1, 0), torch.tensor([1]))


@pytest.mark.parametrize(
    "make", [_optimizer, _schedule, _averaged, _packed], ids=["optimizer", "schedule", "averaged model", "packed sequence"]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_what_computes_on_the_host_stays_there(make: Callable[[], Any]) -> None:
    """Where a GPU's memory is shared, host tensors of such an object are no mistake."""
    _, scan = dump_result([torch.nn.Identity(), State(1, {"m": make()})], "load", "cuda")
    assert scan.storages
    assert {storage.device.type for storage in scan.storages} == {"cpu"}


@pytest.mark.parametrize(
    "make, path",
    [
        (lambda: State(1, {"m": torch.ones(1)}), "result[1].moments['m']"),
        (lambda: {2: {torch.ones(1)}}, "result[1][2][0]"),
        (lambda: functools.partial(torch.add, torch.ones(1)), "result[1].args[0]"),
        (lambda: State(1, {"m": _optimizer(), "t": torch.ones(1)}), "result[1].moments['t']"),
        (lambda: AveragedModel(torch.nn.Linear(1, 1)), "result[1].module.weight"),
        (lambda: PackedSequence(torch.ones(1, 1), torch.tensor([1])), "result[1][0]"),
    ],
    ids=["dataclass", "set", "partial", "beside an optimizer", "in an averaged model", "in a packed sequence"],
)
def test_other_host_tensors_are_refused(make: Callable[[], Any], path: str) -> None:
    """Wherever else in an object a tensor on the host is, it was forgotten there: the error has the way to it."""
    with pytest.raises(CapabilityError) as caught:
        dump_result([torch.nn.Identity(), make()], "load", "cuda")
    assert f"endpoint 'load': {path} is on cpu, but memory is shared on 'cuda' here" in str(caught.value)


@pytest.mark.parametrize(
    "lower",
    # What is sent waits for the GPU.
    [
        pytest.param(lambda *call: encode_arguments(*call).close(), id="sent", marks=pytest.mark.gpu),
        pytest.param(lower_arguments, id="within a process"),
    ],
)
def test_what_computes_on_the_host_as_an_argument(lower: Callable[..., Any]) -> None:
    """An averaged model's count is no mistake there either, and a host tensor beside it is one, in every role."""
    model = _averaged()
    lower([model], {}, "cuda")
    model.register_buffer("scale", torch.ones(1))
    with pytest.raises(CapabilityError, match="scale is on cpu, but memory is shared on 'cuda' here"):
        lower([model], {}, "cuda")


def test_an_averaged_model(device: str, rebuilt: Callable[..., Any]) -> None:
    """How many models it is the average of is on the host and shared there, and goes on from there."""
    model = torch.nn.Linear(2, 2, device=device)
    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    read = rebuilt(averaged)
    assert (read.n_averaged.device.type, read.n_averaged.item()) == ("cpu", 1)
    assert read.module.weight.device.type == device
    with torch.no_grad():
        model.weight.fill_(1)
    expected = (averaged.module.weight.detach() + 1) / 2
    read.update_parameters(model)
    assert averaged.n_averaged.item() == 2
    torch.testing.assert_close(averaged.module.weight.detach(), expected)


def test_a_packed_sequence(device: str, rebuilt: Callable[..., Any]) -> None:
    """How long its parts are is on the host, where torch wants it."""
    sent = pack_sequence([torch.ones(3, 2, device=device), torch.zeros(1, 2, device=device)])
    read = rebuilt(sent)
    assert (read.data.device.type, read.batch_sizes.device.type) == (device, "cpu")
    assert torch.equal(pad_packed_sequence(read)[0], pad_packed_sequence(sent)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("cached", [True, False], ids=["cached", "fresh"])
def test_host_memory_beside_a_gpus(base_path: str, cached: bool) -> None:
    """An optimizer's step counts are shared as host memory, or copied where all else is; the object is on the GPU."""
    made: list[Any] = []

    def make() -> Any:
        model = torch.nn.Linear(4, 4, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 4, device="cuda")).sum().backward()
        optimizer.step()
        made.append((model, optimizer))
        return made[-1]

    provider = Provider(base_path, device="cuda")
    provider.share("get", cache=cached)(make)
    provider.share("held", managed=True)(make)
    with Server(provider), Client(base_path, device="cuda") as client:
        model, optimizer = client.call("get")
        steps = [state["step"] for state in optimizer.state.values()]
        assert [(step.device.type, step.item()) for step in steps] == [("cpu", 1.0)] * 2
        assert model.weight.device.type == "cuda"
        for step in steps:
            step.fill_(9)
        seen = {state["step"].item() for state in made[0][1].state.values()}
        assert seen == ({9.0} if cached else {1.0})
        with client.call("held") as handle:
            assert handle.get_object_info()["device"] != "cpu"
