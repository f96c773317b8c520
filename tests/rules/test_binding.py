"""Operations as methods: the attributes, signatures and docs of a bound class."""

from __future__ import annotations

import inspect

import pytest

from shared_rpc import AsyncClient, Client, Provider
from shared_rpc.operations import Operations
from shared_rpc.operations.binding import operation
from shared_rpc.operations.handles import lending

#: Of every public operation its name and its one definition.
DEFINED = {
    name: found.body
    for name in dir(Operations)
    if isinstance(found := inspect.getattr_static(Operations, name), operation | lending)
}


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
