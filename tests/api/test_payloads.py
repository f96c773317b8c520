"""Nested payloads through a real server: arguments and results arrive unchanged, and stay unchanged."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from shared_rpc import Client
from tests.kit.comparing import differences
from tests.kit.payloads import PAYLOADS, tensors_in
from tests.kit.world import World


class Endpoints:
    """The server's endpoints, with their last arguments and next results."""

    def __init__(self, world: World) -> None:
        self.device = world.device
        #: What the argument of :meth:`echo` should be, and where it differs.
        self.expected: Any = None
        self.seen = ["it was not called"]
        #: Arguments that the server keeps.
        self.kept: list[Any] = []
        self.runs = 0
        for function in (self.echo, self.keep, self.kept_sums, self.write):
            world.share(cache=False)(function)
        world.share(self.cached)
        world.share(cache_format_key="{key}")(self.echo_by_key)

    def echo(self, *args: Any, **kwargs: Any) -> Any:
        """Return the only argument."""
        (value,) = (*args, *kwargs.values())
        self.seen = differences(self.expected, value)
        return value

    def echo_by_key(self, key: str, value: Any) -> Any:
        """Return the first value that was passed for a key."""
        return value

    def cached(self, name: str) -> Any:
        """Return a payload that is made once."""
        self.runs += 1
        return PAYLOADS[name](self.device)

    def keep(self, value: Any) -> None:
        """Keep an argument."""
        self.kept.append(value)

    def kept_sums(self) -> torch.Tensor:
        """Return the sums of all kept tensors."""
        return torch.stack([tensor.sum() for tensor in tensors_in(self.kept)])

    def write(self, first: torch.Tensor, second: torch.Tensor, number: float) -> list[torch.Tensor]:
        """Fill one argument, return both."""
        return [first.fill_(number), second]


@pytest.fixture
def endpoints(device: str, world: World) -> Iterator[Endpoints]:
    """A server's endpoints."""
    endpoints = Endpoints(world)
    yield endpoints
    endpoints.kept.clear()


def as_a_task(client: Client, *args: Any, **kwargs: Any) -> Any:
    """Submit a task, and wait for it."""
    return client.wait_for_task(client.submit(*args, **kwargs), 30)


def filled(number: float, device: str, *shape: int) -> torch.Tensor:
    """A tensor that identifies its call."""
    return torch.full(shape or (1024,), float(number), device=device)


def busy(endpoints: Endpoints, client: Client) -> None:
    """Make further calls, which need memory of the sizes that the tests use."""
    for _ in range(20):
        client.call("echo", (filled(8, endpoints.device), filled(9, endpoints.device)))
        client.call("echo", filled(99, endpoints.device))


@pytest.mark.parametrize("name", PAYLOADS)
def test_arguments_round_trip(endpoints: Endpoints, client: Client, name: str) -> None:
    """Structure, layout, flags, bits and aliases, in the endpoint and in its result; the caller's own are unchanged."""
    payload = PAYLOADS[name](endpoints.device)
    endpoints.expected = PAYLOADS[name](endpoints.device)

    result = client.call("echo", payload)

    assert endpoints.seen == []
    assert differences(endpoints.expected, result) == []
    assert differences(endpoints.expected, payload) == []


@pytest.mark.parametrize("name", PAYLOADS)
def test_cached_results_are_one_memory(endpoints: Endpoints, client: Client, name: str) -> None:
    """By a call and by a task: it is built once, and arrives as it was built."""
    expected = PAYLOADS[name](endpoints.device)

    called, waited = client.call("cached", name), as_a_task(client, "cached", name)

    assert endpoints.runs == 1
    for result in (called, waited):
        assert differences(expected, result) == []
    assert [tensor.data_ptr() for tensor in tensors_in(called)] == [tensor.data_ptr() for tensor in tensors_in(waited)]


@pytest.mark.parametrize(
    "views",
    [
        lambda base: [base, base[2:5]],
        lambda base: [base[:5], base[3:]],
        lambda base: [base.view(3, 4).T, base[::2]],
        lambda base: [base.view(torch.int32)[1:], base[:9]],
        lambda base: [base[4:8], nn.Parameter(base, requires_grad=False)],
    ],
    ids=["whole and part", "overlapping", "transposed", "of another dtype", "part and parameter"],
)
def test_views_among_the_arguments_share_writes(endpoints: Endpoints, client: Client, views: Callable[..., Any]) -> None:
    """The endpoint writes to one argument and reads it in another, by position or by name; the caller's own are unchanged."""
    base = torch.arange(12.0, device=endpoints.device)
    address = base.data_ptr()
    first, second = views(base)
    expected = views(torch.arange(12.0, device=endpoints.device))
    expected[0].fill_(100)

    result = client.call("write", first, second=second, number=100)

    assert differences(expected, result) == []
    assert (base.data_ptr(), base.tolist()) == (address, list(range(12)))


def gradient_over(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return the result of a later backward pass over a tensor."""
    weight = torch.ones_like(tensor, requires_grad=True)
    loss = (weight * tensor).sum()
    return lambda: torch.autograd.grad(loss, weight)[0]


def whole_of(storage: torch.UntypedStorage, offset: int) -> torch.Tensor:
    """Return a tensor over the whole storage of a tensor that was dropped."""
    return torch.empty(0, device=storage.device).set_(storage, offset, (1024,))


LEFT: dict[str, Callable[[torch.Tensor], Any]] = {
    "slice": lambda tensor: tensor[5:9],
    "data": lambda tensor: tensor.data,
    "parameter": nn.Parameter,
    "array": lambda tensor: tensor.cpu().numpy(),
    "storage": lambda tensor: functools.partial(whole_of, tensor.untyped_storage(), tensor.storage_offset()),
    "graph": gradient_over,
}


@pytest.mark.parametrize("left", LEFT)
def test_a_part_of_a_result_keeps_its_memory(endpoints: Endpoints, client: Client, left: str) -> None:
    """The memory is not reused while any part is referenced."""
    part = LEFT[left](client.call("echo", (filled(1, endpoints.device), filled(3, endpoints.device)))[1])

    busy(endpoints, client)

    assert ((part() if callable(part) else part) == 3).all()


def test_arguments_kept_by_an_endpoint_stay(endpoints: Endpoints, client: Client) -> None:
    """A server may keep its arguments: later calls get other memory."""
    for number in range(20):
        client.call("keep", {"tensor": filled(number, endpoints.device), "view": filled(number, endpoints.device)[:2]})
        client.call("echo", filled(99, endpoints.device))

    sums = client.call("kept_sums").tolist()

    assert sums == [total for number in range(20) for total in (1024.0 * number, 2.0 * number)]


def test_a_cached_result_keeps_the_arguments_memory(endpoints: Endpoints, client: Client) -> None:
    """The cache keeps memory that a caller sent, after the ends of the call and the caller."""
    client.call("echo_by_key", "key", [filled(4, endpoints.device), filled(5, endpoints.device)])

    busy(endpoints, client)

    first, second = client.call("echo_by_key", "key", filled(7, endpoints.device))
    assert first.eq(4).all() and second.eq(5).all()


def test_task_results_stay_until_they_are_fetched(endpoints: Endpoints, client: Client) -> None:
    """Calls between the end of a task and its fetch do not overwrite its result."""
    tasks = [client.submit("echo", filled(number, endpoints.device)) for number in range(10)]
    busy(endpoints, client)

    for number, task in enumerate(tasks):
        assert client.wait_for_task(task, 30).eq(number).all()
