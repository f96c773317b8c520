"""A server whose endpoints run in worker processes: it holds their results, and needs neither torch nor CUDA."""
