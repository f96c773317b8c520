"""Models of transformers that ordinary code attaches: the weights are shared, all else belongs to the process."""

from __future__ import annotations

import copy
import gc
import io
import json
import os
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from shared_rpc import Provider, Server, errors
from shared_rpc.integrations import loading
from shared_rpc.integrations import transformers as integration
from shared_rpc.integrations.transformers import release, shared
from tests.integrations.checkpoints import FAMILIES, decoder, inputs, save
from tests.integrations.comparing import same_bits, shared_parameters
from tests.kit.processes import eventually


def attached(provider: Provider, name: str, loader: Any = AutoModelForCausalLM, **options: Any) -> Any:
    """Load in a block, with an error unless it attaches."""
    with shared(provider, fallback=False):
        return loader.from_pretrained(name, **options)


def own(provider: Provider, name: str, loader: Any = AutoModelForCausalLM, **options: Any) -> Any:
    """Load outside of all blocks."""
    return loader.from_pretrained(name, **options).to(torch.device("cpu" if provider.device == "cpu" else "cuda"))


def outputs(model: Any) -> list[torch.Tensor]:
    """Compute something."""
    with torch.no_grad():
        found = model(**inputs(model)).to_tuple()
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def objects(provider: Provider) -> list[Any]:
    """Return the server's objects, with the number of holding processes."""
    return [provider.get_object_info(each["object_id"]) for each in provider.list_objects()]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_attached_without_a_copy(family: str, provider: Provider, tmp_path: Path) -> None:
    """Every parameter is mapped read-only, at one address for all, and has the bits of a private model."""
    name = save(FAMILIES[family](), tmp_path / "checkpoint")
    loader = getattr(transformers, AutoConfig.from_pretrained(name).architectures[0])
    # The file has other dtypes, and each expert of Mixtral separately: all conversions are made in the server.
    one, other = (attached(provider, name, loader, dtype=torch.bfloat16) for _ in range(2))
    assert one is not other
    assert shared_parameters(one) == shared_parameters(other) == {key: each.data_ptr() for key, each in one.named_parameters()}
    mine = own(provider, name, loader, dtype=torch.bfloat16)
    assert same_bits(mine, one)
    assert type(one) is type(mine)
    assert one.config.to_dict() == mine.config.to_dict()
    assert all(torch.equal(left, right) for left, right in zip(outputs(mine), outputs(one), strict=True))


def test_equivalent_requests_share_a_model(provider: Provider, checkpoint: str) -> None:
    """Either class, a dtype's name, a relative path, the file's own settings: it is loaded once."""
    one = attached(provider, checkpoint, dtype=torch.bfloat16)
    own(provider, checkpoint).to(torch.bfloat16).save_pretrained(checkpoint + "-bf16")
    ways = [
        attached(provider, checkpoint, transformers.LlamaForCausalLM, dtype="bfloat16"),
        attached(provider, os.path.relpath(checkpoint), torch_dtype=torch.bfloat16),
        attached(provider, checkpoint, config=AutoConfig.from_pretrained(checkpoint), dtype=torch.bfloat16),
        attached(provider, checkpoint, dtype=torch.bfloat16, attn_implementation="eager", output_loading_info=True)[0],
    ]
    assert [shared_parameters(each) == shared_parameters(one) for each in ways] == [True] * 4
    by_file = [
        attached(provider, checkpoint + "-bf16", **options) for options in ({}, {"dtype": "auto"}, {"dtype": torch.bfloat16})
    ]
    assert len({each.lm_head.weight.data_ptr() for each in by_file}) == 1


def test_different_weights_are_separate_models(provider: Provider, checkpoint: str) -> None:
    """Another dtype, class or configuration has its own memory."""
    ways: list[dict[str, Any]] = [
        {},
        {"dtype": torch.bfloat16},
        {"loader": AutoModel},
        {"rms_norm_eps": 1e-3},
        {"num_hidden_layers": 1},
    ]
    addresses = {next(attached(provider, checkpoint, **way).parameters()).data_ptr() for way in ways}
    assert len(addresses) == len(ways)


def test_models_are_private_to_their_process(provider: Provider, checkpoint: str) -> None:
    """Configuration, mode, hooks, and replaced modules do not affect another model over the same memory."""
    one, other = attached(provider, checkpoint), attached(provider, checkpoint)
    one.config.use_cache = False
    one.generation_config.max_new_tokens = 7
    one.train()
    one.register_forward_hook(lambda *_: None)
    one.lm_head = torch.nn.Identity()
    assert other.config.use_cache
    assert other.generation_config.max_new_tokens is None
    assert not other.training
    assert not other._forward_hooks
    assert isinstance(other.lm_head, torch.nn.Linear)
    assert one.config.name_or_path == checkpoint


def test_tensors_other_than_parameters_are_private(provider: Provider, tmp_path: Path) -> None:
    """Statistics of a normalisation in train mode are written without affecting other models over the same weights."""
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic")
    name = save(transformers.ResNetForImageClassification(config), tmp_path / "resnet")
    one, other = (attached(provider, name, transformers.ResNetForImageClassification) for _ in range(2))
    before = {key: buffer.clone() for key, buffer in other.named_buffers()}
    one.train()(torch.linspace(0, 1, 3 * 32 * 32, device=one.device).reshape(1, 3, 32, 32))
    assert all(torch.equal(before[key], buffer) for key, buffer in other.named_buffers())
    assert not any(torch.equal(before[key], buffer) for key, buffer in one.named_buffers())
    assert shared_parameters(one) == shared_parameters(other) == {key: each.data_ptr() for key, each in one.named_parameters()}


def test_weights_missing_in_the_checkpoint_are_private(provider: Provider, tmp_path: Path) -> None:
    """A new head is made once, copied by each process, and can be trained over the frozen base."""
    name = save(FAMILIES["BERT"](), tmp_path / "bert")
    one, other = (attached(provider, name, AutoModelForSequenceClassification, num_labels=3) for _ in range(2))
    lacking = {"bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias"}
    assert {key for key, parameter in one.named_parameters() if parameter.requires_grad} == lacking
    assert {key for key, _ in one.named_parameters()} - shared_parameters(one).keys() == lacking
    assert same_bits(one, other)
    one.train()
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    one(**inputs(one), labels=torch.tensor([0, 2], device=one.device)).loss.backward()
    optimizer.step()
    assert not torch.equal(one.classifier.weight, other.classifier.weight)
    assert shared_parameters(one) == shared_parameters(other)


def test_pipelines_attach(provider: Provider, tmp_path: Path) -> None:
    """``pipeline(task, model=name)`` loads its model by the same method."""
    name = save(FAMILIES["ViT"](), tmp_path / "vit")
    (tmp_path / "vit" / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "ViTImageProcessorFast", "size": {"height": 16, "width": 16}})
    )
    picture = pytest.importorskip("PIL.Image").new("RGB", (16, 16), "teal")
    with shared(provider, fallback=False):
        one = transformers.pipeline("image-classification", model=name, device=provider_device(provider), use_fast=True)
    mine = transformers.pipeline("image-classification", model=name, device=provider_device(provider), use_fast=True)
    assert len(shared_parameters(one.model)) == len(list(one.model.parameters()))
    assert one(picture) == mine(picture)


def provider_device(provider: Provider) -> torch.device:
    """The device of a provider's results."""
    return torch.device("cpu" if provider.device == "cpu" else "cuda:0")


def test_copies_are_private(provider: Provider, checkpoint: str) -> None:
    """``copy.deepcopy``, ``pickle`` and ``torch.save`` make models of the same bits that share nothing, and hold no lease."""
    one = attached(provider, checkpoint)
    saved = io.BytesIO()
    torch.save(one, saved)
    saved.seek(0)
    copies = [copy.deepcopy(one), pickle.loads(pickle.dumps(one)), torch.load(saved, weights_only=False)]
    assert [(same_bits(one, each), shared_parameters(each)) for each in copies] == [(True, {})] * 3
    release(one)
    for each in copies:
        with pytest.raises(errors.CapabilityError, match="has no lease"):
            release(each)


def test_conversions_copy(provider: Provider, checkpoint: str) -> None:
    """A model of another dtype is the process's own, and the shared memory is unchanged."""
    one, other = attached(provider, checkpoint), attached(provider, checkpoint)
    one.to(torch.float64)
    assert shared_parameters(one) == {}
    assert same_bits(own(provider, checkpoint), other)


def test_leases_last_as_long_as_tensors(provider: Provider, checkpoint: str) -> None:
    """Until the last of the model, its parts, and views of its weights."""
    one = attached(provider, checkpoint)
    part: Any = one.model.layers[1].mlp
    del one
    gc.collect()
    assert [each["leases"] for each in objects(provider)] == [1]
    part = part.up_proj.weight[:1]
    gc.collect()
    assert [each["leases"] for each in objects(provider)] == [1]
    del part
    gc.collect()
    eventually(lambda: [each["leases"] for each in objects(provider)] == [0])


def test_leases_can_be_released(provider: Provider, checkpoint: str) -> None:
    """``release`` has an immediate effect; the tensors stay."""
    one = attached(provider, checkpoint)
    release(one)
    assert [each["leases"] for each in objects(provider)] == [0]
    provider.invalidate_endpoint_cache(loading.ENDPOINT)
    assert same_bits(own(provider, checkpoint), one)
    with pytest.raises(errors.CapabilityError, match="LlamaForCausalLM has no lease"):
        release(one)


def test_changed_checkpoints_are_loaded_again(provider: Provider, checkpoint: str) -> None:
    """By later loads; attached models keep the earlier weights."""
    before = attached(provider, checkpoint)
    bits = {name: tensor.clone() for name, tensor in before.state_dict().items()}
    save(decoder(), Path(checkpoint), seed=1)
    after = attached(provider, checkpoint)
    assert same_bits(own(provider, checkpoint), after)
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight)
    assert all(torch.equal(bits[name], tensor) for name, tensor in before.state_dict().items())


def test_checkpoints_changed_while_loading_are_requested_again(
    provider: Provider, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So no key has another checkpoint's weights."""
    load = transformers.PreTrainedModel._load_pretrained_model
    loads = []

    def change(*args: Any) -> Any:
        loads.append(load(*args))
        if len(loads) == 1:
            save(decoder(), Path(checkpoint), seed=1)
        return loads[-1]

    monkeypatch.setattr(transformers.PreTrainedModel, "_load_pretrained_model", staticmethod(change))
    one = attached(provider, checkpoint)
    assert len(loads) == 2
    monkeypatch.undo()
    assert same_bits(own(provider, checkpoint), one)


def test_revisions_are_resolved(provider: Provider, tmp_path: Path) -> None:
    """A branch of a repository is its present commit; later loads get the later one."""
    commits = ["a" * 40, "b" * 40]
    place = tmp_path / "cache" / "models--org--tiny"
    for seed, commit in enumerate(commits):
        save(decoder(), place / "snapshots" / commit, seed)
    (place / "refs").mkdir()
    options = {"cache_dir": tmp_path / "cache", "local_files_only": True}
    models = []
    for commit in commits:
        (place / "refs" / "main").write_text(commit)
        models.append(attached(provider, "org/tiny", **options))
        assert same_bits(own(provider, str(place / "snapshots" / commit)), models[-1])
    again = [attached(provider, "org/tiny", revision=revision, **options) for revision in (commits[0], "main")]
    assert [shared_parameters(each) for each in again] == [shared_parameters(each) for each in models]


# Models that are not shared.

REFUSED = {
    "state_dict": ({"state_dict": {}}, "state_dict"),
    "several devices": ({"device_map": {"model": "cpu", "lm_head": "disk"}}, "device_map=.*disk"),
    "tensor parallel": ({"tp_plan": "auto"}, "tp_plan='auto'"),
    "a file of GGUF": ({"gguf_file": "model.gguf", "config": transformers.LlamaConfig()}, "gguf_file='model.gguf'"),
    "an option without a key": ({"key_mapping": {"a": object()}}, "two options.*key_mapping.* cannot be compared.*object"),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_unshareable_models_are_refused_by_name(refused: str, provider: Provider, checkpoint: str) -> None:
    """Before anything is loaded."""
    options, text = REFUSED[refused]
    with pytest.raises(errors.CapabilityError, match=rf"LlamaForCausalLM.from_pretrained\(.*\) is not shared: {text}"):
        attached(provider, checkpoint, **options)
    assert objects(provider) == []


class Mine(transformers.LlamaForCausalLM):
    """A class defined in a script."""


def test_classes_of_the_script_are_refused(provider: Provider, checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server lacks the module, and the error says where the class must be."""
    monkeypatch.setattr(Mine, "__module__", "__main__")
    with pytest.raises(errors.CapabilityError, match="put Mine into a file"):
        attached(provider, checkpoint, Mine)


class Locked(transformers.LlamaForCausalLM):
    """A class whose models cannot be pickled."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.guard = threading.Lock()


def test_models_refused_by_the_server_are_loaded_ordinarily(provider: Provider, checkpoint: str) -> None:
    """The warning has the server's error, which names the attribute."""
    with shared(provider), pytest.warns(UserWarning, match=r"guard.*loaded for this process alone"):
        one = Locked.from_pretrained(checkpoint)
    assert shared_parameters(one) == {}
    with pytest.raises(errors.CapabilityError, match="guard"):
        attached(provider, checkpoint, Locked)


def test_remote_code_is_refused(provider: Provider, checkpoint: str) -> None:
    """Its class is the checkpoint's."""
    code = "from transformers import LlamaForCausalLM\n\n\nclass Remote(LlamaForCausalLM):\n    pass\n"
    (Path(checkpoint) / "modeling.py").write_text(code)
    config = Path(checkpoint, "config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), "auto_map": {"AutoModel": "modeling.Remote"}}))
    with pytest.raises(errors.CapabilityError, match=r"Remote.*trust_remote_code=True: its class is code of the checkpoint"):
        attached(provider, checkpoint, AutoModel, trust_remote_code=True)


def test_other_versions_are_an_error(provider: Provider, checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model made by another release is not attached: the error has both versions."""
    attached(provider, checkpoint)
    there = {**loading.versions_of(["transformers", "torch"]), "transformers": "4.0"}
    monkeypatch.setattr(integration, "versions_of", lambda names: there)
    with pytest.raises(errors.ConfigurationError, match=f"transformers {transformers.__version__} here, 4.0 there"):
        attached(provider, checkpoint)


def test_missing_libraries_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the command that installs it."""
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(errors.ConfigurationError, match="pip install sentence-transformers"):
        loading.library("sentence_transformers")


def test_servers_of_another_app_are_reported(base_path: str, checkpoint: str) -> None:
    """With the server's app, and the remedy."""
    with Server(Provider(base_path, execution_mode="server", device="cpu")) as server:
        client = Provider(base_path, execution_mode="client", device="cpu")
        with pytest.raises(errors.ConfigurationError, match=rf"{server.socket_path} belongs to another app.*serve_with"):
            attached(client, checkpoint)
        client.close()


def test_the_local_role_loads_ordinarily(base_path: str, checkpoint: str) -> None:
    """Nothing is replaced."""
    before = vars(transformers.PreTrainedModel)["from_pretrained"]
    with shared(Provider(base_path)):
        assert vars(transformers.PreTrainedModel)["from_pretrained"] is before
        one = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert shared_parameters(one) == {}
    assert all(parameter.requires_grad for parameter in one.parameters())


def test_servers_attach_to_themselves(owner: Provider, provider: Provider, checkpoint: str) -> None:
    """A script in the server role gets models of its own, over its clients' memory."""
    one, other, client = attached(owner, checkpoint), attached(owner, checkpoint), attached(provider, checkpoint)
    assert one is not other
    assert shared_parameters(one) == shared_parameters(other) == shared_parameters(client)


def test_blocks_restore_the_class(provider: Provider, checkpoint: str) -> None:
    """After the last one, even if it ends with an error."""
    before = vars(transformers.PreTrainedModel)["from_pretrained"]
    with pytest.raises(KeyError), shared(provider), shared(provider):
        raise KeyError
    assert vars(transformers.PreTrainedModel)["from_pretrained"] is before


def test_the_innermost_block_applies(provider: Provider, checkpoint: str) -> None:
    """After it, the outer one."""
    local = Provider(execution_mode="local")
    with shared(provider, fallback=True):
        with shared(provider, fallback=False), pytest.raises(errors.CapabilityError):
            AutoModelForCausalLM.from_pretrained(checkpoint, offload_folder="there")
        with shared(local):
            assert shared_parameters(AutoModelForCausalLM.from_pretrained(checkpoint)) == {}
        with pytest.warns(UserWarning, match="offload_folder"):
            AutoModelForCausalLM.from_pretrained(checkpoint, offload_folder="there")
        assert shared_parameters(AutoModelForCausalLM.from_pretrained(checkpoint)) != {}


def test_other_threads_load_ordinarily(provider: Provider, checkpoint: str) -> None:
    """A block applies to the thread that entered it."""
    with shared(provider), ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(AutoModelForCausalLM.from_pretrained, checkpoint).result()
        mine = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert shared_parameters(theirs) == {}
    assert shared_parameters(mine) != {}


def test_threads_have_their_own_blocks(provider: Provider, checkpoint: str) -> None:
    """Whichever ends first, the others attach."""
    with ThreadPoolExecutor(4) as pool:
        models = list(pool.map(lambda _: attached(provider, checkpoint), range(8)))
    assert len({id(model) for model in models}) == 8
    assert len({model.lm_head.weight.data_ptr() for model in models}) == 1
    assert len(objects(provider)) == 1
