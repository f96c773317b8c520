"""The programs of a verification: the endpoints of its server, and the commands of its clients."""

from __future__ import annotations

import hashlib
import importlib
import json
import resource
import sys
from typing import TYPE_CHECKING, Any

from shared_rpc import Client, Provider

if TYPE_CHECKING:
    import torch

#: Width of a layer, which has 4 MiB: a matrix of floats.
_WIDTH, LAYER = 1024, 4 << 20
#: Seconds for a call of a client; and to wait for a server.
_PATIENCE, _STARTUP = 120.0, 10.0

provider = Provider()


def build(nbytes: int, seed: int, device: str) -> torch.nn.Module:
    """Build a stack of linear layers with random weights; the same bits for the same arguments, in any process of a machine."""
    import torch

    torch.manual_seed(seed)
    stack = torch.nn.Sequential()
    for _ in range(nbytes // LAYER):
        linear = torch.nn.Linear(_WIDTH, _WIDTH, bias=False, device=device)
        torch.nn.init.kaiming_normal_(linear.weight)  # with the default, the outputs of many layers would be zeros
        stack.extend([linear, torch.nn.GELU()])
    return stack.eval().requires_grad_(False)


def _model(nbytes: int, seed: int) -> torch.nn.Module:
    # An endpoint runs with the provider's GPU as the current one.
    return build(nbytes, seed, "cpu" if provider.device_id == "cpu" else "cuda")


provider.share("model", managed=True)(_model)
provider.share("protected", managed=True, access="read")(_model)


class Subject:
    """A client process: each command is a method, and its result is the answer. Tests have subjects that break a guarantee."""

    def __init__(self, server: str) -> None:
        self.client = Client(socket_path=server, timeout=_PATIENCE, connect_timeout=_STARTUP)
        #: Handles acquired by ``attach``. The other commands use the last one.
        self._held: list[Any] = []

    def attach(self, nbytes: int, seed: int, endpoint: str = "model") -> tuple[str, str]:
        """Call an endpoint, and keep the handle. Returns the object's id, and the digest of the model."""
        self._held.append(self.client.call(endpoint, nbytes, seed))
        return self._held[-1].object_id, self.digest()

    def detach(self) -> None:
        """Release all handles."""
        while self._held:
            self._held.pop().release()

    def cycles(self, count: int, nbytes: int, seed: int) -> None:
        """Attach and release ``count`` times."""
        for _ in range(count):
            self.client.call("model", nbytes, seed).release()

    def digest(self, **alone: Any) -> str:
        """Hash the bits of a forward pass through the attached model, or one that this process builds for itself."""
        import torch

        model = build(**alone) if alone else self._held[-1].value
        inputs = torch.linspace(-1, 1, 4 * _WIDTH).reshape(4, _WIDTH).to(next(model.parameters()).device)
        with torch.inference_mode():
            outputs = model(inputs).cpu().contiguous()
        return hashlib.sha256(bytes(outputs.view(torch.uint8).flatten().tolist())).hexdigest()

    def read(self, count: int) -> Any:
        """Read the first numbers of the first weight."""
        return next(self._held[-1].value.parameters())[0, :count].tolist()

    def write(self, index: int, value: float) -> None:
        """Overwrite a number of the first weight. The write is complete when the answer arrives."""
        next(self._held[-1].value.parameters())[0, index] = value
        self.read(index + 1)  # waits for a GPU


def _main(server: str, subject: str) -> None:
    """Answer the commands of the standard input, until that ends."""
    import torch

    torch.set_num_threads(1)  # all processes must add in the same order
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # some of them crash on purpose
    module, _, name = subject.partition(":")
    process = getattr(importlib.import_module(module), name)(server)
    for line in sys.stdin:
        do, options = json.loads(line)
        try:
            answer = getattr(process, do)(**options), ""
        except Exception as error:
            answer = None, f"raised {type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
