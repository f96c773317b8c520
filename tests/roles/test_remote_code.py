"""Models of Hugging Face's remote code, whose classes travel as code: transformers works with them in a client too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit.interpreter import Interpreter
from tests.kit.processes import Child, python

pytest.importorskip("transformers")

CONFIGURATION = """
from transformers import PretrainedConfig

class RemoteConfig(PretrainedConfig):
    model_type = "remote-of-a-test"

    def __init__(self, size=4, **rest):
        self.size = size
        super().__init__(**rest)
"""

MODEL = """
import torch
from transformers import PreTrainedModel
from .configuration_remote import RemoteConfig

class RemoteModel(PreTrainedModel):
    config_class = RemoteConfig

    def __init__(self, config):
        super().__init__(config)
        self.layer = torch.nn.Linear(config.size, config.size)
        self.post_init()

    def forward(self, x):
        return self.layer(x)
"""

SERVER = """
    import sys
    from transformers import AutoConfig, AutoModel
    from shared_rpc import Provider, Server

    provider = Provider(device="cpu")

    @provider.share
    def load():
        config = AutoConfig.from_pretrained({repository!r}, trust_remote_code=True)
        return AutoModel.from_config(config, trust_remote_code=True).eval()

    @provider.share(cache=False)
    def use(model, x):
        return model(x).detach()

    with Server(provider):
        print("serving")
        sys.stdin.read()
    """


def test_what_came_can_be_saved_and_loaded_again(tmp_path: Path, base_path: str, children: list[Child]) -> None:
    """``save_pretrained`` writes weights, configuration and code, which that process can load."""
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "configuration_remote.py").write_text(CONFIGURATION)
    (repository / "modeling_remote.py").write_text(MODEL)
    auto = {"AutoConfig": "configuration_remote.RemoteConfig", "AutoModel": "modeling_remote.RemoteModel"}
    (repository / "config.json").write_text(json.dumps({"model_type": "remote-of-a-test", "size": 4, "auto_map": auto}))
    server = python(SERVER.format(repository=str(repository)), environ={"HF_MODULES_CACHE": str(tmp_path / "of the server")})
    children.append(server)
    server.expect("serving")
    client = Interpreter({"HF_MODULES_CACHE": str(tmp_path / "of the client")})
    children.append(client)
    answer = client.run(
        """
        from transformers import AutoModel
        model = client.call("load")
        model.save_pretrained(folder)
        import os
        files = sorted(name for name in os.listdir(folder) if name.endswith((".py", ".json")))
        again = AutoModel.from_pretrained(folder, trust_remote_code=True)
        x = torch.ones(1, 4)
        used = client.call("use", model, x)
        answer = [files, torch.equal(again(x), model(x)), torch.equal(used, model(x)), type(again).__name__]
        """,
        base_path=base_path,
        device="cpu",
        folder=str(tmp_path / "saved"),
    )
    assert answer == [["config.json", "configuration_remote.py", "modeling_remote.py"], True, True, "RemoteModel"]
