"""Sizes of raw buffers: shapes and dtypes without torch, for both sides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from shared_rpc.errors import ConfigurationError

#: Bytes of an element, by torch's name of the dtype. Quantised dtypes are left out: they have more than their elements.
ITEM_SIZES = {
    "bool": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}

#: The limit of torch, in which sizes, strides and bytes are signed 64-bit integers.
_LARGEST = (1 << 63) - 1
#: Maximum number of dimensions. More are a mistake, and some kernels do not support them.
_MOST = 64


class Extent(NamedTuple):
    """A contiguous tensor: its shape and strides count elements, ``nbytes`` is all of it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    nbytes: int

    @classmethod
    def of(cls, shape_or_nbytes: int | Sequence[int], dtype: str) -> Extent:
        """Return the extent of a shape, or of a number of bytes, which must be a whole number of elements.

        :raises ConfigurationError: for an unknown dtype, and for impossible sizes.
        """
        item = ITEM_SIZES.get(dtype)
        if item is None:
            raise ConfigurationError(f"dtype={dtype[:100]!r} is no dtype of a buffer: use one of {', '.join(ITEM_SIZES)}")
        if isinstance(shape_or_nbytes, int):
            if not 0 <= shape_or_nbytes <= _LARGEST:
                raise ConfigurationError(f"a buffer of {shape_or_nbytes} bytes: use a number from 0 to 2**63 - 1")
            if shape_or_nbytes % item:
                raise ConfigurationError(
                    f"a buffer of {shape_or_nbytes} bytes is no whole number of {dtype} elements of {item} bytes: an int is "
                    f"always a number of bytes; pass a tuple for a shape"
                )
            shape: tuple[int, ...] = (shape_or_nbytes // item,)
        else:
            shape = tuple(shape_or_nbytes)
        if len(shape) > _MOST:
            raise ConfigurationError(f"a buffer with {len(shape)} dimensions: use at most {_MOST}")
        # Also for an empty tensor: its strides are computed as if no size were 0.
        if any(size < 0 for size in shape) or math.prod(max(size, 1) for size in shape) * item > _LARGEST:
            raise ConfigurationError(
                f"a buffer of shape ({', '.join(map(str, shape))}) and dtype {dtype}: use sizes from 0 on, and less than "
                f"2**63 bytes in all"
            )
        strides = tuple(math.prod(max(size, 1) for size in shape[place + 1 :]) for place in range(len(shape)))
        return cls(shape, strides, dtype, math.prod(shape) * item)
