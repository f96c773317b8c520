"""Weights from safetensors files, read once, into the memory in which they are shared.

``load()`` reads a file, or the files of an index, straight into new segments. A module that is made of these tensors and
returned by an endpoint is published as it lies there: nothing is copied, and at no moment are the weights in memory twice. The
files are read with read(2), in several threads, and not mapped: a file that is cut off while it is read is an error here, and
would be the end of the process there (SIGBUS).

The format is 8 bytes with the length of a header, the header in JSON, and the tensors' bytes, so that no other package is
needed (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from shared_rpc.errors import CheckpointError
from shared_rpc.extras.safetensors.headers import StoredTensor, find

if TYPE_CHECKING:
    import torch

__all__ = ["CheckpointError", "StoredTensor", "find", "load"]


def load(
    path: str | os.PathLike[str],
    device: str = "auto",
    *,
    wanted: Callable[[str], bool] | None = None,
    readers: int = 4,
) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, by name, in new memory that this process may share.

    In an endpoint it tells who waits how far it is, in bytes (:func:`shared_rpc.progress`), and ends early where its task is
    cancelled. All headers are checked before memory is made, and all work on the GPU is complete when it returns.

    ::

        with torch.device("meta"):
            model = Net()
        model.load_state_dict(load("net.safetensors", provider.device_id), assign=True)

    :param path: a ``.safetensors`` file, a ``.safetensors.index.json``, or a folder with ``model.safetensors`` or its index.
    :param device: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"cuda:<index>"`` or a GPU's UUID; an endpoint wants
        ``provider.device_id``.
    :param wanted: which tensors are read, by name; all by default.
    :param readers: how many threads read.
    :raises FileNotFoundError: if a file is not there.
    :raises CheckpointError: if a file is damaged, or not of this format. It names the file, and the tensor.
    :raises CapabilityError: if the device has not enough memory.
    :raises TaskCancelled: if the task that runs this was cancelled.
    """
    from shared_rpc.extras.safetensors.filling import fill
    from shared_rpc.memory.devices import device_id

    chosen = [tensor for tensor in find(path) if wanted is None or wanted(tensor.name)]
    return fill(chosen, device_id(device), readers)
