"""Role, base path and socket path, from arguments and environment."""

from __future__ import annotations

import itertools
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from shared_rpc import PoolOptions, Provider
from shared_rpc.errors import ConfigurationError
from shared_rpc.protocol.options import ServeOptions
from shared_rpc.provider.app import override
from shared_rpc.settings import Role, is_socket_of, resolve_base_path, resolve_role, server_environment, socket_path

TRUE = ["1", "true", "yes", "on", "TRUE", " On "]
FALSE = ["0", "false", "no", "off", "False", " OFF "]
UNSET: list[str | None] = [None, "", "  "]
NAMED: list[Role] = ["server", "client", "local", "spawn"]


def environ(enabled: str | None = None, role: str | None = None, **others: str) -> dict[str, str]:
    """Set the environment; None removes a variable."""
    chosen = {"SHARED_TENSOR_ENABLED": enabled, "SHARED_TENSOR_ROLE": role, **others}
    return {name: value for name, value in chosen.items() if value is not None}


@pytest.mark.parametrize("mode", ["auto", *NAMED])
@pytest.mark.parametrize("enabled", [None, True, False])
def test_the_role_is_decided_by_the_first_setting_that_names_one(enabled: bool | None, mode: str) -> None:
    """``enabled=False``, a given mode, a switch that is off, a named role, a switch that is on; by default local."""
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


@pytest.mark.parametrize(
    ("switch", "role", "mode", "message"),
    [
        ("tru", "server", "auto", "SHARED_TENSOR_ENABLED='tru': use one of 1, true, yes, on, 0, false, no, off"),
        (None, "sever", "auto", "SHARED_TENSOR_ROLE='sever': use 'server', 'client', 'local' or 'spawn'"),
        ("1", "auto", "auto", "SHARED_TENSOR_ROLE='auto': use 'server', 'client', 'local' or 'spawn'"),
        (None, None, "broker", "execution_mode='broker': use 'auto', 'local', 'server', 'client' or 'spawn'"),
    ],
)
def test_invalid_roles_are_refused(switch: str | None, role: str | None, mode: str, message: str) -> None:
    """With the value and the allowed ones."""
    with pytest.raises(ConfigurationError, match=message):
        resolve_role(None, mode, environ(switch, role))


def test_the_base_path_has_fallbacks(tmp_path: Path) -> None:
    """The argument, the variable, the runtime directory, and last a directory in /tmp."""
    everything = {"SHARED_TENSOR_BASE_PATH": "/variable/s", "XDG_RUNTIME_DIR": str(tmp_path)}
    only_runtime = {"SHARED_TENSOR_BASE_PATH": "", "XDG_RUNTIME_DIR": str(tmp_path)}
    assert resolve_base_path("/argument/s", everything) == "/argument/s"
    assert resolve_base_path(Path("/argument/s"), everything) == "/argument/s"
    assert resolve_base_path(None, everything) == "/variable/s"
    assert resolve_base_path("", everything) == "/variable/s"
    assert resolve_base_path(None, only_runtime) == f"{tmp_path}/shared-tensor"
    for neither in ({}, {"XDG_RUNTIME_DIR": str(tmp_path / "gone")}):  # as under sudo and in containers
        assert resolve_base_path(None, neither) == f"/tmp/shared-tensor-{os.geteuid()}/shared-tensor"


def test_the_base_path_is_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A server and a client started in different directories find the same socket by ``~``."""
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.chdir(tmp_path)
    assert resolve_base_path("~/run/s", {}) == "/home/ada/run/s"
    assert resolve_base_path(None, {"SHARED_TENSOR_BASE_PATH": "~/s"}) == "/home/ada/s"
    assert resolve_base_path("s", {}) == f"{tmp_path}/s"


@pytest.mark.parametrize("directory", ["/run/models", "/run/modèles"], ids=["ascii", "two bytes"])
def test_excessive_paths_are_refused(directory: str) -> None:
    """Linux allows 107 bytes, not characters: the message has path, length, limit and the remedy."""
    longest = directory + "x" * (107 - len(os.fsencode(f"{directory}-cpu.sock")))
    assert socket_path(longest, "cpu") == f"{longest}-cpu.sock"
    with pytest.raises(ConfigurationError) as caught:
        socket_path(longest + "x", "cpu")
    for part in (f"{longest}x-cpu.sock", "has 108 bytes", "Linux allows 107", "base_path", "SHARED_TENSOR_BASE_PATH"):
        assert part in str(caught.value)


def test_the_environment_of_a_started_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server role, whatever the process's own; this process's module path; and unbuffered output."""
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
    """Copies of packages in setuptools come last here, and would precede installed packages there."""
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
        ("/run/a/s-other.sock", False),
        ("/run/a/ss-cpu.sock", False),
    ],
)
def test_sockets_of_a_base_path_are_recognised(path: str, expected: bool) -> None:
    """And not those of a longer base path."""
    assert is_socket_of("/run/a/s", path) is expected


def test_options_are_encoded_as_one_argument() -> None:
    """Only changes of the defaults, as JSON; invalid text is an error that quotes it."""
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


def test_serve_overrides_the_device(tmp_path: Path) -> None:
    """Even after the app has used the id of its own."""
    provider = Provider(tmp_path / "s", device="cpu")
    assert (provider.device_id, provider.mechanism_info["name"]) == ("cpu", "memfd")
    override(provider, ServeOptions(devices=("GPU-00000000-0000-0000-0000-000000000000",)), 0)
    assert provider.device_id == "GPU-00000000-0000-0000-0000-000000000000"
    assert "mechanism_info" not in vars(provider)


def test_a_provider_that_is_pickled_keeps_its_options() -> None:
    """Except its role, which belongs to each process."""
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
