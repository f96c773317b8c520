"""Operations as methods: the attributes, signatures and docs of a bound class."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

import pytest

from shared_rpc import AsyncClient, Client, Provider
from shared_rpc.client.steps import BlockingMethods, Operation, Work, drive
from shared_rpc.operations import Operations
from shared_rpc.operations.binding import Context, Leased, Steps, bound, operation
from shared_rpc.operations.handles import lending

T = TypeVar("T")

#: Of every public operation its name and its one definition.
DEFINED = {
    name: found.body
    for name in dir(Operations)
    if isinstance(found := inspect.getattr_static(Operations, name), operation | lending)
}


class Recorder(BlockingMethods):
    """A driver that records operations, without a server."""

    def _run(self, operation: Operation[T]) -> T:
        return drive(operation, lambda step: step.function())


class Sums:
    """Two operations."""

    @operation
    def add(ctx: Context, one: int, /, other: int = 1, **more: int) -> Steps[int]:
        """Add numbers."""
        return int((yield Work(lambda: one + other + sum(more.values()))))

    @lending
    def lend(ctx: Context, name: str) -> Steps[Leased[bytes]]:
        """Lend a named value."""
        yield Work(name.encode)
        return Leased()


@bound
class Calculator(Recorder, Sums):
    """A class bound to them."""


@pytest.mark.parametrize("kind", [Client, AsyncClient, Provider])
def test_a_class_has_every_operation(kind: type) -> None:
    """As a method with the parameters and the docstring of its definition; a coroutine only in the client for coroutines."""
    for name, body in DEFINED.items():
        if kind is Provider and name == "list_endpoints":
            continue  # those of this process, independent of a server
        method = getattr(kind, name)
        assert inspect.iscoroutinefunction(method) == (kind is AsyncClient), name
        shown, defined = inspect.signature(method), inspect.signature(body)
        assert list(shown.parameters) == ["self", *list(defined.parameters)[1:]]
        assert [each.default for each in shown.parameters.values()] == [each.default for each in defined.parameters.values()]
        assert (method.__doc__, method.__name__, method.__qualname__) == (body.__doc__, name, f"{kind.__name__}.{name}")


@pytest.mark.parametrize(("kind", "handle"), [(Client, "Handle"), (AsyncClient, "AsyncHandle"), (Provider, "Handle")])
def test_annotations_name_the_class_of_handles(kind: Any, handle: str) -> None:
    """A signature has the class's own handle for arguments and results, and not the steps of an operation."""
    assert inspect.signature(kind.create_buffer).return_annotation == f"{handle}[torch.Tensor]"
    assert inspect.signature(kind.latest).parameters["handle"].annotation == f"{handle}[T]"
    assert inspect.signature(kind.list_tasks).return_annotation == "list[TaskInfo]"
    assert kind.list_tasks.__annotations__ == {"status": "str | None", "return": "list[TaskInfo]"}


def test_operations_are_driven_with_their_arguments() -> None:
    """Positional, by name and variadic; a mismatch is a TypeError that names the operation."""
    assert Calculator().add(2) == 3
    assert Calculator().add(2, other=5, self=1, ctx=1) == 9
    with pytest.raises(TypeError, match=r"add\(\) missing 1 required positional argument"):
        Calculator().add()


def test_own_methods_of_a_class_are_not_replaced() -> None:
    """Of the class or of a subclass; the others are bound."""

    @bound
    class Own(Recorder, Sums):
        def add(self, one: int, /, other: int = 1, **more: int) -> int:
            return 0

    class Further(Calculator):
        def add(self, one: int, /, other: int = 1, **more: int) -> int:
            return super().add(one, other, **more) * 10

    assert (Own().add(2), Further().add(2)) == (0, 30)
    assert isinstance(Own().lend("a"), Leased)
