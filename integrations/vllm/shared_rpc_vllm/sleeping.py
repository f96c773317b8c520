"""The sleep mode of engines with shared weights: an engine that sleeps lets go of them, and has them again where they were."""

from __future__ import annotations

from typing import Any

from vllm.device_allocator.sleep_mode_backend import CuMemBackend, SleepModeBackend
from vllm.logger import init_logger
from vllm.platforms import current_platform

from shared_rpc import Handle
from shared_rpc.errors import SharedRPCError
from shared_rpc_vllm.loader import attached

_log = init_logger(f"vllm.{__name__}")


class SharedRpcSleepMode(SleepModeBackend):
    """Sleep-mode backend ``shared_rpc``, which the loader of this name chooses: weights are suspended, all else is vLLM's own.

    The weights of an engine that sleeps are not mapped, at level 2 neither: they are kept once for all engines, and nothing is
    loaded again. Their memory is free for others as soon as no engine that is awake has them. Waking maps them at the address
    that they had, so that captured graphs are good again. Key-value cache, graphs and tensors of the engine's own are with
    vLLM's allocator (``cumem``).
    """

    def __init__(self) -> None:
        super().__init__()
        # vLLM has no such allocator on a CPU.
        self._own = None if current_platform.is_cpu() else CuMemBackend()

    def suspend(self, level: int = 1) -> None:
        """Let go of the weights, and have vLLM's allocator do so with the key-value cache.

        :raises shared_rpc.errors.CapabilityError: where the weights cannot be unmapped and mapped again; nothing has changed.
        """
        active = [handle for handle in attached if not handle.suspended]
        try:
            for handle in attached:  # also of those that a lost session has suspended: their memory is mapped
                handle.suspend()
            if self._own is not None:
                # Tensors of the engine's own among the weights are in no checkpoint, so that there is no level 2 of them.
                self._own.suspend(1)
        except BaseException:
            for handle in active:
                handle.resume()
            raise
        self._state = "SUSPENDED"
        for handle in attached:
            _evict(handle)

    def resume(self, tags: list[str] | None = None) -> None:
        """Restore the weights, when their device has capacity for them, and what else is requested."""
        self._state = "RESUMING"
        if tags is None or "weights" in tags:
            for handle in attached:
                handle.resume()
        if self._own is not None:
            self._own.resume(tags)
        self._state = "RUNNING"

    def discard(self, tags: tuple[str, ...]) -> None:
        """Have vLLM's allocator give away memory without keeping its contents. Weights that are shared are kept."""
        if self._own is not None:
            self._own.discard(tuple(tag for tag in tags if tag != "weights"))
        self._state = "SUSPENDED"

    @classmethod
    def preserves_communicators(cls) -> bool:
        """Return that communicators between ranks stay as they are."""
        return True

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        """Return that compiled code stays as it is: it has the addresses of weights that come back to them."""
        return True


def _evict(handle: Handle[Any]) -> None:
    """Have the server keep weights in a lower tier, if no engine has them active."""
    from shared_rpc_vllm.app import provider

    try:
        moves = provider.evict(handle)
    except SharedRPCError as error:  # such as ServerBusy, while another engine is awake
        _log.info("the weights stay on their device: %s", error)
    else:
        for move in moves:
            _log.info("the weights are in tier '%s', %.2f GiB are free", move["tier"], move["nbytes"] / 2**30)
