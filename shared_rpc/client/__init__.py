"""The clients: every operation once, as a generator, and the shells that drive it.

The one for coroutines is in :mod:`shared_rpc.client.aio`: a command that only asks does without an event loop's library.
"""
