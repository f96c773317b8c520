"""Role, base path and socket path, from arguments and environment."""

from __future__ import annotations

import itertools
import os
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shared_rpc import PoolOptions, Provider
from shared_rpc.errors import ConfigurationError
from shared_rpc.provider import provider as provider_module
from shared_rpc.provider.app import override
from shared_rpc.settings import (
    Role,
    ServeOptions,
    is_socket_of,
    resolve_base_path,
    resolve_role,
    server_environment,
    socket_path,
)

TRUE = ["1", "true", "yes", "on", "TRUE", " On "]
FALSE = ["0", "false", "no", "off", "False", " OFF "]
UNSET: list[str | None] = [None, "", "  "]
NAMED: list[Role] = ["server", "client", "local", "spawn"]


def environ(enabled: str | None = None, role: str | None = None, **others: str) -> dict[str, str]:
    """An environment; None leaves a variable out."""
    chosen = {"SHARED_TENSOR_ENABLED": enabled, "SHARED_TENSOR_ROLE": role, **others}
    return {name: value for name, value in chosen.items() if value is not None}


@pytest.mark.parametrize("mode", ["auto", *NAMED])
@pytest.mark.parametrize("enabled", [None, True, False])
def test_the_role_is_decided_by_the_first_setting_that_names_one(enabled: bool | None, mode: str) -> None:
    """``enabled=False``, a named mode, a switch that is off, a named role, a switch that is on; nothing set is local."""
    for switch, role in itertools.product([*UNSET, *TRUE, *FALSE], [*UNSET, *NAMED]):
        named = (role or "").strip()
        if enabled is False:
            expected = "local"
        elif mode != "auto":
            expected = mode
        elif enabled is None and switch in FALSE:
            expected = "local"
        else:
            expected = named or ("client" if enabled or switch in TRUE else "local")
        for spelled in (role, role and f" {role.upper()} "):
            assert resolve_role(enabled, mode, environ(switch, spelled)) == expected, (switch, spelled)


def test_a_switch_that_is_not_needed_is_not_read() -> None:
    """Also where its value is none that is allowed."""
    assert resolve_role(True, "auto", environ("maybe", "server")) == "server"


@pytest.mark.parametrize("value", ["2", "tru"])
def test_a_bad_switch_is_named(value: str) -> None:
    """With its value and those that are allowed."""
    with pytest.raises(ConfigurationError) as caught:
        resolve_role(environ=environ(value, "server"))
    assert f"SHARED_TENSOR_ENABLED={value!r}" in str(caught.value)
    assert "1, true, yes, on, 0, false, no, off" in str(caught.value)


@pytest.mark.parametrize("enabled", [None, "1"])
@pytest.mark.parametrize("value", ["sever", "auto"])
def test_a_bad_role_is_named(enabled: str | None, value: str) -> None:
    """With its value and those that are allowed."""
    with pytest.raises(ConfigurationError) as caught:
        resolve_role(environ=environ(enabled, value))
    assert f"SHARED_TENSOR_ROLE={value!r}" in str(caught.value)
    assert "'server', 'client', 'local' or 'spawn'" in str(caught.value)


def test_a_bad_execution_mode_is_named() -> None:
    """With the modes that are allowed."""
    with pytest.raises(ConfigurationError, match="execution_mode='broker': use 'auto', 'local', 'server', 'client' or 'spawn'"):
        resolve_role(execution_mode="broker", environ={})


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is read when the role is resolved, not when the module is imported."""
    monkeypatch.setenv("SHARED_TENSOR_ENABLED", "1")
    monkeypatch.setenv("SHARED_TENSOR_ROLE", "server")
    monkeypatch.setenv("SHARED_TENSOR_BASE_PATH", str(tmp_path / "s"))
    assert resolve_role() == "server"
    assert resolve_base_path() == str(tmp_path / "s")


def test_the_base_path_is_the_first_that_is_there(tmp_path: Path) -> None:
    """The argument, the variable, the runtime directory, and last a directory in /tmp."""
    everything = {"SHARED_TENSOR_BASE_PATH": "/variable/s", "XDG_RUNTIME_DIR": str(tmp_path)}
    only_runtime = {"SHARED_TENSOR_BASE_PATH": "", "XDG_RUNTIME_DIR": str(tmp_path)}
    assert resolve_base_path("/argument/s", everything) == "/argument/s"
    assert resolve_base_path(Path("/argument/s"), everything) == "/argument/s"
    assert resolve_base_path(None, everything) == "/variable/s"
    assert resolve_base_path("", everything) == "/variable/s"
    assert resolve_base_path(None, only_runtime) == f"{tmp_path}/shared-tensor"
    assert resolve_base_path(None, {}) == f"/tmp/shared-tensor-{os.geteuid()}/shared-tensor"


def test_a_runtime_directory_that_is_not_there_is_passed_over(tmp_path: Path) -> None:
    """Under sudo and in containers the variable often points nowhere."""
    gone = {"XDG_RUNTIME_DIR": str(tmp_path / "gone")}
    assert resolve_base_path(None, gone) == f"/tmp/shared-tensor-{os.geteuid()}/shared-tensor"


def test_the_base_path_is_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A server and a client that start in different directories mean the same socket by ``~``."""
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.chdir(tmp_path)
    assert resolve_base_path("~/run/s", {}) == "/home/ada/run/s"
    assert resolve_base_path(None, {"SHARED_TENSOR_BASE_PATH": "~/s"}) == "/home/ada/s"
    assert resolve_base_path("s", {}) == f"{tmp_path}/s"


def test_the_socket_carries_the_tag() -> None:
    """One base path serves several devices."""
    assert socket_path("/run/app/shared-tensor", "cpu") == "/run/app/shared-tensor-cpu.sock"
    assert socket_path("/run/app/shared-tensor", "8f3a01bc") == "/run/app/shared-tensor-8f3a01bc.sock"


@pytest.mark.parametrize("directory", ["/run/models", "/run/modèles"], ids=["ascii", "two bytes"])
def test_a_path_longer_than_an_address_is_refused(directory: str) -> None:
    """Linux takes 107 bytes, not characters: the message tells path, length, limit and what to set."""
    longest = directory + "x" * (107 - len(os.fsencode(f"{directory}-cpu.sock")))
    assert socket_path(longest, "cpu") == f"{longest}-cpu.sock"
    with pytest.raises(ConfigurationError) as caught:
        socket_path(longest + "x", "cpu")
    for told in (f"{longest}x-cpu.sock", "has 108 bytes", "Linux allows 107", "base_path", "SHARED_TENSOR_BASE_PATH"):
        assert told in str(caught.value)


def test_the_environment_of_a_server_that_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server role, whatever the process's own is; what this process can import; and prints that are in the log at once."""
    monkeypatch.setattr(sys, "path", ["/srv/app", "beside", *sys.path])
    mine = {"SHARED_TENSOR_ENABLED": "1", "SHARED_TENSOR_ROLE": "spawn", "PYTHONPATH": "/elsewhere", "HOME": "/home/ada"}
    found = server_environment(mine)
    for own in ("/srv/app", os.path.abspath("beside")):
        assert own in found["PYTHONPATH"].split(os.pathsep)
    assert not {os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(pytest.__file__))} & {
        *found["PYTHONPATH"].split(os.pathsep)
    }
    assert {name: value for name, value in found.items() if name != "PYTHONPATH"} == {
        "SHARED_TENSOR_ROLE": "server",
        "HOME": "/home/ada",
        "PYTHONUNBUFFERED": "1",
    }


def test_a_server_has_no_folder_of_an_installed_package_on_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of packages that setuptools brings are behind what is installed here, and would be before it there."""
    packages = os.path.dirname(os.path.dirname(pytest.__file__))
    monkeypatch.setattr(sys, "path", [*sys.path, f"{packages}/setuptools/_vendor", f"{packages}-of-mine"])
    found = server_environment({})["PYTHONPATH"].split(os.pathsep)
    assert f"{packages}/setuptools/_vendor" not in found
    assert f"{packages}-of-mine" in found


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/run/a/s-cpu.sock", True),
        ("/run/a/s-0f1e2d3c.sock", True),
        ("/run/a/s-2-cpu.sock", False),
        ("/run/a/s-0f1e2d3c-cpu.sock", False),
        ("/run/a/s-cpu.sock.lock", False),
        ("/run/a/s-other.sock", False),
        ("/run/a/scpu.sock", False),
        ("/run/a/ss-cpu.sock", False),
    ],
)
def test_sockets_of_a_base_path(path: str, expected: bool) -> None:
    """A base path's own sockets, and not those of one that begins with it."""
    assert is_socket_of("/run/a/s", path) is expected


def test_options_travel_as_one_word() -> None:
    """What is not the default, as JSON; what is none is an error that quotes it."""
    options = ServeOptions(devices=("cuda:0", "cpu"), preload=False, quotas={"cpu": 0.5}, hooks=("a:b",), log_level="info")
    flag, text = options.words
    assert (flag, ServeOptions.of(text)) == ("--options", options)
    assert ServeOptions().words == ["--options", "{}"]
    for amount in (0.5, 1.0, 1 << 40):
        travelled = ServeOptions.of(ServeOptions(when_full="evict", host_quota=amount).words[1])
        assert (travelled.host_quota, type(travelled.host_quota)) == (amount, type(amount))
    assert [options.device_of(number) for number in range(3)] == ["cuda:0", "cpu", "cuda:0"]
    for wrong in ('{"when_full": "wait"}', "", '{"workers": "two"}', '{"worker": 2}'):
        with pytest.raises(ConfigurationError, match="--options"):
            ServeOptions.of(wrong)


# Options of a provider.


def test_a_device_that_serve_overrides(tmp_path: Path) -> None:
    """It counts although the app has asked for the id of its own."""
    provider = Provider(tmp_path / "s", device="cpu")
    assert (provider.device_id, provider.mechanism_info["name"]) == ("cpu", "memfd")
    override(provider, ServeOptions(devices=("GPU-00000000-0000-0000-0000-000000000000",)), 0)
    assert provider.device_id == "GPU-00000000-0000-0000-0000-000000000000"
    assert "mechanism_info" not in vars(provider)


def test_a_mechanism_is_chosen_for_the_device_that_serve_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not before, for the device of the app."""
    chosen: list[str] = []

    class Host:
        """Serves the provider on another device."""

        def adopt(self, provider: Provider) -> Any:
            """Override the device."""
            provider.device = "GPU-b"
            return choose("ipc", provider.device_id)

    def choose(asked: str, device: str) -> Any:
        chosen.append(device)
        return SimpleNamespace(close=list)

    monkeypatch.setattr(provider_module, "host", Host)
    monkeypatch.setattr(provider_module, "choose_mechanism", choose)
    provider = Provider(execution_mode="server", device="GPU-a", mechanism="ipc")
    provider._runtime()
    provider.close()
    assert chosen == ["GPU-b"]


def test_a_provider_that_is_pickled_keeps_its_options() -> None:
    """All but its role, which each process has of its own."""
    options: dict[str, Any] = {
        "device": "cpu",
        "mechanism": "auto",
        "timeout": 1.0,
        "server_startup_timeout": 2.0,
        "idle_exit": 3.0,
        "preload": False,
        "pool": PoolOptions(initial=4096, limit=8192),
    }
    copy = pickle.loads(pickle.dumps(Provider("base", cluster="c", **options)))
    assert {name: getattr(copy, name) for name in options} == options
    assert (copy.base_path, copy.asked_cluster) == ("base", "c")
