"""Write seeded weights, v1 and v2 of both models, as safetensors files::

    python make_weights.py weights [--scale 2]

Each version is a folder, ``weights/llama/v1`` and so on, with ``config.json`` and ``model.safetensors``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from models import architecture
from safetensors.torch import save_file

MODELS = ("resnet18", "llama")
VERSIONS = ("v1", "v2")


def sizes(name: str, scale: float) -> dict[str, int]:
    """The constructor's arguments: about 50 MiB a model at scale 1, and with the square of it."""
    if name == "resnet18":
        return {"width": int(64 * scale) // 8 * 8, "classes": 1000}
    width = int(512 * scale) // 64 * 64
    return {"vocabulary": 4096, "width": width, "layers": 3, "heads": 8, "kv_heads": 4, "hidden": 3 * width}


def write(folder: Path, name: str, version: str, scale: float) -> Path:
    """One version. It is written beside its place and then moved there, so that nobody ever loads half of one."""
    torch.manual_seed(sum(map(ord, name + version)))
    config = sizes(name, scale)
    weights = architecture(name, config).state_dict()
    for key, tensor in weights.items():  # as if it had been trained
        if key.endswith("running_mean"):
            tensor.normal_(0, 0.1)
        elif key.endswith("running_var"):
            tensor.uniform_(0.5, 1.5)
    place = folder / name / version
    draft = place.with_suffix(".draft")
    draft.mkdir(parents=True)
    (draft / "config.json").write_text(json.dumps(config))
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
    draft.rename(place)
    return place / "model.safetensors"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scale", type=float, default=1.0, help="of all widths")
    options = parser.parse_args()
    for name in MODELS:
        for version in VERSIONS:
            path = write(options.folder, name, version, options.scale)
            print(f"{path}: {path.stat().st_size / 2**20:.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
