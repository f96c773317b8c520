"""An inference worker, which lives briefly: it attaches to the served weights, and answers until its router hangs up."""

from __future__ import annotations

import json
import select
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import torch
from messages import Answer, Request, frame
from models import architecture

from shared_rpc import Client, Handle
from shared_rpc.errors import SharedRPCError

#: Seconds after which a worker that nobody asks looks whether its weights are still the served ones.
IDLE = 0.2

#: After it a GPU does nothing for the process any more. In newer releases of torch.
BROKEN: type[Exception] | tuple[()] = getattr(torch, "AcceleratorError", ())


class Served:
    """What the manager serves of some models: attached at once, and anew when another version has taken its place."""

    def __init__(self, client: Client, names: tuple[str, ...]) -> None:
        self._client = client
        self._handles: dict[str, Handle[torch.nn.Module]] = {name: client.call("serving", name) for name in names}

    def find(self, name: str) -> tuple[torch.nn.Module, int]:
        """The model, and its generation."""
        return self._handles[name].value, self._handles[name].generation

    def renew(self) -> None:
        """Let go of what is not served any more. Where nobody can be asked, what is mapped is as good as before."""
        for name, handle in self._handles.items():
            try:
                if not handle.is_current():
                    self._handles[name] = self._client.call("serving", name)
                    handle.release()
            except (SharedRPCError, LookupError):
                continue


class Copies:
    """What a process has that shares nothing: a copy of its own, loaded as everybody does."""

    def __init__(self, weights: str, version: str, device: str) -> None:
        from safetensors.torch import load_file

        self._models: dict[str, torch.nn.Module] = {}
        for folder in Path(weights).glob(f"*/{version}"):
            model = architecture(folder.parent.name, json.loads((folder / "config.json").read_text())).to(device)
            model.load_state_dict(load_file(folder / "model.safetensors"))
            self._models[folder.parent.name] = model

    def find(self, name: str) -> tuple[torch.nn.Module, int]:
        return self._models[name], 0

    def renew(self) -> None:
        pass


def attached(router: socket.socket, device: str, threads: int, *names: str) -> None:
    """A worker's main function: the weights are the manager's."""
    _serve(router, lambda: Served(Client(device=device, connect_timeout=0), names), device, threads)


def alone(router: socket.socket, device: str, threads: int, weights: str, version: str) -> None:
    """The same with a copy of its own, to compare with."""
    _serve(router, lambda: Copies(weights, version, device), device, threads)


def _serve(router: socket.socket, prepare: Callable[[], Served | Copies], device: str, threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the router's, who hangs up
    torch.set_num_threads(threads)
    with router, suppress(BrokenPipeError, ConnectionResetError), torch.inference_mode():  # it may hang up at any time
        try:
            models = prepare()
        except Exception as error:
            router.sendall(frame(Answer(error=f"{type(error).__name__}: {error}")))
            return
        router.sendall(frame(Answer()))
        while True:
            ready, _, _ = select.select([router], [], [], IDLE)
            models.renew()
            if not ready:
                continue
            request = _receive(router)
            if request is None:
                return
            router.sendall(frame(_answer(models, request, device)))


def _answer(models: Served | Copies, request: Request, device: str) -> Answer:
    try:
        model, generation = models.find(request.model)
        values = torch.frombuffer(bytearray(request.data), dtype=getattr(torch, request.dtype)).view(request.shape)
        logits = model(values.to(device)).flatten().tolist()
    except BROKEN:
        raise  # another worker is to try
    except Exception as error:
        return Answer(error=f"{type(error).__name__}: {error}")
    return Answer(generation, logits)


def _receive(peer: socket.socket) -> Request | None:
    with peer.makefile("rb") as stream:
        size = stream.read(4)
        return msgspec.msgpack.decode(stream.read(int.from_bytes(size, "big")), type=Request) if size else None
