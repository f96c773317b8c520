"""Digests of parts where they lie: the bytes of a GPU's memory need not come to the host to be compared."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import xxhash

from shared_rpc.client.exported import SegmentBytes

if TYPE_CHECKING:
    import torch

__all__ = ["digest_of"]

#: Words of eight bytes that a GPU takes at once: 8 MiB, beside as much for the products and twice as much for the weights.
_BLOCK = 1 << 20
_WORD = 8
#: Odd multipliers of SplitMix64, as signed numbers: torch has no arithmetic of unsigned ones.
_MIX = (-4658895280553007687, -7723592293110705685)
#: Where the weights of either half of a digest begin, and what a sum is multiplied by when the next one is added.
_SEEDS = (0x243F6A8885A308D3, 0x13198A2E03707344)
_STEP = 0x2545F4914F6CDD1D
_MASK = (1 << 64) - 1


def digest_of(segment: SegmentBytes, offset: int, nbytes: int) -> bytes:
    """Return a digest of bytes of a segment.

    For host memory that is xxh3_128. For a GPU it is two weighted sums of words, modulo 2**64, which the GPU computes at the
    speed of its memory: each weight is odd, so that a single changed word always shows, and depends on the word's place.
    """
    if segment.info.device == "cpu":
        return xxhash.xxh3_128_digest(segment.buffer()[offset : offset + nbytes])
    return _digest(segment.tensor()[offset : offset + nbytes])


def _digest(data: torch.Tensor) -> bytes:
    """Return the digest of a flat tensor of bytes, on any device."""
    import torch

    with torch.no_grad():
        whole = data.numel() // _WORD * _WORD
        words = data[:whole].view(torch.int64) if data.data_ptr() % _WORD == 0 else data[:whole].clone().view(torch.int64)
        # Integers: the order in which a device adds them does not matter.
        sums = [_sums(block) for block in words.split(_BLOCK)]
        if whole < data.numel():
            rest = torch.zeros(_WORD, dtype=torch.uint8, device=data.device)
            rest[: data.numel() - whole].copy_(data[whole:])
            sums.append(_sums(rest.view(torch.int64)))
        found = [list(map(int, row)) for row in torch.stack(sums).cpu()] if sums else []
    halves = [data.numel() & _MASK] * len(_SEEDS)
    for row in found:
        halves = [(half * _STEP + number) & _MASK for half, number in zip(halves, row, strict=True)]
    return b"".join(half.to_bytes(8, "little") for half in halves)


def _sums(words: torch.Tensor) -> torch.Tensor:
    import torch

    weights = _weights(words.device)
    return torch.stack([(words * weight[: words.numel()]).sum() for weight in weights])


@functools.lru_cache(maxsize=8)
def _weights(device: Any) -> tuple[torch.Tensor, ...]:
    """Return the weights of a block's words, for each half of a digest: odd numbers without a pattern."""
    import torch

    found = []
    for seed in _SEEDS:
        weight = torch.arange(_BLOCK, dtype=torch.int64, device=device) * _STEP + seed
        for shift, multiplier in zip((30, 27), _MIX, strict=True):
            weight = (weight ^ (weight >> shift)) * multiplier
        found.append(weight | 1)
    return tuple(found)
