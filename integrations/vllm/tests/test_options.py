"""Options of the load format, the base path of engines, and the commit of a request."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared_rpc.errors import ConfigurationError
from shared_rpc_vllm.options import LoaderOptions, base_path
from shared_rpc_vllm.request import commit_of


def test_options_have_defaults() -> None:
    """No option is required."""
    assert LoaderOptions.of({}) == LoaderOptions(base_path=None, fallback=False, load_format="auto")


def test_options_are_read() -> None:
    """By name."""
    values = {"base_path": "/run/weights", "fallback": True, "load_format": "safetensors"}
    assert LoaderOptions.of(values)._asdict() == values


def test_an_unknown_option_is_refused_by_name() -> None:
    """With the existing ones."""
    with pytest.raises(
        ConfigurationError, match=r"has 'basepath': with --load-format shared_rpc there are 'base_path', 'fallb"
    ):
        LoaderOptions.of({"basepath": "/run/weights"})


@pytest.mark.parametrize(("name", "value"), [("base_path", 1), ("fallback", "yes"), ("load_format", None)])
def test_a_value_of_another_type_is_refused_by_name(name: str, value: object) -> None:
    """A string for a switch would be true."""
    with pytest.raises(ConfigurationError, match=rf"{name} is {value!r}, and must be a (str|bool)"):
        LoaderOptions.of({name: value})


def test_the_server_cannot_load_by_attaching() -> None:
    """It would call itself."""
    with pytest.raises(ConfigurationError, match="load_format is 'shared_rpc'"):
        LoaderOptions.of({"load_format": "shared_rpc"})


def test_engines_use_another_base_path_than_the_users_servers() -> None:
    """A server of another app has no endpoint for them."""
    assert base_path({"XDG_RUNTIME_DIR": "/"}) == "/shared-tensor-vllm"


def test_a_base_path_from_the_environment_is_unchanged() -> None:
    """It is an explicit choice of the user."""
    assert base_path({"SHARED_TENSOR_BASE_PATH": "/run/weights"}) == "/run/weights"


def test_a_revision_is_resolved_to_the_cached_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`main` may be another commit later."""
    hub = pytest.importorskip("huggingface_hub")
    cache = tmp_path / "models--org--model"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("abc")
    (cache / "snapshots" / "abc").mkdir(parents=True)
    (cache / "snapshots" / "abc" / "config.json").write_text("{}")
    found = hub.try_to_load_from_cache
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *args, **kwargs: found(*args, cache_dir=tmp_path, **kwargs))
    assert commit_of("org/model", None) == "abc"
    assert commit_of("org/other", "v1") == "v1"
    assert commit_of(str(tmp_path), None) is None
