"""What constructors do with tensors while a model is built around others: all of it gives what it gives elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shared_rpc import materialize
from shared_rpc.errors import ConfigurationError


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors begin at the same byte."""
    return one.data_ptr() == other.data_ptr()


class Loading(nn.Module):
    """Takes a table from a file, as models with word vectors do."""

    def __init__(self, load: Any) -> None:
        super().__init__()
        vectors = load()["vectors"]
        self.vectors = nn.Parameter(vectors)
        self.register_buffer("norms", vectors.norm(dim=1), persistent=False)
        self.plain = vectors[1].clone()
        self.layer = nn.Linear(3, 2, bias=False)
        with pytest.warns(UserWarning, match="no-op"):  # torch says what is the case
            self.layer.load_state_dict({"weight": vectors})


@pytest.mark.parametrize("file", ["safetensors", "torch", "mapped"])
def test_a_constructor_that_loads_a_file(tmp_path: Path, file: str) -> None:
    """What comes of the file is there; its parameters are the source's all the same."""
    path, saved = tmp_path / "vectors", {"vectors": torch.arange(6.0).view(2, 3)}
    if file == "safetensors":
        safetensors = pytest.importorskip("safetensors.torch")
        safetensors.save_file(saved, path)

        def load() -> dict[str, torch.Tensor]:
            return safetensors.load_file(path)

    else:
        torch.save(saved, path)

        def load() -> dict[str, torch.Tensor]:
            return torch.load(path, mmap=file == "mapped")

    source = {"vectors": torch.ones(2, 3), "layer.weight": torch.ones(2, 3)}

    with materialize(source):
        model = Loading(load)

    assert same_memory(model.vectors, source["vectors"])
    assert same_memory(model.layer.weight, source["layer.weight"])
    assert model.plain.tolist() == saved["vectors"][1].tolist()
    assert model.norms.tolist() == saved["vectors"].norm(dim=1).tolist()
    assert (source["vectors"] == 1).all()


def test_dtypes_that_the_constructor_chooses() -> None:
    """Whatever way it converts; counters of integers stay what they are."""

    class Converted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)
            self.scale = nn.Parameter(torch.ones(2).half())
            self.scale.data = self.scale.data.double()
            self.to(torch.bfloat16).type(torch.float16)

    source = Converted()
    with materialize(source):
        model = Converted()
    assert [tensor.dtype for tensor in model.state_dict().values()] == [t.dtype for t in source.state_dict().values()]
    assert same_memory(model.scale, source.scale)


def test_sparse_tensors() -> None:
    """An adjacency matrix is what the constructor makes, or the source's where it is a part of the state."""

    class Graph(nn.Module):
        def __init__(self, persistent: bool) -> None:
            super().__init__()
            edges = torch.tensor([[0, 1], [1, 0]])
            matrix = torch.sparse_coo_tensor(edges, torch.ones(2), (2, 2), check_invariants=True) * 2
            self.register_buffer("matrix", matrix, persistent=persistent)
            self.layer = nn.Linear(2, 2)

    for persistent in (True, False):
        source = Graph(persistent)
        with materialize(source):
            model = Graph(persistent)
        assert torch.equal(model.matrix.to_dense(), torch.tensor([[0.0, 2.0], [2.0, 0.0]]))
        assert same_memory(model.matrix._values(), source.matrix._values()) is persistent


# What callers may get wrong.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"own": "lora_*"}, r"own='lora_\*': use a list .* own=\['lora_\*'\]"),
        ({"own": None}, "own=None: use a list"),
        ({"own": [3]}, r"own=\[\.\.\., 3, \.\.\.\]: names and patterns are str"),
        ({"rename": ["weight"]}, r"rename=\['weight'\]: use a dict"),
        ({"rename": "weight"}, "rename='weight': use a dict"),
        ({"rename": {"weight": 3}}, "rename={'weight': 3}: names and patterns are str"),
        ({"rename": {3: "weight"}}, "rename={3: 'weight'}: names and patterns are str"),
        ({"rename": len}, "the function gave 6 for 'weight'"),
    ],
    ids=str,
)
def test_options_of_another_type(options: dict[str, Any], message: str) -> None:
    """They are refused before anything is built: the letters of one pattern would be taken for patterns."""
    with pytest.raises(ConfigurationError, match=message), materialize(nn.Linear(2, 2), **options):
        raise AssertionError("the block is not entered")
