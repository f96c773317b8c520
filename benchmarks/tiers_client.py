"""An engine of the benchmark of tiers: a process that has a model attached, sleeps and wakes when it is told to."""

from __future__ import annotations

import time

import torch

from benchmarks.memory import private_bytes
from benchmarks.processes import configuration, next_command, say
from benchmarks.stack import digest
from shared_rpc import Client


def main() -> None:
    """Answer commands until stdin is closed. Configuration: ``socket``, ``device``, ``mebibytes``."""
    config = configuration()
    torch.set_num_threads(1)
    with (
        Client(socket_path=config["socket"], device=config["device"], timeout=300.0) as client,
        client.call("model", config["mebibytes"], 0) as handle,
    ):
        answer = digest(handle.value)
        say(ready=True)
        while (command := next_command()) is not None:
            match command["do"]:
                case "suspend":
                    handle.suspend()
                case "resume":
                    handle.resume()
            ended = time.monotonic()
            same = handle.suspended or digest(handle.value) == answer
            say(ended=ended, same=same, private=private_bytes())


if __name__ == "__main__":
    main()
