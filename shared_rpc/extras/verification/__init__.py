"""Machinery of :mod:`shared_rpc.extras.verify`: processes, checks and outcomes."""
