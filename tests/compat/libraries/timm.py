"""Pictures: models of timm, most of them with BatchNorm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.compat.cases import Case

TITLE = "timm"
REQUIRES = ("timm", "torchvision")


def picture(device: str, size: int = 32) -> torch.Tensor:
    """Two pictures."""
    return torch.linspace(-1, 1, 2 * 3 * size * size, device=device).reshape(2, 3, size, size)


def _made(name: str, **options: Any) -> Callable[[str], Any]:
    def build(device: str) -> Any:
        import timm

        return timm.create_model(name, num_classes=5, **options).to(device).eval()

    return build


def _run(model: Any, device: str) -> Any:
    return model(picture(device).to(next(model.parameters()).dtype))


def running_statistics(attached: Any, own: Any, device: str) -> None:
    """A forward pass in train mode moves the running statistics, the shared ones, as it moves one's own."""
    before = {name: buffer.clone() for name, buffer in attached.named_buffers()}
    for model in (attached, own):
        model.train()
        torch.manual_seed(1)
        model(picture(device))
        model.eval()
    moved = dict(own.named_buffers())
    try:
        assert before
        assert all(torch.equal(buffer, moved[name]) for name, buffer in attached.named_buffers())
        assert not all(torch.equal(buffer, before[name]) for name, buffer in attached.named_buffers())
    finally:
        for name, buffer in attached.named_buffers():
            buffer.copy_(before[name])


def _new_head(attached: Any, own: Any, device: str) -> None:
    """``reset_classifier`` and ``forward_features`` for a task of the client's."""
    features = [model.forward_features(picture(device)) for model in (attached, own)]
    assert torch.equal(*features)
    for model in (attached, own):
        torch.manual_seed(1)
        model.reset_classifier(3)
    assert torch.equal(attached(picture(device)), own(picture(device)))


_BATCH_NORM = {"running statistics": running_statistics}

CASES = {
    "resnet": Case(_made("test_resnet"), _run, compiled=("aot_eager",), besides={**_BATCH_NORM, "a new classifier": _new_head}),
    "resnet, parameters alone": Case(_made("test_resnet"), _run, parameters_alone=True, besides=_BATCH_NORM),
    "vit": Case(_made("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=48, num_heads=3), _run),
    "convnext": Case(_made("convnext_atto", depths=(1, 1, 2, 1), dims=(8, 16, 24, 32)), _run),
    "efficientnet": Case(_made("test_efficientnet"), _run, besides=_BATCH_NORM),
}
