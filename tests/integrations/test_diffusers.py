"""Pipelines of diffusers, whose models are attached one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shared_rpc import Provider
from shared_rpc.integrations import diffusers as integration
from tests.integrations.comparing import same_bits, shared_parameters

diffusers = pytest.importorskip("diffusers")
#: Warnings of libraries about their own and each other's next releases.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def stable_diffusion(folder: Path) -> str:
    """Save a whole pipeline with random weights."""
    from tests.compat.libraries.diffusers import _stable_diffusion

    torch.manual_seed(0)
    _stable_diffusion("cpu").save_pretrained(folder)
    return str(folder)


def painted(pipeline: Any) -> torch.Tensor:
    """Return the image that it makes from a text."""
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(1)
    options = {"num_inference_steps": 2, "height": 16, "width": 16, "generator": generator, "output_type": "np"}
    return torch.from_numpy(pipeline("a lighthouse", **options).images)


def models(pipeline: Any) -> dict[str, torch.nn.Module]:
    """Return its parts that have weights."""
    return {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}


def test_a_pipeline_is_attached(provider: Provider, device: str, tmp_path: Path) -> None:
    """UNet, VAE and text encoder are in the server's memory; scheduler and settings are the process's own."""
    path = stable_diffusion(tmp_path / "pipeline")
    with integration.shared(provider, fallback=False):
        one, other = (diffusers.DiffusionPipeline.from_pretrained(path).to(device) for _ in range(2))
    mine = diffusers.DiffusionPipeline.from_pretrained(path).to(device)
    assert sorted(models(one)) == ["text_encoder", "unet", "vae"]
    for name, model in models(one).items():
        assert len(shared_parameters(model)) == len(list(model.parameters()))
        assert shared_parameters(model) == shared_parameters(models(other)[name])
        assert same_bits(models(mine)[name], model)
    assert one.scheduler is not other.scheduler
    assert torch.equal(painted(mine), painted(one))


def test_parts_can_be_given(provider: Provider, device: str, tmp_path: Path) -> None:
    """Those passed to ``from_pretrained`` are used, and the other parts attach."""
    path = stable_diffusion(tmp_path / "pipeline")
    vae = diffusers.AutoencoderKL.from_pretrained(path, subfolder="vae").to(device)
    with integration.shared(provider, fallback=False):
        one = diffusers.StableDiffusionPipeline.from_pretrained(path, vae=vae)
        unet = diffusers.UNet2DConditionModel.from_pretrained(path, subfolder="unet")
    assert one.vae is vae
    assert shared_parameters(one.vae) == {}
    assert len(shared_parameters(one.unet)) == len(list(one.unet.parameters()))
    assert same_bits(one.unet, unet)
