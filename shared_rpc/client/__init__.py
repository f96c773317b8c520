"""The drivers of operations: connections, sessions, and the pools of memory that calls use.

The one for coroutines is in :mod:`shared_rpc.client.asynchronous`: a command that only sends queries needs no event loop's
library.
"""
