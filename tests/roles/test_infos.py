"""Replies that are dicts: what servers answer has the keys of the types that describe it, no more and no fewer."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

import msgspec
import torch

from shared_rpc.protocol import infos
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.catalogue import decode_message
from shared_rpc.protocol.specs import EndpointSpec
from tests.kit.apps import App
from tests.kit.brokers import BrokerApp, begun
from tests.kit.processes import eventually
from tests.kit.raw import Raw


def misfits(value: Any, kind: Any, place: str = "") -> list[str]:
    """Where a value is not of a type, by keys from the outermost one on."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return []
    if is_typeddict(kind):
        if not isinstance(value, dict):
            return [f"{place} is no dict: {value!r}"]
        missing, unknown = kind.__required_keys__ - value.keys(), value.keys() - kind.__annotations__.keys()
        wrong = [f"{place} has no {key}" for key in sorted(missing)] + [f"{place} has {key}" for key in sorted(unknown)]
        hints = get_type_hints(kind)
        return wrong + [text for key in value.keys() & hints for text in misfits(value[key], hints[key], f"{place}.{key}")]
    if origin is list:
        return [text for item in value for text in misfits(item, arguments[0], f"{place}[]")]
    if origin is dict:
        return [text for key, item in value.items() for text in misfits(item, arguments[1], f"{place}[{key}]")]
    if origin in (Union, types.UnionType):
        return [] if any(not misfits(value, each) for each in arguments) else [f"{place} is {value!r}, not {kind}"]
    if origin is Literal:
        return [] if value in arguments else [f"{place} is {value!r}, not {kind}"]
    return [] if isinstance(value, (int, float) if kind is float else kind) else [f"{place} is {value!r}, not {kind}"]


def reply_to(path: str, request: m.Message) -> list[str]:
    """Misfits of the answer to a request, as it is written on the wire: reading it as a message drops what is unknown."""
    with Raw(path) as raw:
        raw.say(request)
        frame = raw.hear_frame()
    value = msgspec.msgpack.decode(frame.body)[0]
    assert value, "there is nothing to look at"
    if isinstance(request, m.Query):
        assert isinstance(decode_message(frame), m.Answer)
        return misfits(value, get_args(type(request).__orig_bases__[0])[0], type(request).__name__)
    assert isinstance(decode_message(frame), m.ObjectsReply)  # a page has its end too
    return misfits(value, list[infos.ListedObjectInfo], "ObjectsReply")


def test_a_broker_answers_with_all_keys_and_no_others(broker_app: BrokerApp, tmp_path: Path) -> None:
    """Each of its replies, with workers, a zygote, a holder, a buffer, a run, and its end."""
    broker_app.write()
    broker_app.start()
    client = broker_app.connect()
    path, gate = client.socket_path, tmp_path / "gate"
    handle, buffer = client.call("held"), client.create_buffer(16, ttl=600)
    client.refresh("held")
    client.submit("slow", str(gate))
    eventually(begun(gate))
    eventually(lambda: client.get_server_info().get("zygote", {})["state"] == "ready", 40.0)

    wrong = [
        *reply_to(path, m.GetServerInfo()),
        *reply_to(path, m.GetObjectInfo(handle.object_id)),
        *reply_to(path, m.GetObjectInfo(buffer.object_id)),
        *reply_to(path, m.ListHolders(handle.object_id)),
        *reply_to(path, m.ListObjects()),
        *reply_to(path, m.ListDevices()),
        *reply_to(path, m.ListSessions()),
        *reply_to(path, m.ListRuns()),
        *reply_to(path, m.GetStatistics()),
        *reply_to(path, m.Reload()),
    ]
    gate.touch()
    wrong += reply_to(path, m.StopServer())
    assert wrong == []


def test_a_provider_answers_with_all_keys_and_no_others(app: App) -> None:
    """In every role, in two of which nothing is written on a wire."""

    @app.share(managed=True)
    def load(size: int = 4) -> torch.Tensor:
        return torch.zeros(size)

    provider, handle = app.provider, load()
    buffer = provider.create_buffer(16)
    found = [
        (provider.get_server_info(), infos.ServerInfo),
        (provider.get_runtime_info(), infos.RuntimeInfo),
        (provider.list_endpoints(), dict[str, infos.EndpointInfo]),
        (provider.get_endpoint("load"), infos.EndpointInfo),
        (provider.get_object_info(handle), infos.ObjectInfo),
        (buffer.get_object_info(), infos.ObjectInfo),
        (provider.list_objects(), list[infos.ListedObjectInfo]),
        (provider.list_devices(), list[infos.DeviceInfo]),
        (provider.list_sessions(), list[infos.SessionInfo]),
        (provider.get_statistics(), dict[str, infos.EndpointStatistics]),
    ]
    assert [text for value, kind in found for text in misfits(value, kind)] == []


def test_an_endpoint_is_told_with_the_fields_of_its_specification() -> None:
    """It is one, in plain values."""
    assert tuple(infos.EndpointInfo.__annotations__) == EndpointSpec.__struct_fields__
