"""The drivers of operations: connections, sessions, and the pools of memory that calls use.

The one for coroutines is in :mod:`shared_rpc.client.asynchronous`: a command that only asks does without an event loop's
library.
"""
