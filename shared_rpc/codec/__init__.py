"""Encoding of values as records, and decoding. ``arguments`` and ``results`` are the entry points; both load torch."""
