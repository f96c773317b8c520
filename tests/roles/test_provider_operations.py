"""What a provider can ask by name, in every role alike: of runs, objects, leases and the server."""

from __future__ import annotations

import os

import pytest
import torch

from shared_rpc.errors import CapabilityError, ConfigurationError, StaleHandleError
from tests.kit.apps import App
from tests.kit.processes import eventually


def test_the_server_is_asked(app: App) -> None:
    """What it is and has, wherever it runs; in the local role it has no socket."""
    provider = app.provider
    app.share("ones")(lambda: torch.ones(1))
    info = provider.get_server_info()
    assert (info["pid"], info["endpoints"], info["device"]) == (os.getpid(), ["ones"], "cpu")
    assert (info["socket_path"] is None) == (app.role == "local")
    assert provider.ping() >= 0
    assert [session["pid"] for session in provider.list_sessions()] == [os.getpid()] * (app.role == "client")


def test_objects_are_listed_and_invalidated(app: App) -> None:
    """With those who hold them; one that was invalidated is listed while somebody does."""
    app.share("kept", managed=True)(lambda: torch.ones(3))
    handle = app.provider.call("kept")
    (listed,) = app.provider.list_objects()
    assert (listed["object_id"], listed["cached"]) == (handle.object_id, True)
    assert [holder["pid"] for holder in listed["holders"]] == [os.getpid()]
    for told in (app.provider.get_object_info(handle), app.provider.get_object_info(handle.object_id)):
        assert (told["object_id"], told["nbytes"], told["leases"]) == (handle.object_id, 12, 1)
    assert app.provider.invalidate_object(handle.object_id) == 1
    assert not handle.is_current()
    handle.release()
    eventually(lambda: app.provider.list_objects() == [])


def test_leases_are_given_back(app: App) -> None:
    """By handle or by id, one or several in one request: how many were held."""
    app.share("kept", managed=True)(lambda n: torch.zeros(n) + 1)
    one, two, three = (app.provider.call("kept", n) for n in (1, 2, 2))
    app.provider.ensure_handle_live(one)
    assert app.provider.release(one) is True
    assert app.provider.release(one) is False
    assert app.provider.release_many([two, three.object_id, three.object_id]) == 2
    with pytest.raises(StaleHandleError):
        app.provider.ensure_handle_live(one)
    assert app.provider.get_server_info()["leases"] == 0


def test_a_part_of_a_process_is_neither_reloaded_nor_stopped(app: App) -> None:
    """A server in a script has no workers, and its process may do more; nobody serves in the local role."""
    app.share("ones")(lambda: torch.ones(1))
    with pytest.raises(ConfigurationError, match="whose code cannot be reloaded"):
        app.provider.reload()
    with pytest.raises((ConfigurationError, CapabilityError)) as refused:
        app.provider.stop_server()
    if app.role == "local":
        kind, words = CapabilityError, "this process plays the local role: there is no server to be stopped"
    else:
        kind, words = ConfigurationError, f"this server is part of process {os.getpid()}, which may do more than serve"
    assert type(refused.value) is kind
    assert str(refused.value).startswith(words)
