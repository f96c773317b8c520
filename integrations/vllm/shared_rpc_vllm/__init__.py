"""The load format ``shared_rpc`` of vLLM: engines attach to one copy of the weights, which the first of them has loaded."""

from __future__ import annotations

import logging
from contextlib import suppress

__all__ = ["LOAD_FORMAT", "__version__", "register"]

__version__ = "0.1.0"

#: The value of ``--load-format``.
LOAD_FORMAT = "shared_rpc"


def register() -> None:
    """Register load format, sleep mode and weight transfer; vLLM calls this once in each process."""
    try:
        from vllm.model_executor.model_loader import register_model_loader

        from shared_rpc_vllm.loader import SharedRpcLoader
    except ImportError as error:  # of a later vLLM, whose engines do without
        logging.getLogger("vllm").warning("there is no --load-format %s with this release of vLLM: %s", LOAD_FORMAT, error)
    else:
        register_model_loader(LOAD_FORMAT)(SharedRpcLoader)
        # An earlier vLLM has no such hook, and the loader refuses --enable-sleep-mode; a name that is known is an error.
        with suppress(ImportError, ValueError):
            from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

            SleepModeBackendFactory.register_backend(LOAD_FORMAT, "shared_rpc_vllm.sleeping", "SharedRpcSleepMode")
        with suppress(ImportError, ValueError):
            from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory

            module = "shared_rpc_vllm.weight_transfer"
            WeightTransferEngineFactory.register_engine(LOAD_FORMAT, module, "SharedRpcWeightTransfer")
            WeightTransferTrainerFactory.register_engine(LOAD_FORMAT, module, "SharedRpcTrainer")
