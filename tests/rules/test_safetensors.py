"""Weights from safetensors files: every bit arrives, in memory that is published as it lies, and damage is named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shared_rpc import Progress
from shared_rpc.context import CURRENT_RUN, RunContext
from shared_rpc.errors import CapabilityError, CheckpointError
from shared_rpc.extras import safetensors
from shared_rpc.extras.safetensors import find, load
from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.records import Record
from tests.kit.interpreter import bits
from tests.kit.models import net

save_file = pytest.importorskip("safetensors.torch").save_file


def written(path: Path, header: object, body: bytes = b"") -> Path:
    """Write a file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return path


def entry(begin: int, end: int, dtype: str = "F32", shape: tuple[int, ...] | None = None) -> dict[str, Any]:
    """Return a header's entry for a tensor."""
    return {"dtype": dtype, "shape": shape or [(end - begin) // 4], "data_offsets": [begin, end]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A whole file of :func:`net`."""
    path = tmp_path / "model.safetensors"
    save_file(net(), path, metadata={"format": "pt"})
    return path


def test_every_bit_round_trips(file: Path, device: str, no_leaks: None) -> None:
    """Names, dtypes, shapes and bytes, on either device."""
    loaded, expected = load(file, device), net()
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (bits(loaded[name]), loaded[name].device.type) == (bits(tensor), device), name


def test_progress_is_reported_in_bytes(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From zero to all, never decreasing; the message is the file."""
    monkeypatch.setattr(safetensors, "_PART", 1000)
    seen: list[Progress] = []
    token = CURRENT_RUN.set(RunContext(frozenset(), seen.append))
    load(file, "cpu")
    CURRENT_RUN.reset(token)
    total = sum(tensor.nbytes for tensor in net().values())
    done = [progress.done for progress in seen]
    assert (done, done[0], done[-1]) == (sorted(done), 0, total)
    assert {(progress.total, progress.message) for progress in seen} == {(total, str(file))}


def test_large_tensors_are_read_in_parts(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By several threads."""
    monkeypatch.setattr(safetensors, "_PART", 1000)
    tensor = torch.arange(100_003, dtype=torch.int32)
    save_file({"long": tensor}, tmp_path / "x.safetensors")
    assert torch.equal(load(tmp_path / "x.safetensors", device)["long"].cpu(), tensor)


def test_loaded_tensors_are_published_in_place(
    file: Path, device: str, no_leaks: None, published: Callable[..., Record]
) -> None:
    """No tensor moves, and the loader's segment is the only one."""
    weights = load(file, device)
    addresses = {name: tensor.data_ptr() for name, tensor in weights.items()}
    record = published(weights)
    assert {name: tensor.data_ptr() for name, tensor in weights.items()} == addresses
    found = MAPPINGS.find(addresses["embedding"])
    assert found is not None
    assert [segment.info.id for segment in record.segments] == [found[0].info.id]


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_read_access_seals_loaded_memory(file: Path, no_leaks: None, published: Callable[..., Record]) -> None:
    """Although the memory was filled before its access mode was known."""
    segment = published(load(file, "cpu"), "read").segments[0]
    with pytest.raises(CapabilityError, match="shared read-only"):
        HOST.map(segment.fileno(), segment.info.nbytes, "read_write")


def test_an_index_and_its_folder_are_read(tmp_path: Path) -> None:
    """Shards are one checkpoint; unnamed files are left out."""
    tensors = net()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:4], "b.safetensors": names[4:]}
    for part, of_part in parts.items():
        save_file({**{name: tensors[name] for name in of_part}, f"stale in {part}": torch.ones(2)}, tmp_path / part)
    weight_map = {name: part for part, of_part in parts.items() for name in of_part}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for path in (tmp_path, index):
        loaded = load(path, "cpu")
        assert sorted(loaded) == names
        assert all(bits(loaded[name]) == bits(tensors[name]) for name in names)


def test_only_selected_tensors_are_read(file: Path) -> None:
    """The rest takes no memory."""
    loaded = load(file, "cpu", wanted=lambda name: name in ("half", "mask"))
    assert sorted(loaded) == ["half", "mask"]
    found = MAPPINGS.find(loaded["half"].data_ptr())
    assert found is not None
    assert found[0].info.nbytes == 4096


@pytest.mark.parametrize(
    ("header", "body", "said"),
    [
        (b"\xff\xfe", b"", "header cannot be read"),
        (b'{"w": ' * 10_000 + b"1" + b"}" * 10_000, b"", "cannot be read"),
        ({"w": entry(0, 8), "v": {"dtype": "F32"}}, b"12345678", "entry of tensor 'v' cannot be read"),
        ({"w": entry(0, 8)}, b"1234", "is truncated"),
        ({"w": entry(0, 8)}, b"123456789", "and its header describes"),
        ({"w": entry(0, 8, shape=(3,))}, b"12345678", r"tensor 'w' of shape \[3\] and dtype F32 cannot be"),
        ({"w": entry(0, 0, shape=(0, 1 << 40, 1 << 40))}, b"", "tensor 'w' of shape .* cannot be"),
        ({"w": entry(0, 8), "v": entry(4, 12)}, b"123456789012", "tensor 'v' begins at byte"),
        ({"w": entry(0, 8, dtype="Q4")}, b"12345678", "tensor 'w' has the dtype Q4"),
    ],
)
def test_damage_is_named(tmp_path: Path, no_leaks: None, header: object, body: bytes, said: str) -> None:
    """The header is checked before memory is allocated, and the error has the file and the tensor."""
    path = written(tmp_path / "x.safetensors", header, body)
    with pytest.raises(CheckpointError, match=said) as caught:
        load(path, "cpu")
    assert str(path) in str(caught.value)


def test_a_file_cut_off_in_its_header_is_an_error(file: Path) -> None:
    """Before anything of it is decoded."""
    os.truncate(file, 60)
    with pytest.raises(CheckpointError, match="truncated, or no safetensors file: it has 60 bytes"):
        load(file, "cpu")


def test_files_truncated_while_read_are_errors(file: Path, monkeypatch: pytest.MonkeyPatch, no_leaks: None) -> None:
    """With the tensor's name, instead of the end of the process."""
    found = find(file)
    monkeypatch.setattr("shared_rpc.extras.safetensors.find", lambda _: found)
    os.truncate(file, found[0].offset + 2)
    with pytest.raises(
        CheckpointError, match=r"was truncated while it was read: tensor '\w+' lacks its last bytes: it ends after"
    ):
        load(file, "cpu")


@pytest.mark.parametrize(
    ("weight_map", "error", "said"),
    [
        ({"half": "model.safetensors", "w": "model.safetensors"}, CheckpointError, "tensor 'w' is listed in model"),
        ({"w": "../model.safetensors"}, CheckpointError, "which is not in the index's directory"),
        ({"w": "other.safetensors"}, FileNotFoundError, r"index\.json lists a missing file.*other\.safetensors"),
    ],
)
def test_invalid_indexes_are_reported(file: Path, weight_map: object, error: type[Exception], said: str) -> None:
    """With the missing names."""
    index = file.parent / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(error, match=said):
        load(index, "cpu")


def test_folders_without_a_checkpoint_are_reported(tmp_path: Path) -> None:
    """With the expected files."""
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        load(tmp_path, "cpu")


@pytest.mark.whole_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_loading_to_a_gpu_needs_only_the_weights(tmp_path: Path, published: Callable[..., Record]) -> None:
    """Loading and publishing 256 MiB takes 256 MiB, and a little for torch itself."""
    torch.zeros(1, device="cuda")
    save_file({f"w{number}": torch.ones(1 << 22) * number for number in range(16)}, tmp_path / "x.safetensors")
    before, _ = torch.cuda.mem_get_info()
    weights = load(tmp_path / "x.safetensors", "cuda")
    published(weights)
    after, _ = torch.cuda.mem_get_info()
    assert 256 <= (before - after) >> 20 <= 256 + 32
    assert {name: tensor[-1].item() for name, tensor in weights.items()} == {f"w{number}": number for number in range(16)}
