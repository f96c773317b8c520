"""Other people's loaders over shared memory: what they would load, a server has loaded once, and processes attach.

``transformers``, ``sentence_transformers`` and ``diffusers`` are modules here, each with a context manager ``shared()``. They
import the library of their name when they are used. ``app`` is what a server runs for all of them.
"""
