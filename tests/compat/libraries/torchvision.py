"""Models of torchvision, and the graph modules that its feature extraction makes of them."""

from __future__ import annotations

from typing import Any

import torch

from tests.compat.cases import Case
from tests.compat.libraries.timm import picture, running_statistics

TITLE = "torchvision"
REQUIRES = ("torchvision",)


def _resnet(device: str) -> Any:
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=5).to(device).eval()


def _mobilenet(device: str) -> Any:
    from torchvision.models import mobilenet_v3_small

    return mobilenet_v3_small(num_classes=5).to(device).eval()


def _vit(device: str) -> Any:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 16, 2, 2, 16, 32, num_classes=5).to(device).eval()


def _features(device: str) -> Any:
    from torchvision.models.feature_extraction import create_feature_extractor

    return create_feature_extractor(_resnet(device), ["layer1", "flatten"]).eval()


def _transforms(device: str) -> Any:
    from torch import nn
    from torchvision.transforms import v2

    return nn.ModuleDict({"transform": v2.Compose([v2.Resize(32), v2.Normalize([0.5] * 3, [0.5] * 3)]), "model": _vit(device)})


def _run(model: Any, device: str) -> Any:
    return model(picture(device).to(next(model.parameters()).dtype))


def _run_transforms(modules: Any, device: str) -> Any:
    prepared = modules["transform"](picture(device, 48))
    return modules["model"](prepared.to(next(modules["model"].parameters()).dtype))


def _pictures(device: str) -> Any:
    from torchvision import tv_tensors

    boxes = torch.tensor([[0.0, 0.0, 4.0, 4.0]], device=device)
    return {
        "picture": tv_tensors.Image(picture(device)),
        "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(32, 32)),
    }


CASES = {
    "ResNet": Case(_resnet, _run, besides={"running statistics": running_statistics}),
    "MobileNetV3": Case(_mobilenet, _run),
    "VisionTransformer": Case(_vit, _run),
    "feature extractor": Case(_features, _run, as_pickled=True),
    "tv_tensors": Case(_pictures),
    "transforms and model": Case(_transforms, _run_transforms),
}
