"""The sleep mode of engines with shared weights: a sleeping engine unmaps them, and maps them again at the same addresses."""

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
    """Sleep-mode backend ``shared_rpc``, selected by the loader of this name: weights are suspended, all else is left to vLLM.

    A sleeping engine has its weights unmapped at levels 1 and 2; one copy is kept for all engines, and nothing is
    loaded again. Their memory is free as soon as no awake engine uses them. Waking maps them at the same addresses, so that
    captured graphs stay valid. Key-value cache, graphs and private tensors are managed by vLLM's allocator (``cumem``).
    """

    def __init__(self) -> None:
        super().__init__()
        # vLLM has no such allocator on a CPU.
        self._own = None if current_platform.is_cpu() else CuMemBackend()

    def suspend(self, level: int = 1) -> None:
        """Suspend the weights, and have vLLM's allocator discard the key-value cache.

        :raises shared_rpc.errors.CapabilityError: if the weights cannot be remapped; nothing has changed.
        """
        active = [handle for handle in attached if not handle.suspended]
        try:
            for handle in attached:  # including handles suspended by a lost session, whose memory is still mapped
                handle.suspend()
            if self._own is not None:
                # Always level 1, because private tensors among the weights are in no checkpoint.
                self._own.suspend(1)
        except BaseException:
            for handle in active:
                handle.resume()
            raise
        self._state = "SUSPENDED"
        for handle in attached:
            _evict(handle)

    def resume(self, tags: list[str] | None = None) -> None:
        """Restore the weights, when their device has capacity for them, and the other tags."""
        self._state = "RESUMING"
        if tags is None or "weights" in tags:
            for handle in attached:
                handle.resume()
        if self._own is not None:
            self._own.resume(tags)
        self._state = "RUNNING"

    def discard(self, tags: tuple[str, ...]) -> None:
        """Have vLLM's allocator free memory without keeping its contents. Shared weights are kept."""
        if self._own is not None:
            self._own.discard(tuple(tag for tag in tags if tag != "weights"))
        self._state = "SUSPENDED"

    @classmethod
    def preserves_communicators(cls) -> bool:
        """Return True: communicators between ranks are unchanged."""
        return True

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        """Return True: the weights return to the addresses in compiled code."""
        return True


def _evict(handle: Handle[Any]) -> None:
    """Evict weights to a lower tier, if no engine has them active."""
    from shared_rpc_vllm.app import provider

    try:
        moves = provider.evict(handle)
    except SharedRPCError as error:  # such as ServerBusy, while another engine is awake
        _log.info("the weights stay on their device: %s", error)
    else:
        for move in moves:
            _log.info("the weights are in tier '%s', %.2f GiB are free", move["tier"], move["nbytes"] / 2**30)
