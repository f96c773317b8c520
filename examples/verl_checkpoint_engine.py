"""A checkpoint engine for verl, which sends the trainer's weights to the rollouts of its host through a channel.

With this file on the ``PYTHONPATH`` of all workers and a server on the host, configure
``checkpoint_engine.backend=shared_rpc`` and ``checkpoint_engine.custom_backend_module=verl_checkpoint_engine``.
"""

import collections
import uuid

from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from shared_rpc import AsyncClient

#: Seconds that one side waits for the other to fill or read a slot.
PATIENCE = 600.0


@CheckpointEngineRegistry.register("shared_rpc")
class ChannelEngine(CheckpointEngine):
    """Sends from the first rank of the trainer to all ranks of the rollouts; each update has its own channel.

    :param bucket_size: bytes of each of the channel's two slots.
    :param device: of the slots: host memory, or a GPU that all of these processes see.
    """

    def __init__(self, bucket_size, is_master=False, device="cpu"):
        self.bucket_size, self.is_master, self.device = bucket_size, is_master, device
        self.name = self.readers = None

    def prepare(self):
        return f"verl-{uuid.uuid4()}"

    @classmethod
    def build_topology(cls, actor_wg_world_size, rollout_world_size, metadata):
        each = {"name": metadata[0], "readers": rollout_world_size}
        return tuple({key: [value] * size for key, value in each.items()} for size in (actor_wg_world_size, rollout_world_size))

    def init_process_group(self, name, readers):
        self.name, self.readers = name, readers

    async def send_weights(self, weights, global_steps=None):
        if not self.is_master:
            collections.deque(weights, maxlen=0)  # gathering a weight is a collective operation
            return
        async with (
            AsyncClient(device=self.device) as client,
            await client.create_channel(self.name, self.bucket_size, readers=self.readers) as channel,
        ):
            for bucket in buckets(weights, self.bucket_size):
                await channel.send(bucket, timeout=PATIENCE)
            await channel.send({}, "end", timeout=PATIENCE)
            await channel.flush(timeout=PATIENCE)

    async def receive_weights(self, global_steps=None):
        async with AsyncClient(device=self.device) as client, await client.open_channel(self.name, PATIENCE) as channel:
            ended = False
            while not ended:  # a failed trainer closes the channel before the end, and receive() raises ChannelClosed
                async with channel.receive(PATIENCE) as message:
                    ended = message.meta == "end"
                    async for name, weight in message:
                        yield name, weight

    def finalize(self):
        """Do nothing: the channel is closed after each update."""


def buckets(weights, nbytes):
    """Group weights into buckets that fit into a slot, with at least one weight each."""
    bucket, used = {}, 0
    for name, weight in weights:
        if bucket and used + weight.nbytes > nbytes:
            yield bucket
            bucket, used = {}, 0
        bucket[name] = weight
        used += weight.nbytes
    yield bucket
