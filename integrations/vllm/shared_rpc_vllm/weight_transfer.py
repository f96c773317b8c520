"""Weight transfer: a trainer sends weights to running engines through a channel of the server.

Each ``update_weights`` of an engine receives the announced number of messages from the channel. Each message has some of the
weights, under their names in the checkpoint. vLLM loads them like a checkpoint, layer by layer.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from shared_rpc import Client, TensorChannel
from shared_rpc.errors import ChannelClosed, ConfigurationError
from shared_rpc_vllm import LOAD_FORMAT

__all__ = ["SharedRpcTrainer", "SharedRpcTrainerInfo", "SharedRpcWeightTransfer"]


@dataclass
class ChannelInfo(WeightTransferInitInfo):
    """The address of the channel, for an engine.

    :param channel: its name.
    :param socket_path: the socket of its server.
    :param timeout: seconds to wait for each slot.
    """

    channel: str
    socket_path: str
    timeout: float = 300.0


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The number of messages that an update receives from the channel."""

    messages: int = 1


class SharedRpcWeightTransfer(WeightTransferEngine[ChannelInfo, UpdateInfo]):
    """The weight-transfer engine ``shared_rpc`` of each rank of an engine: a reader of the trainer's channel."""

    init_info_cls = ChannelInfo
    update_info_cls = UpdateInfo

    _info: ChannelInfo
    _client: Client | None = None
    _channel: TensorChannel | None = None

    def init_transfer_engine(self, init_info: ChannelInfo) -> None:
        """Open the channel, replacing an earlier one."""
        self.shutdown()
        self._info = init_info
        self._client = Client(socket_path=init_info.socket_path, connect_timeout=10.0)
        self._channel = self._client.open_channel(init_info.channel, timeout=10.0)

    def start_weight_update(self) -> None:
        """Prepare vLLM to load into the layers again."""
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Have vLLM process the weights that were not processed with their layer."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            # vLLM packs heads for the CPU, but repacks one only if weights arrive under its own name, not if it is tied.
            for module in self.model.modules():
                if isinstance(method := getattr(module, "quant_method", None), UnquantizedEmbeddingMethod):
                    method.process_weights_after_loading(module)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive some of the weights, and load them."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":  # torch raises without an accelerator
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive some of the weights, and load them. If that fails, incomplete layers keep their previous weights.

        :raises ConfigurationError: before :meth:`init_transfer_engine`, and after a failed update.
        :raises ChannelClosed: if the trainer has ended or abandoned the message.
        :raises DeadlineExceeded: if the trainer has sent nothing in time.
        """
        if self._channel is None:
            raise ConfigurationError("this engine has no channel: call init_weight_transfer_engine, also after a failed update")
        try:
            with disable_mtp_completeness_check():
                self.model.load_weights(self._received(self._channel, update_info.messages))
        except BaseException:
            self.shutdown()  # so that the trainer does not wait for this reader
            for module in self.model.modules():
                # Otherwise vLLM would load these weights together with the next ones.
                layer = get_layerwise_info(module)
                layer.loaded_weights.clear()
                layer.load_numel = 0
            self.finish_weight_update()
            raise

    def _received(self, channel: TensorChannel, messages: int) -> Iterator[tuple[str, torch.Tensor]]:
        for _ in range(messages):
            with channel.receive(timeout=self._info.timeout) as message:
                for name, tensor in message:
                    # A copy, because vLLM keeps tensors until their layer is complete, and the slot is reused before.
                    yield name, tensor.to(self.device, copy=True)

    def shutdown(self) -> None:
        """Close the channel."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._client is not None:
            self._client.close()
            self._client = None


@dataclass
class SharedRpcTrainerInfo(TrainerInitInfo):
    """Options of a trainer.

    :param readers: total number of ranks of all engines: each receives all weights, and keeps its part.
    :param nbytes: bytes of each of the two slots; a good size is that of some layers of the model.
    :param base_path: prefix of the server's socket path; by default that of engines.
    :param device: of the slots; by default the trainer's GPU, or the host without one.
    :param timeout: seconds that trainer and engines wait for each slot.
    """

    backend: ClassVar[str] = LOAD_FORMAT
    readers: int = 1
    nbytes: int = 1 << 30
    base_path: str | None = None
    device: str | None = None
    timeout: float = 300.0


class SharedRpcTrainer(TrainerWeightTransferEngine[SharedRpcTrainerInfo]):
    """The trainer's side of the weight-transfer engine ``shared_rpc``.

    Every rank of the trainer creates one and calls :meth:`send_weights`: rank 0 sends, and the others take part in gathering.
    Each message has the weights of one layer, so that only those are gathered at a time.
    """

    init_info_cls = SharedRpcTrainerInfo

    def __init__(self, info: SharedRpcTrainerInfo, client: VLLMWeightSyncClient, source: WeightSource) -> None:
        super().__init__(client=client, source=source, is_sender=info.is_sender)
        self._info = info
        self._weights = source
        self._channel: TensorChannel | None = None

    @classmethod
    def trainer_init(
        cls, init_info: SharedRpcTrainerInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        """Create a channel, and have the engines open it.

        :raises ConfigurationError: without a source, and for a source whose ranks hold parts of the model.
        """
        if source is None or source.held_names() is not None:
            raise ConfigurationError(f"weight transfer by {LOAD_FORMAT} needs a source that has all weights on rank 0")
        trainer = cls(init_info, client, source)
        if trainer.is_sender:
            trainer._open()
        return trainer

    def _open(self) -> TensorChannel:
        from shared_rpc_vllm.app import provider

        info = self._info
        if info.base_path is not None:
            provider.base_path = info.base_path
        provider.device = info.device or ("cuda" if torch.cuda.is_available() else "cpu")
        name = f"weights-{uuid.uuid4()}"
        self._channel = channel = provider.create_channel(name, info.nbytes, readers=info.readers)
        channel.flush()  # makes this process the sender, so that engines detect its exit
        self.client.init_weight_transfer_engine(
            {"channel": name, "socket_path": provider.get_runtime_info()["socket_path"], "timeout": info.timeout}
        )
        return channel

    def send_weights(self) -> None:
        """Send all weights to the engines, and wait until they have them.

        :raises Exception: of the engines' client if an engine fails; the next call reconnects.
        """
        groups = self._weights.iter_groups()
        if not self.is_sender:
            for _ in groups:  # gathering is a collective operation
                pass
            return
        channel = self._channel or self._open()
        try:
            self.client.start_weight_update()
            with ThreadPoolExecutor(1) as pool:
                update = pool.submit(self.client.update_weights, {"messages": len(self._weights.groups())})
                try:
                    for names, tensors in groups:
                        channel.send(dict(zip(names, tensors, strict=True)), timeout=self._info.timeout)
                except BaseException as error:
                    self.shutdown()  # so that no engine waits for the rest
                    _explain(update, error)
                    raise
                update.result()
            self.client.finish_weight_update()
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Close the channel. The next :meth:`send_weights` creates another one."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _explain(update: Future[None], error: BaseException) -> None:
    """Raise the engine's exception, if that is the reason for which it closed the channel."""
    if isinstance(error, ChannelClosed) and (reason := update.exception()) is not None:
        raise reason from error
