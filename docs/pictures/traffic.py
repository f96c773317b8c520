"""A process that makes calls while its standard input is open, and submits a slow task."""

import select
import sys

import torch

from shared_rpc import Client

with Client(device="cpu") as client:
    ids = torch.arange(32)
    client.submit("train", steps=3000)
    print("calling", flush=True)
    while not select.select([sys.stdin], [], [], 0.002)[0]:
        client.call("lookup", ids)
        client.call("load_model").release()
