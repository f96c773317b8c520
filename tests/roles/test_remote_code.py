"""Models of Hugging Face's remote code, whose classes travel as code: transformers works with them in a client too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.interpreter import Interpreter
from tests.kit.processes import python

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a server of these tests has its socket, and what it has loaded."""
    folder = tmp_path_factory.mktemp("remote")
    folder.chmod(0o700)
    return folder


@pytest.fixture(scope="module")
def environ(folder: Path) -> dict[str, str]:
    """Of all processes here."""
    return {"HF_HUB_OFFLINE": "1", "SHARED_TENSOR_BASE_PATH": str(folder / "s")}


@pytest.fixture(scope="module")
def repository(folder: Path) -> Path:
    """A model of remote code, as it lies on the hub."""
    repository = folder / "repository"
    repository.mkdir()
    (repository / "configuration_remote.py").write_text(CONFIGURATION)
    (repository / "modeling_remote.py").write_text(MODEL)
    auto = {"AutoConfig": "configuration_remote.RemoteConfig", "AutoModel": "modeling_remote.RemoteModel"}
    (repository / "config.json").write_text(json.dumps({"model_type": "remote-of-a-test", "size": 4, "auto_map": auto}))
    return repository


@pytest.fixture(scope="module", autouse=True)
def server(folder: Path, repository: Path, environ: dict[str, str]) -> Iterator[None]:
    """A process that has loaded that code."""
    modules = {"HF_MODULES_CACHE": str(folder / "modules of the server")}
    server = python(SERVER.format(repository=str(repository)), environ=environ | modules)
    server.expect("serving")
    yield
    server.kill()


@pytest.fixture
def client(environ: dict[str, str], tmp_path: Path) -> Iterator[Interpreter]:
    """A process that has not."""
    interpreter = Interpreter(environ | {"HF_MODULES_CACHE": str(tmp_path / "modules of the client")})
    yield interpreter
    interpreter.kill()


def test_what_came_can_be_saved_and_loaded_again(client: Interpreter, folder: Path, tmp_path: Path) -> None:
    """``save_pretrained`` writes weights, configuration and code, which that process can load."""
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
        base_path=str(folder / "s"),
        device="cpu",
        folder=str(tmp_path / "saved"),
    )
    assert answer == [["config.json", "configuration_remote.py", "modeling_remote.py"], True, True, "RemoteModel"]
