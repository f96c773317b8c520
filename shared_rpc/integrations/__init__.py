"""Other libraries' loaders over shared memory: a server loads once, and processes attach instead of loading.

``transformers``, ``sentence_transformers`` and ``diffusers`` are modules here, each with a context manager ``shared()``. They
import the library of their name on use. ``app`` is the server's app for all of them.
"""
