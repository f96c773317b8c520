"""Options of the load format, and the place where engines meet."""

from __future__ import annotations

import pytest

from shared_rpc.errors import ConfigurationError
from shared_rpc_vllm.options import LoaderOptions, base_path


def test_without_options_there_are_defaults() -> None:
    """No option has to be given."""
    assert LoaderOptions.of({}) == LoaderOptions(base_path=None, fallback=False, load_format="auto")


def test_options_are_read() -> None:
    """Each by its name."""
    values = {"base_path": "/run/weights", "fallback": True, "load_format": "safetensors"}
    assert LoaderOptions.of(values)._asdict() == values


def test_an_unknown_option_is_refused_by_name() -> None:
    """With those that there are."""
    with pytest.raises(
        ConfigurationError, match=r"has 'basepath': with --load-format shared_rpc there are 'base_path', 'fallb"
    ):
        LoaderOptions.of({"basepath": "/run/weights"})


@pytest.mark.parametrize(("name", "value"), [("base_path", 1), ("fallback", "yes"), ("load_format", None)])
def test_a_value_of_another_type_is_refused_by_name(name: str, value: object) -> None:
    """A text for a switch would count as true."""
    with pytest.raises(ConfigurationError, match=rf"{name} is {value!r}, and must be a (str|bool)"):
        LoaderOptions.of({name: value})


def test_the_server_cannot_load_by_attaching() -> None:
    """It would ask itself."""
    with pytest.raises(ConfigurationError, match="load_format is 'shared_rpc'"):
        LoaderOptions.of({"load_format": "shared_rpc"})


def test_engines_meet_beside_the_users_own_servers() -> None:
    """One that serves another app has no endpoint for them."""
    assert base_path({"XDG_RUNTIME_DIR": "/"}) == "/shared-tensor-vllm"


def test_a_base_path_from_the_environment_is_taken_as_it_is() -> None:
    """Whoever sets one knows who else uses it."""
    assert base_path({"SHARED_TENSOR_BASE_PATH": "/run/weights"}) == "/run/weights"
