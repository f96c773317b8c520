"""Benchmarks of time, memory and numbers, beside shared-tensor 0.2.16 and a raw socket echo.

``python -m benchmarks attach``, ``rpc`` and ``scale`` print a table and write JSON under ``benchmarks/results/``. Every
server is a process of its own, and what is compared is measured in turns within one run, so that the ratios hold where
the absolute times drift. shared-tensor takes part where it is installed (``pip install --no-deps shared-tensor==0.2.16``:
it asks for an old numpy that it does not need).
"""
