"""Objects of libraries that compute on the host by design, whatever device the model beside them is on.

A tensor on the host is refused where memory is shared on a GPU, because it was most likely forgotten there. In these objects it
was not: it stays where it is, and is shared as the host memory that it is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["host_tensors"]

#: Classes by the modules that they come from, which are not imported for that, each with the attributes that are on the host;
#: with none, all of them may be. The noise schedules of diffusers; the step counts of torch's optimizers
#: (``capturable=False``); how many models averaged weights are the average of, which stays on the host where the model was on
#: its device before; and the lengths in a packed batch of sequences, which torch takes from the host alone.
_CLASSES: dict[tuple[str, str], tuple[str, ...]] = {
    ("diffusers.schedulers.scheduling_utils", "SchedulerMixin"): (),
    ("torch.optim.optimizer", "Optimizer"): (),
    ("torch.optim.swa_utils", "AveragedModel"): ("n_averaged",),
    ("torch.nn.utils.rnn", "PackedSequence"): ("batch_sizes",),
}


def host_tensors(obj: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that such an object keeps on the host; none of any other object."""
    for (module, name), attributes in _CLASSES.items():
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(obj, kind):
            yield from _held([getattr(obj, attribute, None) for attribute in attributes] if attributes else vars(obj))


def _held(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.device.type == "cpu" and value.layout is torch.strided:
            yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _held(item)
