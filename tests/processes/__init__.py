"""Servers, brokers, workers and clients as processes, from within: kills, starts, wires, faults."""
