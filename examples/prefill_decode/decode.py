"""The decode engine: it opens weights and cache by their tickets, and generates tokens for each line from the prefill engine.

It prints a line of JSON for each request: the tokens, and the released blocks of the cache.
"""

import json
import sys

import torch
from model import build, generate

from shared_rpc import Client, Ticket


def main() -> None:
    torch.set_num_threads(1)  # the engines share the cores
    tickets = {name: Ticket.from_json(text) for name, text in json.loads(sys.stdin.readline()).items()}
    with (
        Client.from_ticket(tickets["weights"]) as client,
        client.open_ticket(tickets["weights"]) as weights,
        client.open_ticket(tickets["cache"]) as cache,
    ):
        model = build(weights)
        for line in sys.stdin:
            handover = json.loads(line)
            number = handover.pop("request")
            tokens = generate(model, cache.value, **handover)
            print(json.dumps({"request": number, "tokens": tokens, "blocks": handover["blocks"]}), flush=True)


if __name__ == "__main__":
    main()
