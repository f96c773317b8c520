"""Options of the load format, given by ``--model-loader-extra-config``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from shared_rpc.errors import ConfigurationError
from shared_rpc.settings import resolve_base_path
from shared_rpc_vllm import LOAD_FORMAT


class LoaderOptions(NamedTuple):
    """Options of one engine's loader.

    :param base_path: prefix of the server's socket path; by default :func:`base_path`.
    :param fallback: whether weights that cannot be shared are loaded privately, with a warning.
    :param load_format: vLLM's load format in the server.
    """

    base_path: str | None = None
    fallback: bool = False
    load_format: str = "auto"

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> LoaderOptions:
        """Read the options of ``--model-loader-extra-config``.

        :raises ConfigurationError: for an unknown option, or a value of the wrong type.
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
            raise ConfigurationError(f"--model-loader-extra-config: load_format is {LOAD_FORMAT!r}, which loads nothing")
        return options


def base_path(environ: Mapping[str, str] | None = None) -> str:
    """Return the base path of engines and their server, which differs from that of the user's other servers.

    ``SHARED_TENSOR_BASE_PATH`` is used unchanged.
    """
    environ = os.environ if environ is None else environ
    found = resolve_base_path(None, environ)
    return found if environ.get("SHARED_TENSOR_BASE_PATH") else f"{found}-vllm"
