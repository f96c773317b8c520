"""Parts of diffusers, and whole pipelines, with random weights."""

from __future__ import annotations

from typing import Any

import torch

from tests.compat.cases import Case

TITLE = "diffusers"
REQUIRES = ("diffusers", "transformers")


def _unet(device: str, channels: int = 4) -> Any:
    from diffusers import UNet2DConditionModel

    return (
        UNet2DConditionModel(
            sample_size=8,
            in_channels=channels,
            out_channels=channels,
            block_out_channels=(8, 16),
            layers_per_block=1,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=16,
            attention_head_dim=4,
            norm_num_groups=4,
        )
        .to(device)
        .eval()
    )


def _run_unet(model: Any, device: str) -> Any:
    dtype = next(model.parameters()).dtype
    noise = torch.linspace(-1, 1, 2 * 4 * 8 * 8, device=device).reshape(2, 4, 8, 8).to(dtype)
    text = torch.linspace(-1, 1, 2 * 3 * 16, device=device).reshape(2, 3, 16).to(dtype)
    return model(noise, 3, encoder_hidden_states=text).sample


def _vae(device: str) -> Any:
    from diffusers import AutoencoderKL

    return (
        AutoencoderKL(
            block_out_channels=(8, 16),
            down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
            up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
            latent_channels=4,
            norm_num_groups=4,
            sample_size=16,
        )
        .to(device)
        .eval()
    )


def _run_vae(model: Any, device: str) -> Any:
    picture = torch.linspace(-1, 1, 2 * 3 * 16 * 16, device=device).reshape(2, 3, 16, 16).to(next(model.parameters()).dtype)
    latent = model.encode(picture).latent_dist.mean
    return model.decode(latent).sample


def _tokenizer() -> Any:
    from transformers import CLIPTokenizer

    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[], model_max_length=16)


def _stable_diffusion(device: str) -> Any:
    from diffusers import DDIMScheduler, StableDiffusionPipeline
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=54,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=52,
        eos_token_id=53,
        pad_token_id=53,
    )
    return StableDiffusionPipeline(
        vae=_vae(device),
        text_encoder=CLIPTextModel(config).eval(),
        tokenizer=_tokenizer(),
        unet=_unet(device),
        scheduler=DDIMScheduler(num_train_timesteps=10),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).to(device)


def _run_stable_diffusion(pipeline: Any, device: str) -> Any:
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(1)
    made = pipeline("a lighthouse", num_inference_steps=2, height=16, width=16, generator=generator, output_type="np")
    return torch.from_numpy(made.images)


def _modules(device: str) -> Any:
    parts = _stable_diffusion(device).components
    return {name: part.eval() for name, part in parts.items() if isinstance(part, torch.nn.Module)}


def _run_modules(modules: Any, device: str) -> Any:
    whole = _stable_diffusion(device)
    return _run_stable_diffusion(type(whole)(**{**whole.components, **modules}, requires_safety_checker=False), device)


def _lora(attached: Any, own: Any, device: str) -> None:
    """An adapter added to the shared UNet is the client's own, and leaves the shared weights."""
    from peft import LoraConfig

    from tests.kit.comparing import digest

    before = [parameter.clone() for parameter in attached.parameters()]
    shared = list(attached.parameters())
    found = []
    for model in (attached, own):
        torch.manual_seed(2)
        model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
        found.append(_run_unet(model, device).detach())
    assert torch.equal(*found)
    assert digest(shared) == digest(before)


def _flux(device: str) -> Any:
    from diffusers import FluxTransformer2DModel

    return (
        FluxTransformer2DModel(
            patch_size=1,
            in_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            axes_dims_rope=(4, 4, 8),
        )
        .to(device)
        .eval()
    )


def _run_flux(model: Any, device: str) -> Any:
    def numbers(*shape: int) -> torch.Tensor:
        size = torch.Size(shape).numel()
        return torch.linspace(-1, 1, size, device=device).reshape(shape).to(next(model.parameters()).dtype)

    return model(
        hidden_states=numbers(1, 16, 4),
        encoder_hidden_states=numbers(1, 6, 32),
        pooled_projections=numbers(1, 32),
        timestep=torch.tensor([0.5], device=device),
        img_ids=torch.zeros(16, 3, device=device),
        txt_ids=torch.zeros(6, 3, device=device),
    ).sample


CASES = {
    "UNet2DConditionModel": Case(_unet, _run_unet, compiled=("aot_eager",), besides={"an adapter of the client": _lora}),
    "AutoencoderKL": Case(_vae, _run_vae),
    "FluxTransformer2DModel": Case(_flux, _run_flux),
    "StableDiffusionPipeline": Case(_stable_diffusion, _run_stable_diffusion, remembers=True, as_pickled=True),
    "the modules of a pipeline": Case(_modules, _run_modules),
}
