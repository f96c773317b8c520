"""Benchmarks of time, memory and resources, compared with shared-tensor 0.2.16 and a raw socket echo.

``python -m benchmarks NAME`` prints a table and writes JSON under ``benchmarks/results/``. Every server is a separate
process, and the sides of a comparison are measured in turns within one run, so that the ratios hold even if absolute times
drift. shared-tensor is included if it is installed (``pip install --no-deps shared-tensor==0.2.16``, because it requires an
old numpy that it does not need).
"""
