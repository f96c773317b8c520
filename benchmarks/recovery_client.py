"""A client of a broker whose worker is killed: it attaches again and again, at a steady rate, and computes with what it has.

Configuration: ``socket``, ``device``, ``call``. Commands: ``attaches`` at ``rate`` a second, answered with the seconds of each
and when it began; ``digest`` of a forward pass over an attached model; ``used``, bytes of the device.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

import torch

from benchmarks import models  # noqa: F401  the classes of what is attached
from benchmarks.memory import used
from benchmarks.ours import load_lazy_modules
from benchmarks.processes import configuration, next_command, say
from shared_rpc import Client


def attach_at_a_rate(path: str, call: list[Any], count: int, rate: float) -> dict[str, Any]:
    """Attach with a new client: a connection, a session, the model, and the end of all of them."""
    began = time.time()
    start, times, errors = time.perf_counter(), [], []
    for number in range(count):
        time.sleep(max(start + number / rate - time.perf_counter(), 0))
        begin = time.perf_counter()
        try:
            with Client(socket_path=path, timeout=30.0, connect_timeout=0) as client, client.call(*call) as handle:
                assert handle.value is not None
                times.append((begin - start, time.perf_counter() - begin))
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return {"began": began, "times": times, "errors": errors}


def digest(path: str, call: list[Any], device: str) -> str:
    """Hash the bits of a forward pass through every feed-forward layer of a model that is attached for it."""
    with Client(socket_path=path) as client, client.call(*call) as handle, torch.inference_mode():
        module: Any = handle.value
        hidden = module.embed_tokens(torch.arange(64, device=device))
        for layer in module.layers:
            normed = layer.post_attention_layernorm(hidden)
            gated = torch.nn.functional.silu(layer.mlp.gate_proj(normed)) * layer.mlp.up_proj(normed)
            hidden = hidden + layer.mlp.down_proj(gated) + layer.self_attn.o_proj(layer.self_attn.q_proj(normed))
        logits = module.lm_head(module.norm(hidden))
        return hashlib.sha256(logits.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()


def main() -> None:
    """Answer commands until stdin is closed."""
    config = configuration()
    path, call, device = config["socket"], config["call"], config["device"]
    if device != "cpu":
        torch.zeros(1, device=device)
    load_lazy_modules(device)
    say(ready=True)
    while (command := next_command()) is not None:
        if "attaches" in command:
            say(**attach_at_a_rate(path, call, command["attaches"], command["rate"]))
        elif "digest" in command:
            say(digest=digest(path, call, device))
        else:
            say(used=used(device))


if __name__ == "__main__":
    main()
