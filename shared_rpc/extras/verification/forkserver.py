"""Imports for the fork server of a verification, so that a hundred client processes need not import torch one by one.

The imports are done once, and each client process begins with them. No GPU is touched, so each process has a session,
mappings and a CUDA context of its own, as if it had imported torch itself.
"""

import gc
import os
import resource

import torch

from shared_rpc import Client
from shared_rpc.extras.verification import clients

__all__ = ["clients"]

os.setsid()  # Ctrl-C and a closed terminal are for the verification alone
torch.set_num_threads(1)  # all processes must add in the same order
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # some of them crash on purpose
Client(socket_path="unused").close()  # which imports what a client of a process with torch needs, and does not connect
gc.collect()
gc.freeze()
