"""Memory that is no tensor's: arrays exist once for all clients, until one of them writes; what clients copy is told."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from shared_rpc import Provider
from shared_rpc.errors import CapabilityError
from tests.kit.apps import App, Connect, Serve
from tests.kit.interpreter import Interpreter
from tests.kit.models import State

#: Bytes that are not pickled.
LARGE = 1 << 18


def beside_a_tensor(device: str, *arrays: Any) -> State:
    """An object with arrays, and a tensor that makes it a result."""
    return State(1, {"tensor": torch.ones(3, device=device), "arrays": list(arrays)})


def arrays_of(value: Any) -> Any:
    """The arrays of such an object."""
    return value.moments["arrays"]


# Other processes.


@pytest.fixture
def provider(base_path: str, device: str) -> Provider:
    """A provider on each kind of device."""
    return Provider(base_path, device=device)


#: What the kernel says of the array's memory in the process: pages that nobody else has.
OWN_PAGES = """
def own_pages(array):
    address = array.__array_interface__["data"][0]
    inside = False
    for line in open("/proc/self/smaps"):
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "Anonymous:":
            return int(line.split()[1]) // 4
"""


@pytest.mark.parametrize("managed", [False, True], ids=["plain", "managed"])
def test_pages_exist_once_until_they_are_written_to(
    device: str, base_path: str, provider: Provider, serve: Serve, interpreters: list[Interpreter], managed: bool
) -> None:
    """Who reads an array takes no memory for it; who writes to it takes a page, which nobody else sees."""
    value = beside_a_tensor(device, numpy.arange(LARGE))
    provider.share("get", managed=managed)(lambda: value)
    serve()
    names = {"base_path": base_path, "device": device}
    read = """
        kept["of"] = client.call("get")
        kept["array"] = array = getattr(kept["of"], "value", kept["of"]).moments["arrays"][0]
        answer = [int(array.sum()), kept["own_pages"](array)]
        """
    for process in interpreters:
        process.run(f"{OWN_PAGES}\nkept['own_pages'] = own_pages")
        assert process.run(read, **names) == [int(numpy.arange(LARGE).sum()), 0]
    one, other = interpreters
    assert one.run("kept['array'][0] = 7\nanswer = [int(kept['array'][0]), kept['own_pages'](kept['array'])]") == [7, 1]
    assert other.run("answer = [int(kept['array'][0]), kept['own_pages'](kept['array'])]") == [0, 0]
    assert arrays_of(value)[0][0] == 0
    for process in interpreters:
        process.run("kept.clear()")


def test_an_array_of_an_object_as_an_argument(
    device: str, base_path: str, provider: Provider, serve: Serve, interpreters: list[Interpreter]
) -> None:
    """What a client has written to its copy is what it sends: the memory that others have of it is not named instead."""
    provider.share("get")(lambda: beside_a_tensor(device, numpy.zeros(LARGE)))
    provider.share("first", cache=False)(lambda x: x[:1].clone())
    serve()
    seen = interpreters[0].run(
        """
        array = client.call("get").moments["arrays"][0]
        array[0] = 5
        answer = client.call("first", torch.from_numpy(array).to(device)).tolist()
        """,
        base_path=base_path,
        device=device,
    )
    assert seen == [5]


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_a_read_only_array_as_an_argument(app: App) -> None:
    """It is copied, whoever keeps the memory that it lies in."""
    app.share("get", access="read")(lambda: beside_a_tensor("cpu", numpy.ones(LARGE)))
    total = app.share("total", cache=False)(lambda x: x.sum())
    array = arrays_of(app.provider.call("get"))[0]
    assert total(torch.from_numpy(array)).item() == LARGE


def test_arrays_in_every_role(every_app: list[App]) -> None:
    """Cached and not, the array is there, and counts in every role."""
    sizes = set()
    for app in every_app:

        def make() -> State:
            return beside_a_tensor("cpu", numpy.arange(LARGE))

        fresh, held = app.share("fresh", cache=False)(make), app.share("held", managed=True)(make)
        assert arrays_of(fresh())[0].sum() == arrays_of(fresh())[0].sum() == numpy.arange(LARGE).sum()
        with held() as handle:
            sizes.add(handle.get_object_info()["nbytes"])
    assert sizes == {LARGE * 8 + 12}


def test_a_quota_counts_arrays(provider: Provider, serve: Serve, connect: Connect, device: str) -> None:
    """Memory of arrays is host memory, whatever the server's device is."""
    provider.share("get")(lambda: beside_a_tensor(device, numpy.arange(LARGE)))
    serve(quotas={"cpu": 1 << 20})
    with pytest.raises(CapabilityError, match="are more than"):
        connect(device=device).call("get")
