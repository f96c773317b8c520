"""Values that are nested without end, and exceptions that do more than to be raised."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest
import torch

from shared_rpc import Client
from shared_rpc.errors import CapabilityError, CodecError, RemoteError
from tests.kit.apps import App, Connect
from tests.kit.deep import deep

#: Levels that neither pickle nor a message can follow: from Python 3.14 on the size of the stack is what ends them.
DEEP = 200_000


def nested(value: Any, wrap: Callable[[Any], Any]) -> Any:
    """Put a value into something, and that into the same again, and so on."""
    for _ in range(DEEP):
        value = wrap(value)
    return value


def chain() -> torch.nn.Module:
    """A module in a module in a module."""
    first = last = torch.nn.Linear(2, 2)
    for _ in range(DEEP // 4):
        last.next = torch.nn.Identity()
        last = last.next
    return first


DEEP_VALUES: dict[str, Callable[[], Any]] = {
    "lists": lambda: nested(torch.ones(1), lambda value: [value]),
    "tuples": lambda: nested(torch.ones(1), lambda value: (value,)),
    "dicts": lambda: nested(torch.ones(1), lambda value: {"k": value}),
    "modules": chain,
}

#: What finds the level is the same in every role.
every_kind_for_a_client = pytest.mark.parametrize(
    ("app", "kind"),
    [("client", "dicts"), ("local", "lists"), *deep(("server", "lists"), *(("client", kind) for kind in DEEP_VALUES))],
    indirect=["app"],
)


@every_kind_for_a_client
def test_a_result_that_is_nested_too_deep(app: App, kind: str) -> None:
    """The error names the endpoint and where it begins, in every role."""

    @app.share(cache=False)
    def made() -> Any:
        return DEEP_VALUES[kind]()

    with pytest.raises(CapabilityError, match=r"endpoint 'made': result[\[.].{1,80} is nested deeper"):
        made()


class EndsWhoeverLoadsIt(ValueError):
    """An exception whose unpickling ends the process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, ("unpickled",)


def test_an_exception_that_ends_whoever_rebuilds_it(client_of: Connect) -> None:
    """It is one that cannot be rebuilt, and arrives as a RemoteError with its type's name, message and traceback."""

    def fails() -> None:
        raise EndsWhoeverLoadsIt("meant for the server")

    with pytest.raises(RemoteError, match="meant for the server") as caught:
        client_of(fails).call("fails")
    assert caught.value.type_name.endswith("EndsWhoeverLoadsIt")


class EndsItsReader(torch.nn.Linear):
    """A module whose unpickling ends the process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, ("unpickled",)


def test_a_result_that_cannot_be_rebuilt_gives_its_lease_back(client_of: Connect, provider: Any) -> None:
    """Nobody has a handle that would."""

    def made() -> torch.nn.Module:
        return EndsItsReader(2, 2)

    provider.share("kept", managed=True)(made)
    client = client_of(made)
    with pytest.raises(CodecError, match="SystemExit: unpickled"):
        client.call("kept")
    assert client.get_server_info()["leases"] == 0


def test_an_argument_that_ends_whoever_rebuilds_it(client_of: Connect) -> None:
    """The server says so, and serves on."""

    def take(x: torch.nn.Module) -> None:
        pass

    client = client_of(take)
    with pytest.raises(CodecError, match="SystemExit: unpickled"):
        client.call("take", EndsItsReader(2, 2))
    client.ping()


class Interrupts(ValueError):
    """An exception during whose unpickling a signal comes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return signal.raise_signal, (signal.SIGUSR1,)


class Interrupted(BaseException):
    """What the handler raises."""


@pytest.fixture(params=[Interrupted, *deep(SystemExit, KeyboardInterrupt)])
def raised_by_handler(request: pytest.FixtureRequest) -> Iterator[type[BaseException]]:
    """What a handler of SIGUSR1 raises, of which there is one meanwhile."""

    def handler(number: int, frame: object) -> NoReturn:
        raise request.param("from the handler")

    earlier = signal.signal(signal.SIGUSR1, handler)
    yield request.param
    signal.signal(signal.SIGUSR1, earlier)


def test_a_handler_that_raises_while_an_exception_is_rebuilt(
    client_of: Connect, raised_by_handler: type[BaseException]
) -> None:
    """The handler's exception comes out: it is no part of what is rebuilt."""

    def fails() -> None:
        raise Interrupts("slow to load")

    with pytest.raises(raised_by_handler, match="from the handler"):
        client_of(fails).call("fails")


@pytest.fixture
def client_of(provider: Any, serve: Callable[..., Any], connect: Connect) -> Callable[[Callable[..., Any]], Client]:
    """Make a client of a server with one endpoint."""

    def make(function: Callable[..., Any]) -> Client:
        provider.share(cache=False)(function)
        serve()
        return connect()

    return make
