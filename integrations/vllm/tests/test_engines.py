"""End-to-end tests with vLLM's CPU build: engines in separate processes over one copy of the weights."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoints
import engine
from conftest import DEVICE, Ended, Engine, Failed, Place, run, serving
from shared_rpc import Provider, Server
from shared_rpc.memory.devices import device_id, device_tag
from tests.kit.deep import deep

#: Bytes of /dev/shm for the first engines and their server.
SHM = 64 << 10

Ordinary = Callable[[Path], list[int]]

on_a_host = pytest.mark.skipif(DEVICE != "cpu", reason="looks at mappings of the host's memory")
two_devices = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="NCCL wants a GPU for each rank")


@pytest.fixture(scope="module")
def pair(place: Place, models: dict[str, Path]) -> Iterator[list[Engine]]:
    """Two engines that were started concurrently, without a server."""
    both = [place.start(models["llama"], {"TEST_SHM": str(SHM)}) for _ in range(2)]
    yield [made.ready() for made in both]


def test_two_concurrent_engines_load_once(place: Place, pair: list[Engine]) -> None:
    """One of them starts the server, which loads for both."""
    assert place.loaded() == 1
    with place.client() as client:
        (info,) = client.list_objects()
    assert len(info["holders"]) == len(pair)


@on_a_host
def test_only_parameters_are_shared_and_read_only(pair: list[Engine]) -> None:
    """Tensors that an engine writes to are private."""
    for made in pair:
        found = made.ask(engine.tensors)
        assert {kind for kind, _ in found.values()} == {True, False}, "it has parameters and buffers"
        for name, (is_parameter, where) in found.items():
            assert where.startswith("r--s /memfd:" if is_parameter else "rw-p"), (name, where)


@on_a_host
def test_the_weights_are_in_memory_once(place: Place, pair: list[Engine]) -> None:
    """Each process maps all of them, and their proportional shares add up to one copy."""
    for made in pair:
        made.ask(engine.generate)
    with place.client() as client:
        (info,) = client.list_objects()
    shares = [_proportional(pid) for pid in (*place.pids(), *(made.pid for made in pair))]
    assert all(share > 0 for share in shares[-2:])
    assert 0 < sum(shares) < 1.1 * info["nbytes"] + (len(shares) << 12)


def _proportional(pid: int) -> int:
    """Return a process's share of its mapped segments in bytes: Pss of proc(5)."""
    share, counts = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            counts = "/memfd:" in line and line.split()[1].endswith("s")
        elif counts and line.startswith("Pss:"):
            share += int(line.split()[1]) << 10
    return share


@on_a_host
def test_a_small_dev_shm_suffices(place: Place, pair: list[Engine]) -> None:
    """It needs space for a few semaphores only, because the weights are in anonymous files."""
    sizes = [made.ask(engine.shm_bytes) for made in pair]
    if max(sizes) > SHM:
        pytest.skip("this user cannot mount a small /dev/shm")
    for pid in place.pids():
        assert Path(f"/proc/{pid}/ns/mnt").readlink() in [Path(f"/proc/{made.pid}/ns/mnt").readlink() for made in pair]


@pytest.mark.parametrize("family", ["llama", *deep("qwen", "mixtral")])
def test_tokens_equal_those_of_vllms_own_loader(
    place: Place, models: dict[str, Path], ordinary: Ordinary, family: str, report: Callable[[str], None]
) -> None:
    """In the first and in the second engine, which attaches without a load."""
    first, second = place.start(models[family]).ready(), place.start(models[family]).ready()
    assert first.ask(engine.generate) == second.ask(engine.generate) == ordinary(models[family])
    for name, made in (("first", first), ("second", second)):
        _, attach, make = made.attached()
        report(f"{family}, {name} engine: attached in {attach:.1f} ms, model made in {make:.1f} ms")
        made.close()


@pytest.mark.deep
def test_a_changed_checkpoint_is_loaded_for_new_engines(place: Place, ordinary: Ordinary, tmp_path: Path) -> None:
    """Running engines keep their weights."""
    model = checkpoints.write(tmp_path / "llama", "llama", seed=1)
    before = place.start(model)
    tokens = before.ask(engine.generate)
    checkpoints.write(model, "llama", seed=2)
    after = place.start(model)
    changed = after.ask(engine.generate)
    assert changed == ordinary(model) != tokens
    assert before.ask(engine.generate) == tokens
    assert before.attached()[0] != after.attached()[0]
    before.close()
    after.close()


def test_refresh_loads_a_copy_for_new_engines(place: Place, pair: list[Engine], models: dict[str, Path]) -> None:
    """``refresh`` and ``preload`` use the label of an engine with the same options."""
    (old,) = _held(place)
    assert run("preload", Path("llama"), place, cwd=models["llama"].parent) == pair[0].attached()[0]
    assert _held(place) == {old}
    assert run("refresh", models["llama"], place) == f"{pair[0].attached()[0]}, generation 2"
    with place.start(models["llama"]) as made:
        assert made.ask(engine.generate) == pair[0].ask(engine.generate)
        assert len(_held(place)) == 2
        assert made.attached()[0] == pair[0].attached()[0]


def _held(place: Place) -> set[str]:
    with place.client() as client:
        return {info["object_id"] for info in client.list_objects() if info["leases"]}


def test_an_engine_refuses_to_reload_weights(pair: list[Engine]) -> None:
    """And continues with its weights."""
    tokens = pair[0].ask(engine.generate)
    with pytest.raises(Failed, match="NotShareable: the weights of --load-format shared_rpc are those of all engines"):
        pair[0].ask(engine.reload)
    with pytest.raises(Failed, match="NotShareable: the weights of --load-format shared_rpc are those of all engines"):
        pair[0].ask(engine.reload_from, {"lm_head.weight": (512, 160)})
    assert pair[0].ask(engine.generate) == tokens


@on_a_host
def test_an_engine_that_writes_to_a_weight_crashes_alone(place: Place, pair: list[Engine], models: dict[str, Path]) -> None:
    """With a message that names the weight; the weights are unchanged."""
    tokens = pair[0].ask(engine.generate)
    faulty = place.start(models["llama"])
    with pytest.raises(Ended, match=rf"exit code -{signal.SIGSEGV.value};"):
        faulty.ask(engine.write_into_a_weight)
    assert "read-only" in faulty.written()
    assert pair[0].ask(engine.generate) == tokens


def test_a_killed_engine_leaves_nothing(place: Place, models: dict[str, Path]) -> None:
    """Its lease is released, and the weights stay for the next one."""
    made = place.start(models["qwen"]).ready()
    with place.client() as client:
        (held,) = [info for info in client.list_objects() if any(holder["pid"] == made.pid for holder in info["holders"])]
        made.kill()
        (left,) = [info for info in client.list_objects() if info["object_id"] == held["object_id"]]
        assert left["leases"] == held["leases"] - 1
        assert made.pid not in [session["pid"] for session in client.list_sessions()]


def test_adapters_work_over_shared_weights(place: Place, pair: list[Engine], models: dict[str, Path], tmp_path: Path) -> None:
    """They are private to their engine."""
    adapter = checkpoints.write_adapter(tmp_path / "adapter")
    with place.start(models["llama"], enable_lora=True, max_lora_rank=8) as made:
        adapted = made.ask(engine.generate, 12, adapter)
        assert made.ask(engine.generate) == pair[0].ask(engine.generate)
        assert made.attached()[0] == pair[0].attached()[0]
    with place.start(models["llama"], load_format="auto", enable_lora=True, max_lora_rank=8) as alone:
        assert alone.ask(engine.generate, 12, adapter) == adapted != pair[0].ask(engine.generate)


@on_a_host
def test_a_sleeping_engine_unmaps_the_weights_and_others_continue(pair: list[Engine]) -> None:
    """After waking it generates the same tokens, from weights at the same addresses."""
    tokens, awake = pair[0].ask(engine.generate), pair[0].ask(engine.addresses)
    pair[0].ask(engine.sleep)
    asleep = pair[0].ask(engine.tensors)
    assert all(where.startswith("---p") for is_parameter, where in asleep.values() if is_parameter), asleep
    assert pair[1].ask(engine.generate) == tokens
    assert "the weights stay on their device" in pair[0].written()
    pair[0].ask(engine.wake)
    assert pair[0].ask(engine.addresses) == awake
    assert pair[0].ask(engine.generate) == tokens


@on_a_host
def test_weights_are_evicted_when_all_engines_sleep(own_place: Place, models: dict[str, Path]) -> None:
    """As one copy for all; the first engine to wake restores them."""
    words = ["serve", "shared_rpc_vllm.app", "--base-path", own_place.base_path, "--device", "cpu"]
    with serving(*words, "--spill-dir", str(own_place.folder)):
        both = [own_place.start(models["llama"], {"SHARED_TENSOR_ROLE": "client"}).ready() for _ in range(2)]
        tokens = both[0].ask(engine.generate)
        for made in both:
            made.ask(engine.sleep)
        with own_place.client() as client:
            (info,) = client.list_objects()
            assert (info["tier"], info["active"], info["leases"]) == ("file", 0, 2)
            assert info["nbytes"] <= info["copies"].pop("file") < 1.1 * info["nbytes"]
            assert not info["copies"]
            both[0].ask(engine.wake)
            (info,) = client.list_objects()
            assert (info["tier"], info["active"]) == ("device", 1)
        both[1].ask(engine.wake)
        assert [made.ask(engine.generate) for made in both] == [tokens, tokens]


REFUSED = [
    ({"hf_overrides": engine.override}, "NotShareable: model_config.hf_overrides is <function override"),
    ({"quantization": "fp8"}, "NotShareable: model.layers.0.self_attn.qkv_proj is of Fp8"),
    ({"cpu_offload_gb": 0.001}, "NotShareable: the weights cannot be shared with --cpu-offload-gb"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=[next(iter(options)) for options, _ in REFUSED])
def test_unsupported_weights_are_refused_by_name(
    place: Place, models: dict[str, Path], options: dict[str, Any], words: str
) -> None:
    """Before anything is loaded."""
    loaded = place.loaded()
    with pytest.raises(Failed, match=re.escape(words)):
        place.start(models["llama"], **options).ready()
    assert place.loaded() == loaded


@pytest.mark.parametrize("misfit", [*deep(False), True], ids=["before it is asked for", "when the model is made"])
def test_with_fallback_they_are_loaded_privately(
    place: Place, pair: list[Engine], models: dict[str, Path], misfit: bool
) -> None:
    """With one warning that has the reason."""
    options = {} if misfit else {"hf_overrides": engine.override}
    environ = {"TEST_MISFIT": "1"} if misfit else {}
    with place.start(models["llama"], environ, {"fallback": True}, **options) as made:
        assert made.ask(engine.generate) == pair[0].ask(engine.generate)
        assert not any("memfd" in where for _, where in made.ask(engine.tensors).values())
        assert made.written().count("the weights are loaded privately (fallback): NotShareable: ") == 1


def test_a_server_of_another_app_is_named(own_place: Place, models: dict[str, Path]) -> None:
    """It may have an older release of this plugin, without this endpoint."""
    provider = Provider(own_place.base_path, device=DEVICE, execution_mode="server")
    path = f"{own_place.base_path}-{device_tag(device_id(DEVICE))}.sock"
    with Server(provider, socket_path=path), pytest.raises(Failed, match=f"the server at {path} has no endpoint 'vllm_weig"):
        own_place.start(models["llama"]).ready()


@two_devices
@pytest.mark.deep
def test_ranks_attach_to_their_own_parts(place: Place, models: dict[str, Path]) -> None:
    """The server loads them one by one, without the other ranks."""
    environ = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with place.start(models["mixtral"], environ, load_format="auto", tensor_parallel_size=2) as alone:
        tokens = alone.ask(engine.generate)
    with place.start(models["mixtral"], environ, tensor_parallel_size=2) as made:
        assert made.ask(engine.generate) == tokens
        assert sorted(re.findall(r"attached to '(mixtral ./2)", made.written())) == ["mixtral 1/2", "mixtral 2/2"]


def test_engines_continue_when_the_loading_process_is_killed(place: Place, pair: list[Engine], models: dict[str, Path]) -> None:
    """The broker holds the memory: the next engine attaches without a load."""
    tokens, loaded = pair[0].ask(engine.generate), place.loaded()
    _, worker, *_ = place.pids()
    os.kill(worker, signal.SIGKILL)
    assert pair[0].ask(engine.generate) == tokens
    with place.start(models["llama"]) as made:
        assert made.ask(engine.generate) == tokens
    assert place.loaded() == loaded


def test_engines_continue_when_the_server_is_killed(place: Place, pair: list[Engine], models: dict[str, Path]) -> None:
    """Their mappings keep the memory. The next engine starts a server, which loads again."""
    tokens, loaded = pair[0].ask(engine.generate), place.loaded()
    broker, *_ = place.pids()
    os.kill(broker, signal.SIGKILL)
    assert pair[0].ask(engine.generate) == tokens
    with place.start(models["llama"]) as made:
        assert made.ask(engine.generate) == tokens
    assert place.loaded() == loaded + 1
