"""Write random weights, v1 and v2 of both models, as safetensors files: ``python make_weights.py weights [--width 128]``.

Each version is a folder, ``weights/resnet18/v1`` and so on, with ``config.json`` and ``model.safetensors``.
"""

import argparse
import json
from pathlib import Path

import torch
from model import ResNet
from safetensors.torch import save_file

MODELS = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3)}
VERSIONS = ("v1", "v2")


def write(folder: Path, name: str, version: str, width: int) -> Path:
    """Write a version to a temporary file and rename it, so that no process loads an incomplete one."""
    torch.manual_seed(sum(map(ord, name + version)))
    config = {"blocks": MODELS[name], "width": width}
    weights = ResNet(**config).state_dict()
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
    parser.add_argument("--width", type=int, default=64, help="of the first layers; at 64 both models have 130 MiB")
    options = parser.parse_args()
    for name in MODELS:
        for version in VERSIONS:
            path = write(options.folder, name, version, options.width)
            print(f"{path}: {path.stat().st_size / 2**20:.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
