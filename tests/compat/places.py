"""Where the memory of an object lies: in what is shared, or in this process alone."""

from __future__ import annotations

from typing import Any

import numpy
import torch

from shared_rpc.memory.mapping import MAPPINGS
from tests.kit.comparing import memories, reached

#: Parts of an attached object that a process may own, in addition to its Python objects, and why.
OWN = {
    "packed weights": "weights in the layout of the processor's library, which packs them again in each process",
    "arrays": "pages of numpy arrays (16 KiB or more) that the process has written to (copy-on-write)",
    "small arrays": "numpy arrays below 16 KiB, which are copied",
    "tokenizer": "a tokenizer with its vocabulary",
    "random state": "the state of a `torch.Generator`",
    "private tensors": "tensors that share no memory with a parameter, where the endpoint shares parameters only",
    "tensors": "tensors in memory that is not shared",
}


def in_memfd(address: int) -> bool:
    """Return whether the kernel says that this memory of the host is shared."""
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        for line in maps:
            begin, _, rest = line.partition("-")
            end = rest.partition(" ")[0]
            if int(begin, 16) <= address < int(end, 16):
                return "memfd:" in line
    return False


def in_slab(address: int) -> bool:
    """Return whether memory lies in a slab, which small results share."""
    found = MAPPINGS.find(address)
    return found is not None and found[0].info.slab


def outside(value: Any) -> list[str]:
    """Return the paths of an object's tensors whose memory is in no segment, on whichever device."""
    return [path for address, path in memories(value).items() if MAPPINGS.find(address) is None]


def beside_parameters(value: Any) -> list[str]:
    """Return the paths of an object's tensors whose memory no parameter of the object uses."""
    used = set().union(*(memories(part) for _, part in reached(value) if isinstance(part, torch.nn.Parameter)))
    return [path for address, path in memories(value).items() if address not in used]


def own_parts(value: Any, *, parameters_alone: bool = False) -> list[str]:
    """Return what of an attached object this process alone has, by the names in :data:`OWN`."""
    private = set(beside_parameters(value)) if parameters_alone else set()
    found = {"private tensors" if path in private else "tensors" for path in outside(value)}
    for path, part in reached(value):
        if isinstance(part, torch.Tensor) and " reduction" in path:
            found.add("packed weights")
        elif isinstance(part, numpy.ndarray) and part.nbytes:
            found.add("arrays" if in_memfd(part.ctypes.data) else "small arrays")
        elif (type(part).__module__.partition(".")[0], type(part).__name__) == ("tokenizers", "Tokenizer"):
            found.add("tokenizer")
        elif isinstance(part, torch.Generator):
            found.add("random state")
    return [name for name in OWN if name in found]
