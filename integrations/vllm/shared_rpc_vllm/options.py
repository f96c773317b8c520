"""Options of the load format, as ``--model-loader-extra-config`` has them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from shared_rpc.errors import ConfigurationError
from shared_rpc.settings import resolve_base_path
from shared_rpc_vllm import LOAD_FORMAT


class LoaderOptions(NamedTuple):
    """Options of one engine's loader.

    :param base_path: the beginning of the server's socket path; by default :func:`base_path`.
    :param fallback: whether weights that cannot be shared are loaded for the engine alone, with a warning.
    :param load_format: the load format of vLLM by which the server loads.
    """

    base_path: str | None = None
    fallback: bool = False
    load_format: str = "auto"

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> LoaderOptions:
        """Read the options of ``--model-loader-extra-config``.

        :raises ConfigurationError: for an option that there is not, or a value that is of another type.
        """
        unknown = sorted(set(values) - set(cls._fields))
        if unknown:
            raise ConfigurationError(
                f"--model-loader-extra-config has {', '.join(map(repr, unknown))}: with --load-format {LOAD_FORMAT} there are "
                f"{', '.join(map(repr, cls._fields))}"
            )
        for name, value in values.items():
            kind = bool if name == "fallback" else str
            if not isinstance(value, kind):
                raise ConfigurationError(f"--model-loader-extra-config: {name} is {value!r}, and must be a {kind.__name__}")
        options = cls(**values)
        if options.load_format == LOAD_FORMAT:
            raise ConfigurationError(f"--model-loader-extra-config: load_format is {LOAD_FORMAT!r}, by which nothing is loaded")
        return options


def base_path(environ: Mapping[str, str] | None = None) -> str:
    """Return the base path of engines and their server: not that of the user's own servers, which have other apps.

    ``SHARED_TENSOR_BASE_PATH`` is taken as it is.
    """
    environ = os.environ if environ is None else environ
    found = resolve_base_path(None, environ)
    return found if environ.get("SHARED_TENSOR_BASE_PATH") else f"{found}-vllm"
