"""A process that uses a model while its standard input is open."""

import sys

from shared_rpc import Client

with Client() as client, client.call("load_model"), client.create_buffer((8, 1024), "float32"):
    print("attached", flush=True)
    sys.stdin.read()
