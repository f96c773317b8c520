"""Value to record and back. The only package beside the in-process executor that needs torch."""

from shared_rpc.codec import (
    arguments,
    blocks,
    buffers,
    collector,
    devices,
    hosted,
    modes,
    modules,
    payload,
    placement,
    results,
    single,
    skeleton,
    tensors,
)
from shared_rpc.codec.arguments import decode_arguments, encode_arguments, lower_arguments
from shared_rpc.codec.payload import check_result
from shared_rpc.codec.recurrent import keep_in_place
from shared_rpc.codec.reductions import install
from shared_rpc.codec.results import Soon, decode_result, publish, publish_back, publish_soon, take_back
from shared_rpc.codec.skeleton import dump_exception
from shared_rpc.codec.untraced import keep_untraced

__all__ = [
    "Soon",
    "check_result",
    "decode_arguments",
    "decode_result",
    "dump_exception",
    "encode_arguments",
    "lower_arguments",
    "publish",
    "publish_back",
    "publish_soon",
    "take_back",
]

keep_untraced(
    *(arguments, blocks, buffers, collector, devices, hosted, modes, modules),
    *(payload, placement, results, single, skeleton, tensors),
)
install()
keep_in_place()
