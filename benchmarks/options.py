"""Options that several benchmarks have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[Path | None, typer.Option("--json", help="Where to write the numbers; benchmarks/results/<name>.json.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Shape = Annotated[str | None, typer.Option(help="llama-3-8b (on a GPU by default), small (on the host by default) or tiny.")]


def numbers(text: str) -> list[int]:
    """Read numbers with commas between them.

    :raises typer.BadParameter: if it has something else.
    """
    try:
        return [int(number) for number in text.split(",") if number.strip()]
    except ValueError:
        raise typer.BadParameter(f"{text!r}: use numbers with commas between them, such as 10,100") from None


def chosen(device: str) -> str:
    """Return the device of a run: for ``"auto"`` the GPU if there is one, else the host."""
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
