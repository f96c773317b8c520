"""A server whose endpoints run in worker processes: it holds what they make, and needs neither torch nor CUDA."""
