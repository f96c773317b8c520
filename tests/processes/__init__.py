"""Servers, brokers, workers and clients as processes, seen from inside: kills, starts, frames, faults."""
