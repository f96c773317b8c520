"""The app of tests of suspended handles."""

from __future__ import annotations

import torch

#: Number of elements of its tensors.
SIZE = 5000

APP = f"""
@provider.share(managed=True)
def load(number=0):
    return torch.arange({SIZE})

@provider.share(managed=True, access="read")
def load_read_only():
    return torch.arange({SIZE})

@provider.share(managed=True)
def load_list():
    return [torch.arange({SIZE})]

@provider.share
def get():
    return torch.arange({SIZE})

BASE = torch.arange({SIZE})

@provider.share(managed=True)
def whole():
    return BASE

@provider.share
def part():
    return BASE[:10]

@provider.share(managed=True, tensors="parameters")
def load_module():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300))
"""


def has_numbers(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has the bytes made by the app's endpoints."""
    return torch.equal(tensor, torch.arange(SIZE))
