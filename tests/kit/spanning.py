"""A module on several devices, importable by every process of a test."""

from __future__ import annotations

import torch
from torch import nn


class Spanning(nn.Module):
    """Two layers on two devices, as placed by a device map. All numbers are small integers, so results are exact."""

    scale: torch.Tensor

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.devices = [torch.device(first), torch.device(second)]
        self.first = nn.Linear(8, 8, device=first)
        self.second = nn.Linear(8, 4, device=second)
        self.register_buffer("scale", torch.full((4,), 3.0, device=second))
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) % 5 + number)

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute on the first device, then on the second."""
        hidden = self.first(x.to(self.devices[0]))
        return self.second(hidden.to(self.devices[1])) * self.scale
