"""The load format ``shared_rpc`` of vLLM: engines attach to one copy of the weights, loaded for the first of them."""

from __future__ import annotations

import logging
from contextlib import suppress

__all__ = ["LOAD_FORMAT", "NotShareable", "__version__", "register"]

__version__ = "0.1.0"

#: The value of ``--load-format``.
LOAD_FORMAT = "shared_rpc"


class NotShareable(RuntimeError):
    """The weights cannot be shared because of a model or an option of an engine, which the message names."""


def register() -> None:
    """Register load format, sleep mode and weight transfer; vLLM calls this once in each process."""
    try:
        from vllm.model_executor.model_loader import register_model_loader

        from shared_rpc_vllm.loader import SharedRpcLoader
    except ImportError as error:  # a later vLLM, whose engines then run without this load format
        logging.getLogger("vllm").warning("there is no --load-format %s with this release of vLLM: %s", LOAD_FORMAT, error)
    else:
        register_model_loader(LOAD_FORMAT)(SharedRpcLoader)
        # ImportError: an earlier vLLM without this hook, for which the loader refuses --enable-sleep-mode. ValueError: a name
        # that is registered already.
        with suppress(ImportError, ValueError):
            from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

            SleepModeBackendFactory.register_backend(LOAD_FORMAT, "shared_rpc_vllm.sleeping", "SharedRpcSleepMode")
        with suppress(ImportError, ValueError):
            from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory

            module = "shared_rpc_vllm.weight_transfer"
            WeightTransferEngineFactory.register_engine(LOAD_FORMAT, module, "SharedRpcWeightTransfer")
            WeightTransferTrainerFactory.register_engine(LOAD_FORMAT, module, "SharedRpcTrainer")
